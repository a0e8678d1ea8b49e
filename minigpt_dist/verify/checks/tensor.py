"""Are an implementation's tensor-parallel layers the whole layers, forward and backward, at the messages that the cut is for?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minigpt_dist.verify.checks.registry import Check, register
from minigpt_dist.verify.sequence_probe import sequence_body
from minigpt_dist.verify.subject import NotJudged, Subject
from minigpt_dist.verify.tensor_oracle import wanted
from minigpt_dist.verify.tensor_probe import dropout_body, layer_body
from minigpt_dist.verify.violation import Violation

SIZES = (1, 2, 3)
BOUND = 1e-10  # float64 rounds at 1e-16, and the least fault here is one addend of some dozens
Case = dict[str, Any]
Shown = dict[str, dict[str, Any]]


def shown(subject: Subject, world_size: int, slot: str, cases: list[Case]) -> list[list[dict[str, Any]]]:
    """[case][rank]: what the layer did."""
    told = (cases,) if slot == "tensor" else (slot, cases)
    results = subject.ask(layer_body if slot == "tensor" else sequence_body, world_size, *told)
    if "not_judged" in results[0]:
        raise NotJudged(results[0]["not_judged"])
    return [[r["cases"][k] for r in results] for k in range(len(cases))]


def equal(
    subject: Subject, world_size: int, slot: str, name: str, cases: list[Case], bound: float = BOUND
) -> list[Violation]:
    """Every tensor of every case on every rank, in the order in which they come about."""
    for case, ranks in zip(cases, shown(subject, world_size, slot, cases), strict=True):
        right = wanted(case, world_size)
        for tensor in right[0]:
            for rank, seen in enumerate(ranks):
                found = differing(seen["tensors"], tensor, right[rank][tensor], world_size, bound)
                if found is not None:
                    where = _told(name, case)
                    return [Violation(where, *found[:2], stage_of(name, tensor), rank=rank, tensor=tensor, **found[2])]
    return []


def _told(name: str, case: Case) -> str:
    sizes = ", ".join(f"{key} {case[key]}" for key in ("in", "out", "vocab", "heads", "most") if key in case)
    return f"{name}({sizes})" if sizes else name


def stage_of(name: str, tensor: str) -> str:
    """Whom to blame: weights that are wrong from the start, the way forward, or the way back."""
    if name == "clip_sharded_grad_norm":
        return "clip"
    if tensor in ("weight", "bias"):
        return "model"
    return "backward" if tensor.startswith("gradient") or "update" in tensor else "forward"


def differing(
    seen: Shown, tensor: str, right: Tensor, world_size: int, bound: float = BOUND
) -> tuple[str, str, dict[str, Any]] | None:
    """(observed, expected, element and hint) of the first difference beyond rounding; None without one."""
    got = seen[tensor]
    if got["shape"] != list(right.shape) or got["dtype"] != "float64":
        return f"{got['dtype']} of shape {tuple(got['shape'])}", f"float64 of shape {tuple(right.shape)}", {}
    value = torch.frombuffer(bytearray(got["raw"]), dtype=torch.float64) if got["raw"] else torch.empty(0)
    flat = right.reshape(-1)
    limit = bound * max(1.0, float(flat.abs().max()) if len(flat) else 0.0)
    off = (~((value - flat).abs() <= limit)).nonzero()
    if not len(off):
        return None
    at = int(off[0])
    hint = ""  # closeness below chooses words for a difference that is already found
    if world_size > 1 and torch.allclose(value, flat * world_size, rtol=1e-9):
        hint = f"it counts {world_size} times, once a rank"
    elif world_size > 1 and torch.allclose(value * world_size, flat, rtol=1e-9):
        hint = "it is a mean over ranks: parts add up"
    return f"{float(value[at]):.9g}", f"{float(flat[at]):.9g}", {"element": at, "hint": hint}


def seed_of(subject: Subject, what: str) -> int:
    return 1000 + subject.draw(f"tensor.{what}") % 100_000


def column(subject: Subject, N: int) -> list[Violation]:
    """With and without bias; one feature a rank."""
    seed = seed_of(subject, "column")
    cases = [
        {"kind": "column", "seed": seed, "out": n * N, "in": 5, "rows": 2, "bias": b}
        for n, b in ((3, True), (1, False))
    ]
    return equal(subject, N, "tensor", "ColumnParallelLinear", cases)


def row(subject: Subject, N: int) -> list[Violation]:
    """With and without bias; one feature a rank."""
    seed = seed_of(subject, "row")
    cases = [
        {"kind": "row", "seed": seed, "in": n * N, "out": 5, "rows": 2, "bias": b} for n, b in ((3, True), (1, False))
    ]
    return equal(subject, N, "tensor", "RowParallelLinear", cases)


def _vocabularies(N: int) -> list[int]:
    """One that N divides, and one that it does not."""
    return [4 * N, 5 * N - 1]


def embedding(subject: Subject, N: int) -> list[Violation]:
    """The first and last token of every shard, and each token; no token at all."""
    seed = seed_of(subject, "embedding")
    cases = [{"kind": "embedding", "seed": seed, "vocab": V, "in": 3, "rows": 1000} for V in _vocabularies(N)]
    return equal(subject, N, "tensor", "VocabParallelEmbedding", cases)


def _entropy(seed: int, vocab: int, scale: float = 1.0, shift: float = 0.0) -> Case:
    return {"kind": "cross_entropy", "seed": seed, "vocab": vocab, "rows": 1000, "scale": scale, "shift": shift}


def cross_entropy(subject: Subject, N: int) -> list[Violation]:
    """Targets at the edges of every shard."""
    cases = [_entropy(seed_of(subject, "cross_entropy"), V) for V in _vocabularies(N)]
    return equal(subject, N, "tensor", "vocab_parallel_cross_entropy", cases)


def large_logits(subject: Subject, N: int) -> list[Violation]:
    """Logits of which exp is infinite, or zero, in float64."""
    seed = seed_of(subject, "large_logits")
    cases = [_entropy(seed, 4 * N, 1000.0), _entropy(seed, 4 * N, 1.0, 1e4), _entropy(seed, 4 * N, 1.0, -1e4)]
    return equal(subject, N, "tensor", "vocab_parallel_cross_entropy", cases)


def empty_shard(subject: Subject, N: int) -> list[Violation]:
    """A vocabulary so small that the last rank has none of it."""
    seed = seed_of(subject, "empty_shard")
    case = {"kind": "embedding", "seed": seed, "vocab": N + 1, "in": 3, "rows": 1000}
    found = equal(subject, N, "tensor", "VocabParallelEmbedding", [case])
    return found or equal(subject, N, "tensor", "vocab_parallel_cross_entropy", [_entropy(seed, N + 1)])


def attention(subject: Subject, N: int) -> list[Violation]:
    """One head a rank, and two; the update shows the gradients of all weights."""
    seed = seed_of(subject, "attention")
    cases = [{"kind": "attention", "seed": seed, "in": 2 * n * N, "heads": n * N, "rows": 2} for n in (1, 2)]
    return equal(subject, N, "tensor", "ParallelAttention", cases)


def tied(subject: Subject, N: int) -> list[Violation]:
    """Three steps of embedding, MLP, head with the embedding's weight, and loss."""
    case = {"kind": "tied", "seed": seed_of(subject, "tied"), "rows": 3, "in": 4, "steps": 3}
    return equal(subject, N, "tensor", "a model with a tied head", [case])


def traffic(subject: Subject, N: int) -> list[Violation]:
    """What a rank brings to collectives, forward and backward: activations, never weights or logits (Shoeybi et al. 2019, section 3).

    An all-reduce made of a reduce-scatter and an all-gather brings twice as much, and may. Cross-entropy: four numbers a token.
    """
    wide = 16 * N
    cases = {
        "ColumnParallelLinear": (
            {"kind": "column", "seed": 1, "out": 4 * wide, "in": wide, "rows": 1, "bias": True},
            3 * wide,
        ),
        "RowParallelLinear": (
            {"kind": "row", "seed": 1, "out": wide, "in": 4 * wide, "rows": 1, "bias": True},
            3 * wide,
        ),
        "VocabParallelEmbedding": ({"kind": "embedding", "seed": 1, "vocab": 16 * N, "in": 8, "rows": 2}, 2 * 8),
        "vocab_parallel_cross_entropy": ({**_entropy(1, 64 * N), "rows": 2}, 4),
        "ParallelAttention": ({"kind": "attention", "seed": 1, "in": wide, "heads": N, "rows": 1}, 9 * wide),
    }
    for (name, (_, numbers)), ranks in zip(
        cases.items(), shown(subject, N, "tensor", [case for case, _ in cases.values()]), strict=True
    ):
        most = 2 * numbers * 8 + 64
        for rank, seen in enumerate(ranks):
            if seen["sent"] > most:
                hint = "weights or logits are sent, where activations, or a few numbers a token, would do"
                what = f"what {name} brings to collectives"
                return [
                    Violation(what, f"{seen['sent']:,} bytes", f"at most {most:,}", "forward", rank=rank, hint=hint)
                ]
    return []


def dropout(subject: Subject, N: int) -> list[Violation]:
    """Heads of different ranks draw different masks, and torch's own stream is where it is on every other rank afterwards."""
    results = subject.ask(dropout_body, N, 2 * N)
    if "not_judged" in results[0]:
        raise NotJudged(results[0]["not_judged"])
    for rank, r in enumerate(results):
        if r["after"] != results[0]["after"]:
            what = "the next number of torch's stream after ParallelAttention with dropout"
            return [Violation(what, f"{r['after']:.9g}", f"rank 0's, {results[0]['after']:.9g}", "forward", rank=rank)]
        masks = [head["raw"] for head in r["heads"]]
        twins = [
            (a, b) for b in range(len(masks)) for a in range(b) if masks[a] == masks[b] or r["calm"]["raw"] == masks[b]
        ]
        if twins:
            what = f"the mask of attention dropout in head {twins[0][1]}"
            return [Violation(what, f"head {twins[0][0]}'s, or none", "its own", "forward", rank=rank)]
    return []


SLOT = ("tensor",)
for _name, _claim, _find in (
    ("column", "a column-parallel product is the whole product's columns", column),
    ("row", "a row-parallel product is the whole product, its bias added once", row),
    ("embedding", "every token is looked up once, by the rank that has it", embedding),
    ("cross_entropy", "the loss of cut logits is that of whole ones", cross_entropy),
    ("large_logits", "the loss of very large logits is finite and right", large_logits),
    ("attention", "attention by heads is the whole attention", attention),
    ("tied", "a small model with a tied head trains as on one process", tied),
):
    register(Check(f"tensor.{_name}", _claim, _find, SLOT, "forward", SIZES))
register(Check("tensor.traffic", "activations are sent, not weights or logits", traffic, SLOT, "forward", (2, 3)))
register(Check("tensor.empty_shard", "a rank may have no token", empty_shard, SLOT, "forward", (3,), exotic=True))
register(
    Check("tensor.dropout", "masks differ between heads of all ranks", dropout, SLOT, "forward", (2, 3), exotic=True)
)
