"""Faults of pipeline schedules: what is left out, waits for itself, idles too long or holds too much."""

from __future__ import annotations

from minigpt_dist.verify.faults.catalogue import Names, fault
from minigpt_dist.verify.faults.timetable import Action, ahead, gpipe_row, interleaved, one_f_one_b_row, schedules


@fault(
    source="GPipe (arXiv 1811.06965) under the name of 1F1B",
    needs="more micro-batches than stages",
    check="pipeline.live",
    stage="schedule",
    rank=1,
    green=("pipeline.bubble",),
)
def one_f_one_b_holds_everything() -> Names:
    """All forwards run first, as in GPipe: activations grow with the micro-batches, not with the depth."""
    return schedules(one_f_one_b=gpipe_row)


@fault(
    source="PipeDream (arXiv 1806.03377), the warm-up of the first stage on all",
    needs="a stage that is not the first",
    check="pipeline.live",
    stage="schedule",
    rank=1,
    green=("pipeline.complete", "pipeline.progress"),
)
def every_stage_warms_up_as_long() -> Names:
    """Every rank runs as many forwards ahead as the first, and holds as many activations."""
    return schedules(one_f_one_b=lambda rank, ranks, micros: ahead(rank, micros, ranks - 1))


@fault(
    source="off-by-one in the warm-up of 1F1B",
    needs="two stages, two micro-batches",
    check="pipeline.bubble",
    stage="schedule",
    green=("pipeline.progress", "pipeline.live"),
)
def warm_up_is_one_short() -> Names:
    """One forward too few runs ahead: the pipe is never full."""
    return schedules(one_f_one_b=lambda rank, ranks, micros: ahead(rank, micros, ranks - rank - 2))


@fault(
    source="pytorch/pytorch#172668, as an order of actions",
    needs="a backward before its forward",
    check="pipeline.progress",
    stage="schedule",
    rank=0,
)
def backward_comes_before_its_forward() -> Names:
    """In the steady state the backward stands before the forward that it needs on the last stage: all wait."""

    def row(rank: int, ranks: int, micros: int) -> list[Action]:
        right = one_f_one_b_row(rank, ranks, micros)
        if rank < ranks - 1:
            return right
        return [right[i ^ 1] for i in range(len(right))]

    return schedules(one_f_one_b=row)


@fault(
    source="cool-down loops that end with the last forward",
    needs="the last micro-batch",
    check="pipeline.complete",
    stage="schedule",
    rank=0,
)
def cool_down_is_forgotten() -> Names:
    """When the last forward has run the schedule ends; the backwards under way are lost."""

    def row(rank: int, ranks: int, micros: int) -> list[Action]:
        right = one_f_one_b_row(rank, ranks, micros)
        return right[: max(i for i, action in enumerate(right) if action[0] == "F") + 1]

    return schedules(one_f_one_b=row)


@fault(
    source="micro-batches dealt out in groups of the pipeline's depth",
    needs="micro-batches that the ranks do not divide",
    check="pipeline.complete",
    stage="schedule",
    rank=0,
)
def remainder_of_micro_batches_is_dropped() -> Names:
    """Micro-batches run in groups of as many as there are ranks; an incomplete group never runs."""

    def row(rank: int, ranks: int, micros: int) -> list[Action]:
        return one_f_one_b_row(rank, ranks, micros - micros % ranks)

    return schedules(one_f_one_b=row)


@fault(
    source="GPipe (arXiv 1811.06965), figure 2: backwards in reverse",
    needs="sums of gradients that are compared bit for bit",
    check="pipeline.order",
    stage="schedule",
    rank=0,
    green=("pipeline.complete", "pipeline.progress", "pipeline.live"),
)
def backwards_run_in_reverse() -> Names:
    """GPipe's backwards begin with the last micro-batch: gradients are added in another order than on one process."""

    def row(rank: int, ranks: int, micros: int) -> list[Action]:
        return [a for kind, s in (("F", 1), ("B", -1)) for a in [(kind, rank, m) for m in range(micros)][::s]]

    return schedules(gpipe=row)


@fault(
    source="Megatron-LM (arXiv 2104.04473), section 2.2: chunks that are neighbours",
    needs="two chunks a rank",
    check="pipeline.interleaved",
    stage="schedule",
    rank=0,
    green=("pipeline.complete", "pipeline.bubble", "pipeline.live"),
)
def chunks_of_a_rank_are_neighbours() -> Names:
    """Rank r has stages rV to rV + V - 1 in place of r, r + N, ...: it is a plain pipeline with more work a stage."""

    def chunked(ranks: int, micros: int, chunks: int) -> list[list[Action]]:
        place = {s: s % ranks * chunks + s // ranks for s in range(ranks * chunks)}
        return [[(kind, place[s], m) for kind, s, m in row] for row in interleaved(ranks, micros, chunks)]

    return schedules(chunked=chunked)


@fault(
    source="interleaved schedules with the warm-up of plain 1F1B",
    needs="two chunks a rank",
    check="pipeline.interleaved",
    stage="schedule",
    green=("pipeline.complete", "pipeline.bubble", "pipeline.live"),
)
def chunks_warm_up_like_one() -> Names:
    """N - r - 1 forwards run ahead, whatever the chunks: a backward waits for a forward that comes after it."""

    def chunked(ranks: int, micros: int, chunks: int) -> list[list[Action]]:
        rows = []
        for rank, right in enumerate(interleaved(ranks, micros, chunks)):
            forwards, backwards = ([a for a in right if a[0] == kind] for kind in "FB")
            n = ranks - rank - 1
            mixed = [a for pair in zip(forwards[n:], backwards, strict=False) for a in pair]
            rows.append(forwards[:n] + mixed + backwards[len(backwards) - n :])
        return rows

    return schedules(chunked=chunked)


@fault(
    source="range() over nothing",
    needs="no micro-batches",
    check="pipeline.refuses",
    stage="schedule",
    green=("pipeline.complete",),
)
def no_micro_batches_are_accepted() -> Names:
    """For no micro-batches the schedule is empty, and a step trains on nothing."""
    right = schedules()["pipeline_schedule"]

    def pipeline_schedule(kind: str, ranks: int, micros: int, chunks: int = 1) -> list[list[Action]]:
        return [[] for _ in range(ranks)] if micros < 1 else right(kind, ranks, micros, chunks)

    return {"pipeline_schedule": pipeline_schedule}
