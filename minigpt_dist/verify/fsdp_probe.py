"""What a rank does for a fully sharded wrapper under judgement: the scenarios, its memory, and the composed run.

Owns the rank's side; plain data comes back. What it means is `checks/fsdp*.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minigpt_dist.config import ModelConfig, TrainConfig
from minigpt_dist.memory import baseline, live_tensors
from minigpt_dist.parallel.collectives import world
from minigpt_dist.runner import Pieces
from minigpt_dist.trace import leaves, own_part, tensor_bytes
from minigpt_dist.verify.checkpoint_files import Files
from minigpt_dist.verify.composed_probe import run_with
from minigpt_dist.verify.contract import Implementation, resolve
from minigpt_dist.verify.in_flight import InFlight
from minigpt_dist.verify.plug import build_model, load_state, save_state
from minigpt_dist.verify.sharded_model import NAME, ShardedModel, ShardOptimizer
from minigpt_dist.verify.sharded_scenario import LR, ShardScenario, loss_of, seeded
from minigpt_dist.verify.stand_ins import layers_given

ABSENT = {"not_judged": "there is no fully sharded wrapper"}


def _found(spec: str, slots: list[str]) -> Implementation | None:
    impl = resolve(spec, tuple(slots))
    return impl if NAME in impl.names else None


def scenario_body(spec: str, slots: list[str], scenario: dict[str, Any], rank_seeds: bool) -> dict[str, Any]:
    """Whole parameters after construction and after each update, as bytes by name. rank_seeds: each rank starts from its own."""
    impl, s, rank = _found(spec, slots), ShardScenario(**scenario), world()[1]
    if impl is None:
        return ABSENT
    if s.bias and "Linear" in layers_given:
        return {"not_judged": "its Linear is of a package that is not here, and may have no bias"}
    module = seeded(s, s.seed + rank_seeds * rank)
    if rank_seeds:
        with torch.no_grad():
            for p in module.parameters():  # norms start from constants, whatever the seed
                p.add_(rank)
    model = ShardedModel(impl, module)
    model.shard()
    states = [_whole(model)]
    optimizer = ShardOptimizer(model, torch.optim.SGD, lr=LR, weight_decay=s.decay)
    for step in range(1, s.steps + 1 if not rank_seeds else 1):
        optimizer.zero_grad()
        _backwards(model, s, step, rank, optimizer)
        optimizer.step()
        states.append(_whole(model))
    return {"states": states, "read": model.reader.chosen}


def _backwards(model: ShardedModel, s: ShardScenario, step: int, rank: int, optimizer: Any) -> None:
    model.resting(step == s.rests)
    for part in range(s.backwards):
        loss_of(model, s, step, rank, part).backward()
        if part == s.backwards - 1 or not s.once:
            model.finish(optimizer)


def _whole(model: ShardedModel) -> dict[str, bytes]:
    return {name: tensor_bytes(t.float()) for name, t in model.whole_parameters().items()}


def memory_body(spec: str, slots: list[str], scenario: dict[str, Any]) -> dict[str, Any]:
    """Bytes by kind after construction, after a backward's finish call, and after each update; and the most gathered at once.

    flight: of the step in which that was least, as memory may be freed late, but not early.
    """
    impl, s, rank = _found(spec, slots), ShardScenario(**scenario), world()[1]
    if impl is None:
        return ABSENT
    known = baseline()
    model = ShardedModel(impl, seeded(s, s.seed))
    model.shard()
    optimizer = ShardOptimizer(model, torch.optim.AdamW, lr=1e-3)
    counts, flight = [("start", 0, _count(model, optimizer, known))], InFlight()
    peaks: list[int] = []

    def count(moment: str, step: int) -> None:
        if step == s.steps:  # a wrapper may learn the order of its layers in its first step
            counts.append((moment, step, _count(model, optimizer, known)))

    for step in range(1, s.steps + 1):
        optimizer.zero_grad()
        flight.restart()
        with flight:
            loss = loss_of(model, s, step, rank, 0)
            count("forwarded", step)
            loss.backward()
            model.finish(optimizer)
        peaks.append(flight.most)
        del loss
        count("finished", step)
        optimizer.step()
        optimizer.zero_grad()
        count("updated", step)
    return {"counts": counts, "flight": min(peaks)}


def _count(model: ShardedModel, optimizer: ShardOptimizer, known: list[torch.UntypedStorage]) -> dict[str, int]:
    """Bytes of distinct storages, each under the first kind that it belongs to; rest: alive, and of none of these."""
    params = model.held_tensors()
    state = getattr(optimizer.inner, "state", {})
    counted = {storage.data_ptr() for storage in known}
    counts = {}
    for kind, tensors in (
        ("params", [p.data for p in params]),
        ("grads", [p.grad for p in params if p.grad is not None]),
        ("optimizer", [t for _, t in leaves(_plain(state)) if isinstance(t, Tensor)]),
        ("rest", live_tensors(counted)),
    ):
        found = {st.data_ptr(): st.nbytes() for t in tensors if (st := own_part(t).untyped_storage()).nbytes()}
        counts[kind] = sum(n for address, n in found.items() if address not in counted)
        counted |= found.keys()
    return counts


def _plain(state: Any) -> Any:
    """An optimizer's state with numbers for the parameters that are its keys."""
    return {str(i): dict(v) if isinstance(v, Mapping) else v for i, v in enumerate(dict(state).values())}


def forward_body(spec: str, slots: list[str]) -> dict[str, Any]:
    """What a wrapper's forward gives for arguments by position and by name, and what the module's own gives."""
    impl = _found(spec, slots)
    if impl is None:
        return ABSENT
    module = Two()
    right = [tensor_bytes(t) for t in module(torch.ones(2, 12), scale=2.0)]
    model = ShardedModel(impl, module)
    model.shard()
    try:
        seen: Any = [tensor_bytes(t) for t in model.wrapper(torch.ones(2, 12), scale=2.0)]
    except TypeError as error:
        seen = f"TypeError: {error}"
    return {"right": right, "seen": seen}


class Two(nn.Module):
    """Two results, and an argument by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 24, bias=False)
        with torch.no_grad():
            self.layer.weight.copy_(torch.arange(288.0).view(24, 12) / 288)

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        out: Tensor = self.layer(x)
        return out * scale, out


def sharded_run_body(
    spec: str, slots: list[str], config: dict[str, Any], tokens: Tensor, folder: str, files: Files | None
) -> dict[str, Any]:
    """One rank of the composed run, as `composed_body`, with the fully sharded wrapper, and torch's AdamW over its shards."""
    impl = _found(spec, slots)
    if impl is None:
        raise LookupError(ABSENT["not_judged"])
    result = run_with(_pieces(impl, tokens), config, folder, files)
    return {**result, "averages_outside": True, "resumable": True}


def _pieces(impl: Implementation, tokens: Tensor) -> Pieces:
    def model(sizes: ModelConfig) -> nn.Module:
        return ShardedModel(impl, biasless(build_model(impl, sizes)))

    def start(model: Any) -> None:
        impl.require("broadcast_parameters")(model.module)  # whether construction does it is asked apart
        model.shard()

    def optimizer(model: Any, c: TrainConfig, world_size: int, rank: int) -> ShardOptimizer:
        options = {"lr": c.lr, "betas": c.betas, "eps": c.eps, "weight_decay": c.weight_decay, "foreach": False}
        return ShardOptimizer(model, torch.optim.AdamW, **options)

    def save(state: dict[str, Any], folder: Path, step: int, config: TrainConfig) -> None:
        save_state(impl, state, folder, step)

    return Pieces(
        model=model,
        corpus=lambda config: tokens,
        broadcast=start,
        optimizer=optimizer,
        save=save,
        load=lambda folder, N, rank: load_state(impl, folder, N, rank),
        after_backward=lambda model: model.finish(),  # type: ignore[operator]  # a ShardedModel
        full_parameters=lambda model: model.whole_parameters().items(),  # type: ignore[operator]  # a ShardedModel
    )


def biasless(model: nn.Module) -> nn.Module:
    """`model` with no bias in any `nn.Linear`, as in many lessons' own; `fsdp.biases` asks about biases."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.register_parameter("bias", None)
    return model
