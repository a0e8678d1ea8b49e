"""Faults of the guard: who decides, what is looked at, what is forgotten."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from minigpt_dist.verify.faults.catalogue import Names, fault
from minigpt_dist.verify.faults.watcher import agreed, finite, should_roll_back


def _guard(how: Callable[[float, list[Tensor], float], bool]) -> Names:
    return {"should_roll_back": lambda loss, gradients, last: how(loss, list(gradients), last)}


@fault(
    source="ecmwf/WeatherGenerator#2724",
    needs="NaN on another rank than 0",
    check="guard.loss",
    stage="guard",
    step=1,
    rank=0,
    green=("guard.quiet",),
)
def rank_0_decides_alone() -> Names:
    """The verdict is rank 0's: what another rank sees goes into the update."""

    def how(loss: float, gradients: list[Tensor], last: float) -> bool:
        bad = not (math.isfinite(loss) and finite(gradients)) or loss > 2 * last
        verdict = torch.tensor([float(bad)])
        dist.broadcast(verdict, src=0)
        return bool(verdict)

    return _guard(how)


@fault(
    source="NVIDIA-NeMo/Automodel#2468",
    needs="NaN on one rank",
    check="guard.loss",
    stage="guard",
    step=1,
    rank=0,
    green=("guard.quiet",),
)
def each_rank_decides_for_itself() -> Names:
    """Every rank skips by its own loss and gradients: the others go on, and wait for it."""

    def how(loss: float, gradients: list[Tensor], last: float) -> bool:
        return not (math.isfinite(loss) and finite(gradients)) or loss > 2 * last

    return _guard(how)


@fault(
    source="OpenBMB/BMTrain#108",
    needs="a good step after a bad one",
    check="guard.recovers",
    stage="guard",
    rank=0,
)
def bad_step_is_never_forgotten() -> Names:
    """A running sum of losses is tested: once it is NaN, every later step is bad."""
    running = [0.0]

    def how(loss: float, gradients: list[Tensor], last: float) -> bool:
        right = should_roll_back(loss, gradients, last)
        running[0] += agreed(loss)[0]
        return right or not math.isfinite(running[0])

    return _guard(how)


@fault(
    source="loss > 2 * last as the only test: no comparison with NaN is true",
    needs="a loss that is NaN",
    check="guard.loss",
    stage="guard",
    step=1,
    green=("guard.spike", "guard.quiet"),
)
def nan_is_no_jump() -> Names:
    """The mean loss is only compared with the last one."""

    def how(loss: float, gradients: list[Tensor], last: float) -> bool:
        total, ranks = agreed(loss, 1.0)
        return total / ranks > 2 * last

    return _guard(how)


@fault(
    source="NaN guards that watch the loss",
    needs="a gradient that is not finite under a finite loss",
    check="guard.gradient",
    stage="guard",
    step=1,
    green=("guard.loss", "guard.spike", "guard.quiet"),
)
def gradients_are_not_looked_at() -> Names:
    """Only the loss is tested; a NaN that backward made reaches the moments."""
    return _guard(lambda loss, gradients, last: should_roll_back(loss, [], last))


@fault(
    source="torch.isnan in place of torch.isfinite",
    needs="an infinite gradient",
    check="guard.gradient",
    stage="guard",
    step=2,
    green=("guard.loss", "guard.spike", "guard.quiet"),
)
def infinite_gradients_pass() -> Names:
    """Gradients are tested for NaN; inf is none."""

    def how(loss: float, gradients: list[Tensor], last: float) -> bool:
        bad = any(bool(torch.isnan(g).any()) for g in gradients)
        return should_roll_back(math.nan if bad else loss, [], last)

    return _guard(how)


@fault(
    source="finiteness of a float32 sum or norm",
    needs="large finite gradients",
    check="guard.quiet",
    stage="guard",
    step=4,
    rank=0,
    green=("guard.loss", "guard.gradient", "guard.spike"),
)
def overflowing_sum_is_an_alarm() -> Names:
    """Gradients are added up in float32 and the sum is tested: finite numbers raise an alarm."""

    def how(loss: float, gradients: list[Tensor], last: float) -> bool:
        return should_roll_back(loss, [g.sum() for g in gradients], last)

    return _guard(how)


@fault(
    source="spike tests on the local loss",
    needs="a rank whose own loss jumps while the mean does not",
    check="guard.spike",
    stage="guard",
    step=3,
    rank=0,
    green=("guard.loss", "guard.gradient", "guard.quiet"),
)
def one_ranks_jump_counts_for_all() -> Names:
    """The largest loss of any rank is compared in place of the mean."""

    def how(loss: float, gradients: list[Tensor], last: float) -> bool:
        return should_roll_back(math.nan if loss > 2 * last else loss, gradients, last)

    return _guard(how)
