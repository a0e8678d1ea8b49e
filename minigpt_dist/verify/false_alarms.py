"""Correct variants before the judge, again and again: whatever it says against one of them is a false alarm.

Owns the runs: which variant, at which world size, with which values drawn. Leaves the variants to `faults/variants/`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from minigpt_dist.verify.checks import CHECKS, Verdict, put
from minigpt_dist.verify.faults import unknown
from minigpt_dist.verify.faults.variants import LIST, VARIANTS
from minigpt_dist.verify.matrix import replaced
from minigpt_dist.verify.subject import Subject

WORLD_SIZES = (2, 3, 4, 1)


@dataclass(frozen=True)
class Run:
    """One variant asked every probe of its pieces at one world size, on values drawn from `seed`; 0 draws none."""

    variant: str
    world_size: int
    seed: int

    def verdicts(self, whole: bool = False) -> list[Verdict]:
        """What the judge says; with `whole`, also of the composed run, which takes longer than all probes together."""
        slots = replaced(VARIANTS[self.variant]())
        about = [c for c in CHECKS.values() if slots & set(c.slots) and self.world_size in c.world_sizes]
        with Subject(f"variant:{self.variant}", seed=self.seed or None) as subject:
            return [put(check, subject, self.world_size) for check in about if whole or len(check.slots) == 1]


def runs(names: Iterable[str], repeat: int) -> list[Run]:
    """`repeat` runs of each variant named (all for none), each of other values, at world sizes 2, 3, 4, 1 in turn. ValueError for
    an unknown name."""
    wanted = list(names) or list(VARIANTS)
    for name in wanted:
        if name not in VARIANTS:
            raise unknown("variant", name, VARIANTS, LIST)
    return [Run(name, WORLD_SIZES[k % len(WORLD_SIZES)], k) for k in range(repeat) for name in wanted]


def judged(chosen: Iterable[Run], whole: bool, workers: int) -> Iterator[tuple[Run, list[Verdict]]]:
    """Every run with its verdicts, in the order given, `workers` at a time."""
    chosen = list(chosen)
    with ThreadPoolExecutor(workers) as pool:
        yield from zip(chosen, pool.map(lambda run: run.verdicts(whole), chosen), strict=True)
