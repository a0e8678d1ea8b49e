"""One difference between two tensors: where it begins, both values to the last bit, how much differs.

Owns the record and its words, and comparing by bits. Leaves the stage and the cause to `locate.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor

from minigpt_dist.trace import tensor_bytes

Bits = numpy.ndarray[Any, numpy.dtype[numpy.unsignedinteger[Any]]]


@dataclass(frozen=True)
class Difference:
    """The first difference of a run: at `step` on `rank`, in `stage` of the step, in `element` (row-major) of `tensor`.

    observed, expected: values in decimal; *_bits: the same as hexadecimal bits. count of numel elements differ; max_ulp:
    the largest distance in representable numbers, None where that means nothing. cause: a guess, "" where the difference
    has no known shape.
    """

    step: int
    rank: int
    stage: str
    tensor: str
    element: int
    observed: str = ""
    expected: str = ""
    observed_bits: str = ""
    expected_bits: str = ""
    count: int = 0
    numel: int = 0
    max_ulp: int | None = None
    cause: str = ""

    def because(self, cause: str) -> Difference:
        """The same difference with a cause."""
        return replace(self, cause=cause)

    def at_stage(self, stage: str) -> Difference:
        """The same difference, blamed on another stage."""
        return replace(self, stage=stage)

    def render(self) -> str:
        """Three lines or fewer for a person."""
        lines = [
            f"first difference: step {self.step}, rank {self.rank}, stage {self.stage}, tensor {self.tensor}, element {self.element}"
        ]
        if self.observed:
            bits = [f" ({text})" if text else "" for text in (self.observed_bits, self.expected_bits)]
            ulp = "" if self.max_ulp is None else f", at most {self.max_ulp} ulp apart"
            many = f"; {self.count} of {self.numel} elements differ{ulp}" if self.count else ""
            lines.append(f"observed {self.observed}{bits[0]}, expected {self.expected}{bits[1]}{many}")
        if self.cause:
            lines.append(f"cause: {self.cause}")
        return "\n".join(lines)


def _bits(tensor: Tensor) -> Bits:
    """The elements as unsigned whole numbers, (numel,)."""
    bits: Bits = numpy.frombuffer(tensor_bytes(tensor), dtype=f"u{tensor.element_size()}")
    return bits


def _hexadecimal(element: Tensor) -> str:
    return f"0x{int(_bits(element)[0]):0{2 * element.element_size()}x}"


def bits_differ(a: Tensor, b: Tensor) -> Tensor | None:
    """Which elements differ in a bit, in the shape of `a`; None if type or shape differ already."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return None
    return torch.from_numpy(_bits(a) != _bits(b)).view(a.shape)


def differs(a: Tensor, b: Tensor) -> bool:
    """Is any bit, or the shape or the type, different?"""
    wrong = bits_differ(a, b)
    return wrong is None or bool(wrong.any())


def max_ulp(a: Tensor, b: Tensor) -> int | None:
    """The largest distance between elements in representable numbers; None for whole numbers, or where one is NaN."""
    if not a.is_floating_point() or not a.numel() or bool(a.isnan().any() or b.isnan().any()):
        return None

    def ordered(t: Tensor) -> Bits:
        """Bits such that a larger value has a larger number: negatives reversed, below the others."""
        bits = _bits(t)
        top = numpy.array(1 << (8 * t.element_size() - 1), dtype=bits.dtype)
        return numpy.where(bits & top, ~bits, bits | top)

    left, right = ordered(a), ordered(b)
    return int((numpy.maximum(left, right) - numpy.minimum(left, right)).max())


def difference(
    step: int, rank: int, stage: str, tensor: str, seen: Tensor, wanted: Tensor, wrong: Tensor | None = None
) -> Difference:
    """The record of a difference between two tensors; `wrong` says which elements count (default: those with a different bit)."""
    if wrong is None:
        wrong = bits_differ(seen, wanted)
    if wrong is None:
        one, other = (f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in (seen, wanted))
        return Difference(step, rank, stage, tensor, 0, one, other, cause="another shape or type")
    flat, at = wrong.flatten(), int(wrong.flatten().nonzero()[0])
    a, b = seen.flatten()[at : at + 1], wanted.flatten()[at : at + 1]
    return Difference(
        step,
        rank,
        stage,
        tensor,
        at,
        repr(a.item()),
        repr(b.item()),
        _hexadecimal(a),
        _hexadecimal(b),
        count=int(flat.sum()),
        numel=flat.numel(),
        max_ulp=max_ulp(seen.flatten()[flat], wanted.flatten()[flat]),
    )
