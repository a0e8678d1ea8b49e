"""What a fully sharded wrapper holds on a rank: a share of parameters, gradients and moments between steps, a few layers within one."""

from __future__ import annotations

from typing import Any

from minigpt_dist.verify.checks.registry import Check, register
from minigpt_dist.verify.fsdp_probe import memory_body
from minigpt_dist.verify.sharded_oracle import Share, share_of
from minigpt_dist.verify.sharded_scenario import DEEP
from minigpt_dist.verify.subject import NotJudged, Subject
from minigpt_dist.verify.violation import Violation

# Beside its share, a rank may keep small things: step counts of the optimizer, flags, a scalar a parameter.
SLACK = 2048
# Layers whose parameters may be gathered at once: the one in use and the next two, each as pieces and as a whole, and a margin. All: 20.
LAYERS = 8
MOMENTS = 2
PEAK_HINT = (
    "gather a layer before its forward, free it after, and gather it again for its backward; autograd keeps views of a weight "
    "(F.linear saves its transpose): give back the storage (untyped_storage().resize_(0)), or gather in a torch.autograd.Function"
)


def _measured(subject: Subject, world_size: int) -> tuple[Share, list[dict[str, Any]]]:
    results = subject.evidence(
        ("fsdp memory", world_size), lambda: subject.ask(memory_body, world_size, DEEP.to_dict())
    )
    if "not_judged" in results[0]:
        raise NotJudged(results[0]["not_judged"])
    return share_of(DEEP, world_size), results


def _over(
    results: list[dict[str, Any]], kind: str, most: int, what: str, hint: str, at: tuple[str, ...]
) -> list[Violation]:
    """The first rank and moment at which a kind of memory is above `most` bytes."""
    for rank, r in enumerate(results):
        for moment, step, counts in r["counts"]:
            if moment in at and counts[kind] > most:
                seen, wanted = f"{counts[kind]} bytes", f"at most {most}"
                return [Violation(what, seen, wanted, "memory", step=step, rank=rank, hint=hint)]
    return []


def parameters_are_sharded(subject: Subject, world_size: int) -> list[Violation]:
    """Between steps a rank holds 1/N of the parameters, padded, and at most as much again (a master copy): 4P/N to 8P/N bytes."""
    share, results = _measured(subject, world_size)
    between = ("start", "updated")
    hint = f"all are {share.whole} bytes: a shard must be a copy of its part (a view keeps the whole alive); gathered ones must go"
    found = _over(results, "params", share.mine + SLACK, "memory of parameters between steps", hint, between)
    hint = "something holds more than the parameters, their gradients and the optimizer's state: gathered parameters that were not freed?"
    found = found or _over(results, "rest", share.mine + SLACK, "memory beside the shards between steps", hint, between)
    held = sum(r["counts"][0][2]["params"] + r["counts"][0][2]["rest"] for r in results)
    if not found and held < share.whole:
        wanted = f"at least {share.whole}, all parameters once"
        return [Violation("memory of parameters over all ranks", f"{held} bytes", wanted, "memory", step=0)]
    return found


def gradients_are_sharded(subject: Subject, world_size: int) -> list[Violation]:
    """After the finish call a rank holds the gradients of its shard, and not the whole ones."""
    share, results = _measured(subject, world_size)
    hint = f"all gradients are {share.whole} bytes: keep the part that the reduce-scatter gave, let go of the rest"
    found = _over(
        results, "grads", share.mine + SLACK, "memory of gradients after the finish call", hint, ("finished",)
    )
    return found or _over(
        results, "rest", share.mine + SLACK, "memory beside the shards after the finish call", hint, ("finished",)
    )


def moments_are_sharded(subject: Subject, world_size: int) -> list[Violation]:
    """The optimizer over a rank's parameters keeps two moments of its shard: 8P/N bytes."""
    share, results = _measured(subject, world_size)
    hint = "the optimizer is built over wrapper.parameters(): these must be the shards"
    return _over(results, "optimizer", MOMENTS * share.mine + SLACK, "optimizer memory", hint, ("updated",))


def freed_after_forward(subject: Subject, world_size: int) -> list[Violation]:
    """After a forward no more is held than before it: what was gathered is gone from every parameter, attribute and list.

    What was held before the first step, shards that are views of whole parameters, is no fault of a forward.
    """
    share, results = _measured(subject, world_size)
    hint = "point each parameter back at its shard once its layer has run, and drop the whole one"
    for kind, what in (
        ("params", "memory of parameters after forward"),
        ("rest", "memory beside the shards after forward"),
    ):
        most = max(share.mine, *(r["counts"][0][2][kind] for r in results)) + SLACK
        found = _over(results, kind, most, what, hint, ("forwarded",))
        if found:
            return found
    return []


def few_layers_at_once(subject: Subject, world_size: int) -> list[Violation]:
    """Within a step a few layers' parameters are gathered at a time, and nothing, autograd neither, keeps more of them."""
    share, results = _measured(subject, world_size)
    most = LAYERS * share.unit + SLACK
    for rank, r in enumerate(results):
        if r["flight"] > most:
            seen = f"{r['flight']} bytes"
            wanted = f"at most {most}, {LAYERS} of {DEEP.layers} layers (all are {share.whole})"
            return [Violation("gathered parameters alive at once", seen, wanted, "memory", rank=rank, hint=PEAK_HINT)]
    return []


for _name, _claim, _find in (
    ("parameters", "between steps a rank holds its share of the parameters", parameters_are_sharded),
    ("gradients", "after the finish call a rank holds its share of the gradients", gradients_are_sharded),
    ("moments", "the optimizer's state is a rank's share", moments_are_sharded),
    ("freed", "after a forward nothing gathered is left", freed_after_forward),
    ("peak", "few layers' parameters are gathered at once", few_layers_at_once),
):
    register(Check(f"fsdp.{_name}", _claim, _find, ("fsdp",), "memory", world_sizes=(2, 3, 4)))
