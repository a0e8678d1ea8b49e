"""Are an implementation's positions cut and joined as they should be, and gradients that are cut clipped as one?"""

from __future__ import annotations

from minigpt_dist.verify.checks.registry import Check, register
from minigpt_dist.verify.checks.tensor import SIZES, differing, equal, seed_of
from minigpt_dist.verify.sequence_probe import two_axes_body
from minigpt_dist.verify.subject import NotJudged, Subject
from minigpt_dist.verify.tensor_oracle import two_axes
from minigpt_dist.verify.violation import Violation

CLIP_BOUND = 1e-5  # max_norm / norm, or / (norm + 1e-6), as torch has it


def norm(subject: Subject, N: int) -> list[Violation]:
    """LayerNorm on a part of the positions, with the gradients of all."""
    seed = seed_of(subject, "norm")
    cases = [{"kind": "norm", "seed": seed, "in": 4, "positions": n} for n in (1, 3)]
    return equal(subject, N, "sequence", "SequenceLayerNorm", cases)


def gather(subject: Subject, N: int) -> list[Violation]:
    """Joined in rank order; each rank's gradient is its part of the sum."""
    cases = [{"kind": "gather", "seed": seed_of(subject, "gather"), "positions": n} for n in (1, 3)]
    return equal(subject, N, "sequence", "gather_sequence", cases)


def scatter(subject: Subject, N: int) -> list[Violation]:
    """A part of the sum; its gradient is that of all parts."""
    cases = [{"kind": "scatter", "seed": seed_of(subject, "scatter"), "positions": n} for n in (1, 3)]
    return equal(subject, N, "sequence", "scatter_sequence", cases)


def axes(subject: Subject, N: int) -> list[Violation]:
    """Replicas of two ranks each: the gradient is summed within a replica alone, and once."""
    if N % 2:
        raise NotJudged("replicas of two ranks need an even number of them")
    seed = seed_of(subject, "axes")
    results = subject.ask(two_axes_body, N, seed)
    if "not_judged" in results[0]:
        raise NotJudged(results[0]["not_judged"])
    for tensor in ("weight", "bias"):
        for rank, (seen, right) in enumerate(zip(results, two_axes(seed, N), strict=True)):
            found = differing(seen, tensor, right[tensor], 2)
            if found is not None:
                what = "SequenceLayerNorm over a group of two ranks of four"
                return [Violation(what, *found[:2], "backward", rank=rank, tensor=f"gradient of {tensor}", **found[2])]
    return []


def clip(subject: Subject, N: int) -> list[Violation]:
    """Above the bound and below it: the norm of the whole model's gradient, on all ranks, and every gradient scaled by it."""
    seed = seed_of(subject, "clip")
    cases = [{"kind": "clip", "seed": seed, "most": most} for most in (0.5, 1000.0)]
    return equal(subject, N, "clipping", "clip_sharded_grad_norm", cases, CLIP_BOUND)


for _name, _claim, _find, _slot, _stage in (
    ("norm", "LayerNorm on a part of the positions has the gradients of all", norm, "sequence", "backward"),
    ("gather", "positions are joined, and their gradients summed", gather, "sequence", "forward"),
    ("scatter", "sums are cut by position, and their gradients joined", scatter, "sequence", "forward"),
    ("cut", "the norm counts each element of the model once, on all ranks", clip, "clipping", "clip"),
):
    register(Check(f"{_slot}.{_name}", _claim, _find, (_slot,), _stage, SIZES))
_claim = "with data parallelism beside it, a gradient is summed once"
register(Check("sequence.axes", _claim, axes, ("sequence",), "backward", (4,), exotic=True))
