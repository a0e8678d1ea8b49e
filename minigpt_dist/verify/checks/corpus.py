"""Is make_corpus deterministic next-token data?"""

from __future__ import annotations

import torch

from minigpt_dist.verify.checks.registry import Check, register
from minigpt_dist.verify.corpus_probe import OFFSETS, TOTAL, corpus_body
from minigpt_dist.verify.subject import Subject
from minigpt_dist.verify.violation import Violation


def corpus_is_deterministic(subject: Subject, world_size: int) -> list[Violation]:
    """Same seed, same tokens, on every rank; another seed, other tokens; as many as asked for, int64, within the vocabulary."""
    seed = 7 + subject.draw("corpus") % 10_000
    results = subject.ask(corpus_body, world_size, seed)
    first = results[0]["first"]
    facts = [
        ("dtype of the corpus", str(first.dtype), "torch.int64"),
        ("shape of the corpus", str(tuple(first.shape)), str((TOTAL,))),
        ("length of a shorter corpus", str(results[0]["shorter"].numel()), str(TOTAL // 2)),
    ]
    for what, seen, wanted in facts:
        if seen != wanted:
            return [Violation(what, seen, wanted, "data")]
    if int(first.min()) < 0 or int(first.max()) >= 64:
        return [Violation("range of token ids", f"{int(first.min())}..{int(first.max())}", "within 0..63", "data")]
    if torch.equal(first, results[0]["other"]):
        return [Violation("the corpus of another seed", "the same", "another", "data", hint="the seed is not used")]
    if len(first.unique()) < 32:
        return [Violation("different tokens in the corpus", str(len(first.unique())), "at least 32 of the 64", "data")]
    alike = [
        (a, b)
        for i, a in enumerate(OFFSETS)
        for j, b in enumerate(OFFSETS)
        if i < j and torch.equal(results[0]["seeds"][i], results[0]["seeds"][j])
    ]
    if alike:
        return [
            Violation(
                f"the corpus of seed {seed + alike[0][1]}",
                f"that of seed {seed + alike[0][0]}",
                "another",
                "data",
                hint="the seed is not used whole",
            )
        ]
    for rank, r in enumerate(results):
        for key in ("first", "again"):
            if not torch.equal(r[key], first):
                at = int((r[key] != first).nonzero()[0])
                return [
                    Violation(
                        "the corpus of the same seed",
                        f"token {int(r[key][at])} at {at}",
                        f"{int(first[at])}",
                        "data",
                        rank=rank,
                        element=at,
                        hint="it depends on the global random stream or on the rank, not on the seed alone",
                    )
                ]
    return []


register(
    Check(
        "corpus",
        "the corpus is a function of its seed",
        corpus_is_deterministic,
        ("corpus",),
        "data",
        world_sizes=(1, 2),
    )
)
