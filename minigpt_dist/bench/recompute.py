"""What recomputation costs and saves: a step that keeps all activations beside ours and torch's that recompute by block.

Owns the variants and the goal: a step is a forward, two forwards' worth of backward, and an update, so one forward of the blocks more is
at most a third (Chen et al. 2016, section 4). Leaves counting what is kept to `activations.SavedBytes`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from minigpt_dist.activations import SavedBytes
from minigpt_dist.bench.comparison import Comparison
from minigpt_dist.bench.interleave import Seconds, interleaved, slowest
from minigpt_dist.bench.step import LR, SIZES, optimizer_step, own_batch
from minigpt_dist.launch import run_world
from minigpt_dist.loss import next_token_loss
from minigpt_dist.model import MiniGPT
from minigpt_dist.parallel.collectives import barrier, world
from minigpt_dist.parallel.recompute import recompute_blocks
from minigpt_dist.parallel.zero import ZeroOptimizer

OURS, PLAIN, TORCH = "ours (recompute)", "all activations kept", "torch.utils.checkpoint, not reentrant"
GOALS = {"medium": {PLAIN: 1.35}}  # a tiny model's step is the interpreter's time


def _torchs(model: MiniGPT) -> MiniGPT:
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


VARIANTS: dict[str, Callable[[MiniGPT], MiniGPT]] = {PLAIN: lambda model: model, OURS: recompute_blocks, TORCH: _torchs}


def peak_bytes(model: nn.Module, inputs: Tensor, targets: Tensor) -> int:
    """The most that one forward and backward keeps for backward."""
    with SavedBytes(model.parameters()) as kept:
        next_token_loss(model(inputs), targets).backward()
    return kept.peak


def step_body(size: str, rounds: int, steps: int) -> tuple[Seconds, dict[str, int]]:
    """On each rank: the same initial weights for all variants, this rank's batch; then what each keeps."""
    inputs, targets = own_batch(size)
    actions, kept = {}, {}
    for name, change in VARIANTS.items():
        torch.manual_seed(0)
        model = change(MiniGPT(**asdict(SIZES[size])))
        kept[name] = peak_bytes(model, inputs, targets)
        actions[name] = partial(optimizer_step, model, ZeroOptimizer(model, *world(), lr=LR), inputs, targets)
    return interleaved(actions, rounds, steps, warm_up=3, before=barrier), kept


def compare_recompute(size: str, world_size: int, rounds: int, steps: int, deadline_s: float) -> Comparison:
    """Steps of all variants in turns: `rounds` rounds, `steps` steps a turn. The title has the bytes that each keeps."""
    ranks = run_world(step_body, world_size, size, rounds, steps, deadline_s=deadline_s)
    kept = ", ".join(f"{name} {ranks[0][1][name]:,}" for name in (PLAIN, OURS))  # torch's are out of a hook's sight
    title = f"Step with recomputation, {size}: P = {SIZES[size].numel():,}, {world_size} ranks, {rounds} rounds of {steps} steps"
    times = slowest([each for each, _ in ranks])
    return Comparison(f"{title}; bytes kept for backward at most: {kept}", times, OURS, GOALS.get(size, {}))
