"""Are an implementation's pipeline schedules complete, legal, free of deadlock, and as short and as small as they should be?

The number of ranks is the world size; a schedule is a pure function, so one process is asked. What is judged is worked out here, from the
definitions, by code that shares nothing with `parallel/pipeline`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minigpt_dist.verify.checks.registry import Check, register
from minigpt_dist.verify.schedule_probe import schedule_body
from minigpt_dist.verify.subject import NotJudged, Subject
from minigpt_dist.verify.violation import Violation

SLOT, STAGE = ("pipeline",), "schedule"
SIZES = (1, 2, 3, 4, 8)
COST = {"F": 1, "B": 2}  # a backward computes two products where a forward computes one
Rows = list[list[tuple[str, int, int]]]
Case = tuple[str, int, int, int]  # kind, ranks, micro-batches, chunks
Find = Callable[[Case, Rows], Violation | None]


def cases(ranks: int) -> list[Case]:
    """The two schedules that everybody has, at fewer, as many and more micro-batches than ranks."""
    micros = sorted({1, 2, ranks, 2 * ranks + 1, 4 * ranks})
    return [(kind, ranks, m, 1) for kind in ("gpipe", "1f1b") for m in micros]


def interleaved_cases(ranks: int) -> list[Case]:
    """Several stages a rank; micro-batches in groups of as many as ranks."""
    return [("interleaved", ranks, m * ranks, chunks) for chunks in (2, 3) for m in (1, 2, 4)]


def told(case: Case) -> str:
    kind, ranks, micros, chunks = case
    return f"{kind} of {ranks} ranks, {micros} micro-batches" + (f", {chunks} chunks" if chunks > 1 else "")


def name(action: tuple[str, int, int]) -> str:
    return "{}{}.{}".format(*action)


def _asked(subject: Subject, asked: list[Case]) -> list[tuple[Case, Any]]:
    key = ("schedules", *asked)
    (result,) = subject.evidence(key, lambda: subject.ask(schedule_body, 1, [list(case) for case in asked]))
    if "not_judged" in result:
        raise NotJudged(result["not_judged"])
    return list(zip(asked, result["schedules"], strict=True))


def _each(subject: Subject, asked: list[Case], *finds: Find) -> list[Violation]:
    """The first violation of any of the schedules."""
    for case, shown in _asked(subject, asked):
        if isinstance(shown, dict):
            seen = shown["raised"] or shown["shown"]
            return [Violation(told(case), seen, "a list for each rank of (kind, stage, micro-batch)", STAGE)]
        rows = [[(kind, stage, micro) for kind, stage, micro in row] for row in shown]
        for find in (_complete, *finds):
            found = find(case, rows)
            if found is not None:
                return [found]
    return []


def _complete(case: Case, rows: Rows) -> Violation | None:
    """Every rank does the forward and backward of every micro-batch through its own stages, s with s % ranks = rank, once."""
    _, ranks, micros, chunks = case
    if len(rows) != ranks:
        return Violation(told(case), f"{len(rows)} lists", f"{ranks}, one a rank", STAGE)
    for rank, row in enumerate(rows):
        stages = range(rank, ranks * chunks, ranks)
        wanted = sorted((kind, s, m) for kind in "BF" for s in stages for m in range(micros))
        if sorted(row) != wanted:
            missing = next((a for a in wanted if row.count(a) == 0), None)
            extra = next((a for a in row if row.count(a) > 1 or a not in wanted), None)
            seen = (
                f"without {name(missing)}"
                if missing
                else f"with {name(extra)} {row.count(extra)} times"
                if extra
                else ""
            )
            return Violation(f"{told(case)}: the list", seen, "each action of its stages once", STAGE, rank=rank)
    return None


def _played(case: Case, rows: Rows) -> tuple[dict[tuple[str, int, int], float], list[tuple[int, tuple[str, int, int]]]]:
    """(end of every action that can start, [(rank, the action at which it waits for ever)])."""
    last = case[1] * case[3] - 1
    ended: dict[tuple[str, int, int], float] = {}
    at, free = [0] * len(rows), [0.0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                kind, stage, micro = action = row[at[rank]]
                before = [("F", stage, micro)] if kind == "B" else []
                if (kind, stage) not in (("F", 0), ("B", last)):
                    before.append((kind, stage - 1 if kind == "F" else stage + 1, micro))
                if not all(need in ended for need in before):
                    break
                free[rank] = max([free[rank], *(ended[need] for need in before)]) + COST[kind]
                ended[action] = free[rank]
                at[rank], moved = at[rank] + 1, True
    return ended, [(r, row[at[r]]) for r, row in enumerate(rows) if at[r] < len(row)]


def _ends(case: Case, rows: Rows) -> Violation | None:
    _, stuck = _played(case, rows)
    if not stuck:
        return None
    waiting = ", ".join(f"rank {r} at {name(a)}" for r, a in stuck)
    return Violation(told(case), f"stuck: {waiting}", "done, each action after what it needs", STAGE, rank=stuck[0][0])


def _in_order(case: Case, rows: Rows) -> Violation | None:
    """Sums of gradients have one process's bits only if every stage adds them in the order of the data."""
    for rank, row in enumerate(rows):
        for stage in range(rank, case[1] * case[3], case[1]):
            order = [m for kind, s, m in row if kind == "B" and s == stage]
            if order != sorted(order):
                at = next(i for i, m in enumerate(order) if m != i)
                what = f"{told(case)}: backward {at} of stage {stage}"
                return Violation(what, f"micro-batch {order[at]}'s", f"micro-batch {at}'s", STAGE, rank=rank)
    return None


def _bubble(case: Case, rows: Rows) -> Violation | None:
    """(N-1)/(MV+N-1): Huang et al. 2019, "GPipe", section 2.3; Narayanan et al. 2021 (Megatron-LM), section 2.2, for V chunks."""
    _, ranks, micros, chunks = case
    ended, stuck = _played(case, rows)
    if stuck:
        return _ends(case, rows)
    idle = 1 - 3 * micros * chunks / max(ended.values())
    formula = (ranks - 1) / (micros * chunks + ranks - 1)
    if idle <= formula + 1e-9:
        return None
    return Violation(f"{told(case)}: the bubble", f"{idle:.1%}", f"{formula:.1%} = (N-1)/(MV+N-1)", STAGE)


def _live(case: Case, rows: Rows) -> Violation | None:
    """1F1B holds no more activations than stages follow it; GPipe runs every forward before any backward."""
    kind, ranks, micros, _ = case
    for rank, row in enumerate(rows):
        if kind == "gpipe":
            if any(k != "F" for k, *_ in row[:micros]):
                return Violation(told(case), "a backward among its forwards", "all forwards first", STAGE, rank=rank)
            continue
        live = most = 0
        for k, *_ in row:
            live += 1 if k == "F" else -1
            most = max(most, live)
        bound = min(ranks - rank, micros)
        if most > bound:
            return Violation(f"{told(case)}: activations held", str(most), f"at most {bound}", STAGE, rank=rank)
    return None


def complete(subject: Subject, ranks: int) -> list[Violation]:
    """Each action of each stage once, on the right rank."""
    return _each(subject, cases(ranks))


def progress(subject: Subject, ranks: int) -> list[Violation]:
    """No rank waits for ever."""
    return _each(subject, cases(ranks), _ends)


def order(subject: Subject, ranks: int) -> list[Violation]:
    """Backwards in the order of the data."""
    return _each(subject, cases(ranks), _in_order)


def bubble(subject: Subject, ranks: int) -> list[Violation]:
    """Idle no longer than the formula, a backward taking twice a forward."""
    return _each(subject, cases(ranks), _bubble)


def live(subject: Subject, ranks: int) -> list[Violation]:
    """1F1B bounded by depth; GPipe what its name says."""
    return _each(subject, cases(ranks), _live)


def interleaved(subject: Subject, ranks: int) -> list[Violation]:
    """Several stages a rank: complete, without deadlock, in order, and the bubble V times smaller."""
    return _each(subject, interleaved_cases(ranks), _ends, _in_order, _bubble)


def refuses(subject: Subject, ranks: int) -> list[Violation]:
    """What cannot be is an exception, not an empty schedule."""
    for case, shown in _asked(
        subject, [("1f1b", 0, 4, 1), ("gpipe", ranks, 0, 1), ("1f1b", ranks, -1, 1), ("zigzag", ranks, 4, 1)]
    ):
        if not isinstance(shown, dict) or not shown["raised"]:
            return [Violation(told(case), "accepted", "refused by an exception", STAGE)]
    return []


for _name, _claim, _find, _sizes in (
    ("complete", "every stage does each micro-batch forward and backward once", complete, SIZES),
    ("progress", "no rank waits for ever", progress, SIZES),
    ("order", "backwards come in the order of the data", order, SIZES),
    ("bubble", "the bubble is the formula's", bubble, SIZES),
    ("live", "1F1B holds as many activations as stages follow", live, SIZES),
    ("refuses", "impossible numbers and unknown names are refused", refuses, (2,)),
):
    register(Check(f"pipeline.{_name}", _claim, _find, SLOT, STAGE, _sizes))
register(Check("pipeline.interleaved", "chunks divide the bubble", interleaved, SLOT, STAGE, (2, 3, 4), exotic=True))
