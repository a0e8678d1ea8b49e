"""Is an implementation's activation recomputation invisible, to the bit, but in the bytes that are kept for backward?"""

from __future__ import annotations

from functools import partial

from minigpt_dist.verify.checks.registry import Check, register
from minigpt_dist.verify.recompute_probe import BLOCKS, kept_body, recompute_body
from minigpt_dist.verify.subject import NotJudged, Subject
from minigpt_dist.verify.violation import Violation

SLOT, SIZES = ("recompute",), (1, 2)
ROWS, WIDTH = 256, 64
BESIDE = 16384  # bytes a block may keep beside its input: the state of a random stream is 5,056


def equal(kind: str, subject: Subject, N: int) -> list[Violation]:
    """Output, every gradient, every buffer and the random stream, on every rank: the same bytes as without recomputation."""
    results = subject.ask(recompute_body, N, [kind])
    if "not_judged" in results[0]:
        raise NotJudged(results[0]["not_judged"])
    for name in results[0]["kinds"][kind]:
        for rank, r in enumerate(results):
            right, seen = r["kinds"][kind][name]
            if seen != right:
                stage = "backward" if name.startswith(("gradient", "buffer", "the random")) else "forward"
                what = f"{name} under recompute ({kind.replace('_', ' ')})"
                differ = (
                    sum(a != b for a, b in zip(seen, right, strict=False)) if len(seen) == len(right) else len(right)
                )
                told = f"other in {differ} of {len(right)} bytes"
                return [Violation(what, told, "what it is without", stage, rank=rank, tensor=name)]
    return []


def memory(subject: Subject, N: int) -> list[Violation]:
    """Between forward and backward a block's input; in backward, one block's activations more."""
    results = subject.ask(kept_body, N, ROWS, WIDTH)
    if "not_judged" in results[0]:
        raise NotJudged(results[0]["not_judged"])
    for rank, r in enumerate(results):
        inputs = BLOCKS * (r["input"] + BESIDE)
        limits = {"recomputed": inputs, "recomputed, in backward": inputs + r["plainly"] // BLOCKS + r["input"]}
        for when, most in limits.items():
            if r[when] > most:
                what = f"what autograd keeps of {BLOCKS} blocks {when}"
                return [Violation(what, f"{r[when]:,} bytes", f"at most {most:,}", "memory", rank=rank)]
    return []


for _kind, _claim in (
    ("blocks", "gradients of blocks in a row have the same bits, and buffers change once"),
    ("dropout", "a mask is drawn once, and the random stream goes on from where it was"),
    ("untrained_input", "weights have gradients also where the input wants none"),
    ("several_backwards", "gradients of several backwards are added up"),
    ("arguments", "every argument reaches the block again, and each tensor has its gradient"),
    ("evaluation", "without gradients nothing is kept"),
):
    register(Check(f"recompute.{_kind}", _claim, partial(equal, _kind), SLOT, "backward", SIZES))
_claim = "what was computed in 16 bits is so again"
register(Check("recompute.autocast", _claim, partial(equal, "autocast"), SLOT, "backward", SIZES, exotic=True))
register(Check("recompute.memory", "a block keeps its input alone", memory, SLOT, "memory", SIZES))
