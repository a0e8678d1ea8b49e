"""Are an implementation's own collectives sums and copies to the bit, of any length and dtype, at the bytes that the algorithms promise?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minigpt_dist.verify.checks.registry import Check, register
from minigpt_dist.verify.collectives_probe import addend, collective_body, silent_body
from minigpt_dist.verify.subject import NotJudged, Subject
from minigpt_dist.verify.violation import Violation

SLOT = ("collectives",)
NUMELS = (0, 1, 2, 3, 7, 64, 1001)
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8")
MANY = (1, 2, 3, 4)
SILENT_S = 0.5
STAGES = {
    "ring_all_reduce": "reduce",
    "reduce_scatter": "reduce",
    "all_gather": "gather",
    "tree_broadcast": "broadcast",
}
Case = dict[str, Any]


def case(seed: int, lengths: Sequence[int], dtype: str = "float32", *, real: bool = False, src: int = 0) -> Case:
    """One call: rank r brings lengths[r % len(lengths)] numbers."""
    return {"seed": seed, "lengths": list(lengths), "dtype": dtype, "real": real, "src": src, "shape": []}


def brought(c: Case, world_size: int) -> list[Tensor]:
    """What every rank brings to a case."""
    lengths = [c["lengths"][r % len(c["lengths"])] for r in range(world_size)]
    return [addend(c["seed"], r, n, c["dtype"], c["real"]) for r, n in enumerate(lengths)]


def shown(subject: Subject, world_size: int, name: str, cases: list[Case]) -> list[list[dict[str, Any]]]:
    """[case][rank]: what the collective did."""
    results = subject.ask(collective_body, world_size, name, cases)
    if "not_judged" in results[0]:
        raise NotJudged(results[0]["not_judged"])
    return [[r["cases"][k] for r in results] for k in range(len(cases))]


def wanted(name: str, c: Case, world_size: int) -> list[Tensor]:
    """The right result on every rank, for whole numbers: exact in every order."""
    parts = brought(c, world_size)
    if name == "tree_broadcast":
        return [parts[c["src"]]] * world_size
    if name == "all_gather":
        return [torch.cat(parts)] * world_size
    total = torch.stack(parts).to(torch.int64).sum(0).to(parts[0].dtype)
    return list(total.tensor_split(world_size)) if name == "reduce_scatter" else [total] * world_size


def _seed(subject: Subject, what: str, k: int) -> int:
    return 100 + subject.draw(f"collectives.{what}") % 10_000 + k


def exact(subject: Subject, world_size: int, name: str, cases: list[Case]) -> list[Violation]:
    """Every rank gets exactly the right numbers; what is only read stays as it was."""
    in_place = name in ("ring_all_reduce", "tree_broadcast")
    for c, ranks in zip(cases, shown(subject, world_size, name, cases), strict=True):
        parts = brought(c, world_size)
        for rank, (seen, right) in enumerate(zip(ranks, wanted(name, c, world_size), strict=True)):
            size = f"{parts[rank].numel()} elements of {c['dtype']}"
            raw = seen["given"] if in_place else seen["out"]
            if raw is None or len(raw) != right.nbytes:
                told = "nothing" if raw is None else f"{len(raw)} bytes of {seen['dtype']}"
                return [
                    Violation(
                        f"the result of {name}", told, f"{right.nbytes} bytes", STAGES[name], rank=rank, tensor=size
                    )
                ]
            if not in_place and seen["given"] != _bytes(parts[rank]):
                return [
                    Violation(
                        f"the tensor given to {name}", "changed", "as before", STAGES[name], rank=rank, tensor=size
                    )
                ]
            found = _differing(name, raw, right, parts[rank], rank, size, world_size)
            if found:
                return found
    return []


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _differing(
    name: str, raw: bytes, right: Tensor, own: Tensor, rank: int, size: str, world_size: int
) -> list[Violation]:
    seen = torch.frombuffer(bytearray(raw), dtype=right.dtype) if raw else torch.empty(0, dtype=right.dtype)
    off = (seen != right).nonzero()
    if not len(off):
        return []
    at = int(off[0])
    hint = ""  # closeness below chooses words for a difference that is already found, bit by bit
    if own.numel() == seen.numel() and torch.equal(seen, own):
        hint = "the tensor still holds what this rank brought: the result belongs into the tensor itself"
    elif right.is_floating_point() and torch.allclose(seen.double() * world_size, right.double(), rtol=1e-2):
        hint = "sums are divided by the number of ranks: a collective adds, averaging is the caller's"
    observed, expected = f"{seen[at].item():.9g}", f"{right[at].item():.9g}"
    what = f"the result of {name}"
    return [Violation(what, observed, expected, STAGES[name], rank=rank, tensor=size, element=at, hint=hint)]


def all_reduce(subject: Subject, world_size: int) -> list[Violation]:
    """Sums of any length, also fewer elements than ranks and none, in place."""
    cases = [case(_seed(subject, "all_reduce", k), [n]) for k, n in enumerate((*NUMELS, 40_003))]
    square = case(_seed(subject, "square", 0), [35])
    return exact(subject, world_size, "ring_all_reduce", [*cases, {**square, "shape": [5, 7]}])


def dtypes(subject: Subject, world_size: int) -> list[Violation]:
    """Sums in every dtype."""
    cases = [case(_seed(subject, "dtypes", k), [13], dtype) for k, dtype in enumerate(DTYPES)]
    return exact(subject, world_size, "ring_all_reduce", cases)


def reduce_scatter(subject: Subject, world_size: int) -> list[Violation]:
    """Each rank's slice of the sum, the larger slices first."""
    cases = [case(_seed(subject, "reduce_scatter", k), [n]) for k, n in enumerate(NUMELS)]
    return exact(subject, world_size, "reduce_scatter", cases)


def all_gather(subject: Subject, world_size: int) -> list[Violation]:
    """What ranks bring, one after the other, also of different lengths and none."""
    lengths = ([4], [0], [5, 0, 3, 1], [0, 700], [1, 2, 3, 4, 5, 6, 7, 8])
    cases = [case(_seed(subject, "all_gather", k), n, "float64") for k, n in enumerate(lengths)]
    return exact(subject, world_size, "all_gather", cases)


def broadcast(subject: Subject, world_size: int) -> list[Violation]:
    """Every rank as the source."""
    cases = [case(_seed(subject, "broadcast", s), [n], src=s) for s in range(world_size) for n in (0, 1, 1001)]
    return exact(subject, world_size, "tree_broadcast", cases)


def rounding(subject: Subject, world_size: int) -> list[Violation]:
    """Sums that must be rounded: the same bytes on all ranks, and within (N-1) eps sum|x| of the exact sum.

    Higham 2002, "Accuracy and stability of numerical algorithms", equation 4.4, to first order: any order of N-1 additions.
    """
    cases = [case(_seed(subject, "rounding", 0), [4099], real=True)]
    (ranks,) = shown(subject, world_size, "ring_all_reduce", cases)
    exactly = torch.stack(brought(cases[0], world_size)).double()
    bound = (world_size - 1) * torch.finfo(torch.float32).eps * exactly.abs().sum(0)
    for rank, r in enumerate(ranks):
        what, size = "the result of ring_all_reduce", "4099 elements of float32"
        if r["given"] != ranks[0]["given"]:
            return [Violation(what, "its own", "rank 0's, byte for byte", "reduce", rank=rank, tensor=size)]
        seen = torch.frombuffer(bytearray(r["given"]), dtype=torch.float32).double()
        off = (~((seen - exactly.sum(0)).abs() <= bound)).nonzero()
        if len(off):
            at = int(off[0])
            right = f"{float(exactly.sum(0)[at]):.9g}, within {float(bound[at]):.2g}"
            return [Violation(what, f"{float(seen[at]):.9g}", right, "reduce", rank=rank, tensor=size, element=at)]
    return []


def traffic(subject: Subject, world_size: int) -> list[Violation]:
    """Bytes a rank sends, as seen from outside: 2T(N-1)/N for the ring, T(N-1)/N for its halves, at most log2(N) T in the tree.

    Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations". Counts and lengths may cost 64 bytes a
    rank more.
    """
    N, numel = world_size, 1200 * world_size
    share = 4 * numel * (N - 1) // N
    limits = {
        "ring_all_reduce": (case(1, [numel]), 2 * share, 2 * share),
        "reduce_scatter": (case(2, [numel]), share, share),
        "all_gather": (case(3, [numel // N]), share, share),
        "tree_broadcast": (case(4, [numel]), 0, 4 * numel * math.ceil(math.log2(N))),
    }
    for name, (c, least, most) in limits.items():
        (ranks,) = shown(subject, N, name, [c])
        for rank, r in enumerate(ranks):
            what = f"the traffic of {name}"
            if r["others"]:
                return [Violation(what, f"a call of {r['others'][0]}", "sends and receives", "reduce", rank=rank)]
            if not least <= r["sent"] <= most + 64 * N:
                right = f"{most:,}" if least == most else f"at most {most:,}"
                hint = _traffic_hint(name, r["sent"], 4 * numel, N)
                return [Violation(what, f"{r['sent']:,} bytes sent", right, STAGES[name], rank=rank, hint=hint)]
    return []


def _traffic_hint(name: str, sent: int, whole: int, N: int) -> str:
    if sent == 0:
        return "nothing was sent by torch.distributed's send, isend or batch_isend_irecv"
    if name == "ring_all_reduce" and sent >= whole * (N - 1):
        return "whole tensors go round: cut them into N slices"
    return "the source sends to every rank itself: a tree has others pass it on" if name == "tree_broadcast" else ""


def silent(subject: Subject, world_size: int) -> list[Violation]:
    """A rank that takes no part ends in an error that names it, once `timeout` seconds are over."""
    results = subject.run(silent_body, world_size, SILENT_S)  # fresh ranks: what timed out cannot be used again
    if "not_judged" in results[0]:
        raise NotJudged(results[0]["not_judged"])
    said, absent = [r["said"] for r in results[:-1]], world_size - 1
    what = "the error of a rank that waits for one that is silent"
    for rank, text in enumerate(said):
        if text is None:
            return [Violation(what, "absent", "an error", "reduce", rank=rank)]
    if any(f"rank {absent}" in text.lower() for text in said):  # only its neighbour can know
        return []
    return [Violation(what, repr(said[0][:120]), f"one that names rank {absent}", "reduce", rank=0)]


for _name, _claim, _find, _stage, _sizes in (
    ("all_reduce", "ring_all_reduce adds up, whatever the length", all_reduce, "reduce", MANY),
    ("dtypes", "ring_all_reduce adds up in every dtype", dtypes, "reduce", (2, 3)),
    (
        "rounding",
        "rounded sums are equal on all ranks and within the bound of any order",
        rounding,
        "reduce",
        (2, 3, 4),
    ),
    ("reduce_scatter", "reduce_scatter gives each rank its slice of the sum", reduce_scatter, "reduce", (1, 2, 3, 4)),
    ("all_gather", "all_gather joins what ranks bring, of any lengths", all_gather, "gather", (1, 2, 3, 4)),
    ("broadcast", "tree_broadcast copies the source to every rank", broadcast, "broadcast", MANY),
    ("traffic", "what a rank sends is what the algorithms promise", traffic, "reduce", (2, 3, 4)),
):
    register(Check(f"collectives.{_name}", _claim, _find, SLOT, _stage, _sizes))
register(Check("collectives.silent", "a silent rank is named in time", silent, SLOT, "reduce", (2,)))
