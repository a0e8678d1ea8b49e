"""What the sharded optimizer holds on a rank, and what it sends: its state once over all ranks, evenly, and no less than a mean needs.

Owns the bounds on bytes. Leaves what the optimizer computes to `optimizer.py`, whose run under one scenario it shares.
"""

from __future__ import annotations

import torch

from minigpt_dist.memory import zero1_bytes
from minigpt_dist.verify.checks.optimizer import trajectories
from minigpt_dist.verify.checks.registry import Check, register
from minigpt_dist.verify.extra_bytes import hint_of
from minigpt_dist.verify.linear_probe import hold_body, probe_body
from minigpt_dist.verify.scenario import BY_NAME, Scenario
from minigpt_dist.verify.subject import NotJudged, Subject
from minigpt_dist.verify.violation import Violation

# Memory of a rank beside all that is counted: of right optimizers 0.02 MB, and of a buffer that a thread of gloo has not let go yet
# 8.8 MB. State held whole, as little as there can be of it, is 14.7 MB more than a share, or stays when the run is dropped: 17.6 MB.
UNSEEN = 10 << 20


def optimizer_state_is_sharded(subject: Subject, world_size: int) -> list[Violation]:
    """Bytes alive besides parameters and gradients after the steps: 12*ceil(P/N) on every rank of ours; no more in all for others."""
    s = BY_NAME["memory"].drawn(subject.draw("memory"))
    raw, _ = trajectories(subject, world_size, s)
    P, _largest = _sizes(s)
    share = zero1_bytes(P, world_size)
    held = [r["bytes"]["optimizer"] for r in raw]
    if subject.ours:
        return [_memory(s, rank, h, share) for rank, h in enumerate(held) if h != share][:1]
    # Together at most one copy of the state, plus padding and step counts: 3 % and 4 KiB a rank.
    most = sum(allowed(share) for _ in held)
    if sum(held) > most:
        worst = max(range(world_size), key=lambda r: held[r])
        return [_memory(s, worst, held[worst], share, hint_of(held, P, share))]
    if sum(held) < 8 * P:
        return [
            Violation(
                "optimizer memory over all ranks",
                f"{sum(held)} bytes",
                f"at least {8 * P} (two float32 moments of {P} elements)",
                "memory",
                step=s.steps,
            )
        ]
    return []


def optimizer_state_is_balanced(subject: Subject, world_size: int) -> list[Violation]:
    """No rank holds more than its share, or than its share and one whole parameter where parameters are not cut."""
    s = BY_NAME["memory"].drawn(subject.draw("memory"))
    raw, _ = trajectories(subject, world_size, s)
    P, largest = _sizes(s)
    whole = largest * (8 if raw[0]["averages_outside"] else 12)  # parameters may have owners instead of being cut
    share = (8 if raw[0]["averages_outside"] else 12) * -(-P // world_size)
    held = [r["bytes"]["optimizer"] for r in raw]
    for rank, mine in enumerate(held):
        if mine > allowed(share) + whole:
            hint = "state is lopsided: some ranks own more than others"
            if sum(held) > sum(allowed(share) for _ in held):
                hint = hint_of(held, P, share)
            return [_memory(s, rank, mine, share + whole, hint)]
    return []


def reduction_reaches_its_minimum(subject: Subject, world_size: int) -> list[Violation]:
    """What crosses the network is at least what any reduction and gathering must move: 2(N-1) times 4P bytes a step."""
    if not subject.walled:
        raise NotJudged("traffic is read from outside, of a sandbox with a network of its own")
    s = BY_NAME["memory"].drawn(subject.draw("traffic"))
    subject.ask(probe_body, world_size, BY_NAME["many_tensors"].to_dict())  # ranks are there and have met
    before = subject.traffic(world_size)
    raw = subject.ask(probe_body, world_size, s.to_dict())
    after = subject.traffic(world_size)
    if "not_judged" in raw[0]:
        raise NotJudged(raw[0]["not_judged"])
    if before is None or after is None:
        return [_gone("reduce", s)]
    least = 2 * (world_size - 1) * 4 * _sizes(s)[0] * s.steps
    if after - before >= least:
        return []
    hint = "no rank can know the mean of gradients that it never received"
    return [
        Violation(
            "bytes between the ranks", f"{after - before}", f"at least {least}", "reduce", step=s.steps, hint=hint
        )
    ]


def nothing_is_hidden(subject: Subject, world_size: int) -> list[Violation]:
    """All that the ranks hold, wherever they put it: parameters, gradients, the state once, and no more than noise beside them."""
    if not subject.walled:
        raise NotJudged("memory is counted from outside, of a sandbox with walls")
    if optimizer_state_is_sharded(subject, world_size):
        return []  # what it holds too much of is in plain sight
    return _seen_from_outside(subject, world_size)


def _seen_from_outside(subject: Subject, world_size: int) -> list[Violation]:
    s = BY_NAME["huge"].drawn(subject.draw("held"))
    subject.ask(hold_body, world_size, BY_NAME["tiny"].to_dict())  # ranks are there, and have done all of it once
    subject.ask(hold_body, world_size, None)
    before = subject.held(world_size)
    answer = subject.ask(hold_body, world_size, s.to_dict())[0]
    held = subject.held(world_size)
    subject.ask(hold_body, world_size, None)
    after = subject.held(world_size)
    if "not_judged" in answer:
        raise NotJudged(answer["not_judged"])
    if before is None or held is None or after is None:
        return [_gone("memory", s)]
    P, _ = _sizes(s)
    for what, seen, most, why in (
        ("of the run", held - after, world_size * 8 * P + allowed(12 * P), "parameters, gradients, and the state once"),
        ("left by the run", after - before, 0, "a buffer of a collective or so"),
    ):
        if seen > most + world_size * UNSEEN:
            limit = f"at most {most + world_size * UNSEEN}: {why}"
            hint = "state is held whole, wherever it lies: in memory of C, in files, in other processes"
            return [Violation(f"memory of all ranks {what}", f"{seen} bytes", limit, "memory", step=s.steps, hint=hint)]
    return []


def _gone(stage: str, s: Scenario) -> Violation:
    """Ranks that are not there to be counted, though they have answered: that is no reason to ask nothing of them."""
    return Violation("the ranks, after their answer", "gone", "there until they are told to end", stage, step=s.steps)


def allowed(share: int) -> int:
    """What another implementation may hold for a share: 3 % of padding, and 4 KiB of step counts and the like, more."""
    return share + share * 3 // 100 + 4096


def _sizes(s: Scenario) -> tuple[int, int]:
    """(P, elements of the largest parameter)."""
    numels = [torch.Size(shape).numel() for shape in s.shapes]
    return sum(numels), max(numels)


def _memory(s: Scenario, rank: int, held: int, wanted: int, hint: str = "") -> Violation:
    return Violation(
        "optimizer memory", f"{held} bytes", f"{wanted} bytes", "memory", step=s.steps, rank=rank, hint=hint
    )


for _name, _claim, _find in (
    ("sharded", "ranks together hold the optimizer's state once", optimizer_state_is_sharded),
    ("balanced", "no rank holds more than its share of the state", optimizer_state_is_balanced),
):
    register(Check(f"optimizer.{_name}", _claim, _find, ("optimizer",), "memory", world_sizes=(1, 2, 3, 4)))
register(
    Check(
        "optimizer.resident",
        "no state is hidden from the count",
        nothing_is_hidden,
        ("optimizer",),
        "memory",
        world_sizes=(3,),
    )
)
register(
    Check(
        "optimizer.traffic",
        "gradients and parameters cross the network",
        reduction_reaches_its_minimum,
        ("optimizer",),
        "reduce",
        world_sizes=(2, 3),
    )
)
