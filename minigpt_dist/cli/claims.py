"""The lesson's four invariants over one run of `train`, each with what was observed.

Owns which of them can be asked of which configuration, and their figures. Leaves finding violations to `verify/checks`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minigpt_dist.config import TrainConfig
from minigpt_dist.memory import zero1_bytes
from minigpt_dist.parallel.mesh import coordinates_of
from minigpt_dist.planner.shape import ModelShape
from minigpt_dist.planner.stages import shares
from minigpt_dist.trace import Trace
from minigpt_dist.verify.checks.composition import falling, replicas_agree
from minigpt_dist.verify.checks.resume import continues
from minigpt_dist.verify.violation import Violation

if TYPE_CHECKING:
    from minigpt_dist.cli.training import Outcome

# Where the loss of right code falls at every step: 20 steps of the default model and optimizer, over 40 seeds. Later it
# is small and swings; a smaller learning rate drowns the fall in what tells batches apart, a larger one overshoots.
FALL_STEPS = 20
FREE_FOR_FALL = (
    *("tp", "pp", "schedule", "sequence_parallel", "recompute", "zero_stage", "offload", "overlap"),
    *("world_size", "steps", "seed", "micro_batches", "dtype", "reduction", "guard", "max_rollbacks", "spike"),
    *("checkpoint_step", "checkpoint_every", "checkpoint_minutes"),
)


@dataclass(frozen=True)
class Claim:
    """One invariant over one run: `says` is what held, with figures; `not_judged` says why it could not be asked."""

    letter: str
    check: str
    says: str
    violations: tuple[Violation, ...] = ()
    not_judged: str = ""


def ranks(count: int) -> str:
    """`4 ranks`, `1 rank`."""
    return f"{count} rank{'s' if count > 1 else ''}"


def judge_run(outcome: Outcome) -> list[Claim]:
    """(a) to (d)."""
    return [_loss(outcome), _norms(outcome), _bytes(outcome), _resume(outcome)]


def _why_no_fall(outcome: Outcome) -> str:
    """Why right code may have a rising loss here; empty where it may not."""
    config = outcome.config
    if config.text is not None:
        return "fresh batches of real text need not fall at every step"
    if outcome.start:
        return "the first steps were another run's"
    if config != replace(TrainConfig(), **{name: getattr(config, name) for name in FREE_FOR_FALL}):
        return "a fall at every step is promised for the default model, data and optimizer only"
    return ""


def _loss(outcome: Outcome) -> Claim:
    losses = outcome.losses()
    steps = sorted(losses)
    falls = {b: losses[a] - losses[b] for a, b in itertools.pairwise(steps)}
    ends = f"{losses[steps[0]]:.4f} at step {steps[0]} to {losses[steps[-1]]:.4f} at step {steps[-1]}"
    reason = _why_no_fall(outcome)
    if reason:
        rises = sum(fall < 0 for fall in falls.values())
        return Claim("a", "monotone_loss", f"mean loss {ends}, rising at {rises} of {len(steps)} steps", (), reason)
    judged = Trace(outcome.trace.header, [r for r in outcome.trace.records if r.step <= FALL_STEPS])
    smallest = min(((fall, step) for step, fall in falls.items() if step <= FALL_STEPS), default=None)
    least = f"; smallest fall {smallest[0]:.4f}, at step {smallest[1]}" if smallest else ""
    count = f"{len(steps)}" if len(steps) <= FALL_STEPS else f"the first {FALL_STEPS} of {len(steps)}"
    return Claim("a", "monotone_loss", f"loss fell at each of {count} steps: {ends}{least}", tuple(falling(judged)))


def _norms(outcome: Outcome) -> Claim:
    trace = outcome.trace
    last = trace.at(trace.steps[-1])[0]
    says = (
        f"parameter norms, and bytes, equal on {ranks(trace.world_size)} at every step {trace.steps[0]} to "
        f"{last.step}: {len(last.params)} tensors; norm {last.param_norm:.9g} at step {last.step}"
    )
    return Claim("b", "param_norms", says, tuple(replicas_agree(trace)))


def optimizer_share(config: TrainConfig, stage: int = 0) -> tuple[int, str]:
    """Bytes of optimizer state that a rank of pipeline rank `stage` must hold, and the rule in words."""
    shape, layout = ModelShape(config.model), config.layout
    P, N = shares(shape, layout)[stage].numel(shape, layout), config.dp
    element = 24 if config.dtype == "float64" else 12  # master and moments are float32 but for float64 parameters
    share, rule = zero1_bytes(P, N, element), f"{element}P/N with P = {P}, N = {N}"
    if config.tp * config.pp > 1:
        axes = [
            f"{size} {kind}-parallel" for size, kind in ((config.tp, "tensor"), (config.pp, "pipeline")) if size > 1
        ]
        rule += (
            f": of the model's {config.model.numel()}, what one of {' x '.join(axes)} ranks holds, over {N} replicas"
        )
    if (
        config.reduction == "exact" and config.zero_stage == 1
    ):  # summed in float64 over micro-batches, before they are cut
        share, rule = share + 8 * N * -(-P // N), f"{rule}, and 8P of the exact sum"
    if config.offload != "none":
        rule = f"{rule}, offloaded to {config.offload}"
    return share, rule


def _bytes(outcome: Outcome) -> Claim:
    config = outcome.config
    wanted = [optimizer_share(config, stage) for stage in range(config.pp)]
    says = f"optimizer memory is {wanted[0][0]:,} bytes on every rank = {wanted[0][1]}"
    if config.pp > 1:
        by_stage = "; ".join(f"{share:,} = {rule.partition(':')[0]}" for share, rule in wanted)
        says = f"optimizer memory in bytes, by pipeline rank, is {by_stage}: {wanted[0][1].partition(': ')[2]}"
    return Claim("c", "optimizer_bytes", says, tuple(_unlike_share(outcome.trace, config)))


def _unlike_share(trace: Trace, config: TrainConfig) -> list[Violation]:
    """The first step and rank whose optimizer holds other than its share of bytes; before the first step, more."""
    for record in trace.counted():
        share, rule = optimizer_share(config, coordinates_of(config.layout, record.rank).pp)
        held = record.bytes["optimizer"]
        if held > share or (record.step and held != share):
            seen, place = f"{held} bytes", (record.step, record.rank)
            return [Violation("optimizer memory", seen, f"{share} bytes ({rule})", "memory", *place)]
    return []


def _resume(outcome: Outcome) -> Claim:
    start, last = outcome.config.checkpoint_step, outcome.config.steps
    if outcome.resumed is None:
        return Claim("d", "resume_bytes", "no checkpoint was written", (), "checkpoint_step is 0")
    violations = _unlike_snapshot(outcome.resumed, outcome.snapshots, start)
    violations += continues(outcome.resumed, outcome.trace, start) if not violations else []
    loaded = sum(name.startswith("optimizer.") for snapshot in outcome.snapshots for name in snapshot)
    on = f"; trained on to step {last}, the bytes of the unbroken run at every step" if last > start else ""
    says = (
        f"reloaded from other seeds, {ranks(outcome.trace.world_size)} held at step {start} the snapshot's bytes "
        f"({loaded} entries of optimizer state){on}"
    )
    return Claim("d", "resume_bytes", says, tuple(violations))


def _unlike_snapshot(resumed: Trace, snapshots: list[dict[str, str]], start: int) -> list[Violation]:
    """The first parameter or optimizer entry loaded with other bytes than the snapshot in memory at the save."""
    for record in resumed.at(start):
        held = {f"optimizer.{name}": value for name, value in record.optimizer.items()}
        held |= {f"model.{name}": value for name, value in record.params.items()}
        snapshot = snapshots[record.rank]
        for name, value in held.items():
            if value != snapshot.get(name):
                wanted = f"{str(snapshot.get(name))[:16]}, as in the snapshot"
                what, rank = "what was loaded (sha256)", record.rank
                return [Violation(what, value[:16], wanted, "load", step=start, rank=rank, tensor=name)]
    return []
