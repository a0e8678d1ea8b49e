"""One training step: our ZeRO-1 beside torch's DistributedDataParallel, ZeroRedundancyOptimizer and FSDP2.

The rivals are built as their documentation does, with torch's default Adam; a name says which option was added.

Owns how each of them takes a step on the same model and batch, and the goals. Leaves the clock to `interleave`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam

from minigpt_dist.batches import read_batch
from minigpt_dist.bench.comparison import Comparison
from minigpt_dist.bench.interleave import Seconds, interleaved, slowest
from minigpt_dist.config import ModelConfig, TrainConfig
from minigpt_dist.corpus import make_corpus
from minigpt_dist.launch import run_world
from minigpt_dist.loss import next_token_loss
from minigpt_dist.model import MiniGPT
from minigpt_dist.parallel.collectives import barrier, world
from minigpt_dist.parallel.zero import ZeroOptimizer

Step = Callable[[Tensor, Tensor], None]
LR = 1e-3
SIZES = {
    "tiny": ModelConfig(),
    "medium": ModelConfig(vocab=1024, embed_dim=256, num_heads=4, num_layers=4, seq_len=128),
}


def optimizer_step(
    model: nn.Module, optimizer: torch.optim.Optimizer | ZeroOptimizer, inputs: Tensor, targets: Tensor
) -> None:
    """Forward, backward and update on one batch."""
    optimizer.zero_grad()
    next_token_loss(model(inputs), targets).backward()
    optimizer.step()


def forward_backward(model: nn.Module) -> Step:
    """No exchange and no update: what every variant must do at least."""

    def step(inputs: Tensor, targets: Tensor) -> None:
        model.zero_grad()
        next_token_loss(model(inputs), targets).backward()

    return step


def zero1(model: nn.Module) -> Step:
    return partial(optimizer_step, model, ZeroOptimizer(model, *world(), lr=LR))


def ddp_adam(model: nn.Module, views: bool = False, fused: bool | None = None) -> Step:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=views)
    return partial(optimizer_step, wrapped, Adam(wrapped.parameters(), lr=LR, fused=fused))


def ddp_zero(model: nn.Module, views: bool = False) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # a second to import, and only here

    wrapped = DistributedDataParallel(model)
    sharded = partial(ZeroRedundancyOptimizer, wrapped.parameters(), Adam, parameters_as_bucket_view=views)
    return partial(optimizer_step, wrapped, sharded(lr=LR))


def fsdp2(model: nn.Module) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world()[0],))  # without it, FSDP2 looks for an accelerator
    for block in (*model.blocks, model):  # type: ignore[misc]  # MiniGPT's: nn.Module does not know the attribute
        fully_shard(block, mesh=mesh)
    return partial(optimizer_step, model, Adam(model.parameters(), lr=LR))


OURS, DDP, ZRO, FSDP2 = "ours (ZeRO-1)", "DDP + Adam", "DDP + ZeroRedundancyOptimizer", "FSDP2 + Adam"
VARIANTS: dict[str, Callable[[nn.Module], Step]] = {
    "forward and backward only": forward_backward,
    OURS: zero1,
    DDP: ddp_adam,
    f"{DDP}, gradient_as_bucket_view": partial(ddp_adam, views=True),
    f"{DDP}, gradient_as_bucket_view, fused": partial(ddp_adam, views=True, fused=True),  # other bits than Adam's own
    ZRO: ddp_zero,
    f"{ZRO}, parameters_as_bucket_view": partial(ddp_zero, views=True),
    FSDP2: fsdp2,
}
LEFT_OUT = {"tiny": {FSDP2}, "medium": set[str]()}  # a gather a block: no rival for a tiny model
GOALS = {"tiny": {DDP: 1.0, ZRO: 0.5}, "medium": {DDP: 0.95}}


def own_batch(size: str) -> tuple[Tensor, Tensor]:
    """This rank's inputs and targets."""
    N, rank = world()
    config = TrainConfig(world_size=N, steps=1, checkpoint_step=0, model=SIZES[size])
    return read_batch(make_corpus(0, config.total_tokens, config.model.vocab), config, 0, rank)


def step_body(size: str, variants: list[str], rounds: int, steps: int) -> Seconds:
    """On each rank: the same initial weights for all variants, this rank's batch."""
    inputs, targets = own_batch(size)
    actions = {}
    for name in variants:
        torch.manual_seed(0)
        actions[name] = partial(VARIANTS[name](MiniGPT(**asdict(SIZES[size]))), inputs, targets)
    return interleaved(actions, rounds, steps, warm_up=3, before=barrier)


def compare_steps(size: str, world_size: int, rounds: int, steps: int, deadline_s: float) -> Comparison:
    """Training steps of all variants in turns: `rounds` rounds, `steps` steps a turn."""
    variants = [name for name in VARIANTS if name not in LEFT_OUT[size]]
    ranks = run_world(step_body, world_size, size, variants, rounds, steps, deadline_s=deadline_s)
    title = f"Training step, {size}: P = {SIZES[size].numel():,}, {world_size} ranks, {rounds} rounds of {steps} steps"
    return Comparison(title, slowest(ranks), OURS, GOALS[size])
