"""What a rank does with make_corpus to show what it depends on; tokens come back.

Owns the rank's side. Leaves the verdict to `checks/corpus.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from minigpt_dist.verify.contract import resolve

TOTAL = 5 * 65 * 4
OFFSETS = (0, 2, 16, 64, 100, 256, 1000, 2**16)  # of seeds: one cut short makes two of them alike


def corpus_body(spec: str, slots: list[str], seed: int) -> dict[str, Any]:
    """Three corpora and their facts; the global random stream is disturbed in between, which must not matter."""
    make = resolve(spec, tuple(slots)).require("make_corpus")
    torch.manual_seed(1)
    first = torch.as_tensor(make(seed, TOTAL))
    torch.manual_seed(2)
    again = torch.as_tensor(make(seed, TOTAL))
    other = torch.as_tensor(make(seed + 1, TOTAL))
    shorter = torch.as_tensor(make(seed, TOTAL // 2))
    seeds = [torch.as_tensor(make(seed + more, TOTAL)).clone() for more in OFFSETS]
    return {
        "seeds": seeds,
        "first": first.clone(),
        "again": again.clone(),
        "other": other.clone(),
        "shorter": shorter.clone(),
    }
