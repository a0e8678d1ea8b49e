"""Pipeline schedules: pure functions from sizes to the list of actions of every rank.

Stage s of S lives on rank s % ranks. Micro-batches are numbered in the order of the data, and every stage runs their backwards in that
order, so that gradients are added in the order in which one process would add them.

Owns the order. Leaves how long it takes to `timeline.py`, and doing it to `executor.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Action(NamedTuple):
    """One piece of work: `kind` is "F" (forward) or "B" (backward), of micro-batch `micro` through stage `stage`."""

    kind: str
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro}"


Schedule = list[list[Action]]  # [rank][position]


def gpipe(ranks: int, micros: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, "GPipe"): a stage holds the activations of all micro-batches."""
    _require_counts(ranks=ranks, micros=micros)
    return [[*_all("F", r, micros), *_all("B", r, micros)] for r in range(ranks)]


def one_f_one_b(ranks: int, micros: int) -> Schedule:
    """As few forwards ahead as keep the pipe full, then one backward a forward (Narayanan et al. 2019, "PipeDream"; flushed each step).

    Stage s holds the activations of at most min(ranks - s, micros) micro-batches.
    """
    _require_counts(ranks=ranks, micros=micros)
    return [_ahead(_all("F", r, micros), _all("B", r, micros), ahead=min(ranks - r - 1, micros)) for r in range(ranks)]


def interleaved(ranks: int, micros: int, chunks: int) -> Schedule:
    """1F1B with `chunks` stages a rank, ranks apart from each other (Narayanan et al. 2021, "Efficient large-scale language model
    training on GPU clusters using Megatron-LM", section 2.2): the bubble shrinks by the factor `chunks`.

    Micro-batches pass in groups of `ranks`, so ValueError unless `micros` is a multiple of it.
    """
    _require_counts(ranks=ranks, micros=micros, chunks=chunks)
    if micros % ranks:
        raise ValueError(
            f"micros is {micros}, but should be a multiple of the {ranks} ranks for an interleaved schedule"
        )
    schedule = []
    for r in range(ranks):
        forwards, backwards = [], []
        for k in range(micros * chunks):
            group, within = divmod(k, ranks * chunks)
            chunk, micro = within // ranks, group * ranks + within % ranks
            forwards.append(Action("F", chunk * ranks + r, micro))
            backwards.append(Action("B", (chunks - 1 - chunk) * ranks + r, micro))
        ahead = 2 * (ranks - r - 1) + (chunks - 1) * ranks
        schedule.append(_ahead(forwards, backwards, min(ahead, len(forwards))))
    return schedule


SCHEDULES: dict[str, Callable[..., Schedule]] = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved}


def pipeline_schedule(kind: str, ranks: int, micros: int, chunks: int = 1) -> Schedule:
    """The schedule called `kind`, of SCHEDULES; `chunks` stages a rank are for the interleaved one. ValueError for anything else."""
    if kind not in SCHEDULES:
        raise ValueError(f"kind is {kind!r}, but should be one of {', '.join(SCHEDULES)}")
    if kind != "interleaved" and chunks != 1:
        raise ValueError(f"chunks is {chunks!r}, but should be 1 for {kind}")
    return SCHEDULES[kind](ranks, micros, chunks) if kind == "interleaved" else SCHEDULES[kind](ranks, micros)


def stages_of(schedule: Schedule) -> int:
    """The number of stages."""
    return 1 + max(action.stage for actions in schedule for action in actions)


def micros_of(schedule: Schedule) -> int:
    """The number of micro-batches."""
    return 1 + max(action.micro for actions in schedule for action in actions)


def _all(kind: str, stage: int, micros: int) -> list[Action]:
    return [Action(kind, stage, m) for m in range(micros)]


def _ahead(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """`ahead` forwards, then forward and backward in turns, then the backwards that are left."""
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - ahead :]


def _require_counts(**counts: int) -> None:
    for name, value in counts.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} is {value!r}, but should be a whole number of at least 1")
