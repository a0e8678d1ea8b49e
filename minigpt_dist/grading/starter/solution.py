"""End-to-end distributed training: six pieces, each graded alone and then all together in one training loop.

Write them in any order; a piece that is written scores by itself. Each docstring says what goes in, what must come out, and which invariant
judges it. `minigpt-dist grade .` grades this folder. At the end stand three more pieces, which are asked only by name:
`minigpt-dist grade . --slots collectives`, `--slots pipeline`, `--slots guard`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class MiniGPT(nn.Module):
    """A decoder-only transformer: token and position embeddings, pre-LayerNorm blocks, a final LayerNorm, an untied head.

    A block is x + attention(norm(x)), then x + mlp(norm(x)); attention has `num_heads` heads of embed_dim / num_heads, scores divided by
    the root of that, and a causal mask; the MLP is Linear to 4 * embed_dim, GELU, Linear back. Query, key, value, output projection and
    head have no bias: 29,824 parameters at the default sizes.

    Judged by: logits see earlier tokens and never later ones; every parameter gets a gradient; the number of parameters.
    """

    def __init__(
        self, vocab: int = 64, embed_dim: int = 32, num_heads: int = 4, num_layers: int = 2, seq_len: int = 16
    ) -> None:
        super().__init__()
        raise NotImplementedError("MiniGPT.__init__ is not written yet")

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (B, S, vocab), float32, of token ids (B, S), int64, with S up to seq_len."""
        raise NotImplementedError("MiniGPT.forward is not written yet")


def make_corpus(seed: int, total_tokens: int, vocab: int = 64) -> Tensor:
    """`total_tokens` token ids from 0 to vocab - 1: shape (total_tokens,), int64.

    Judged by: the same seed gives the same tokens, whatever torch's global generator was used for before; another seed, others.
    """
    raise NotImplementedError("make_corpus is not written yet")


def broadcast_parameters(module: nn.Module, src: int = 0) -> None:
    """Make every rank's parameters and buffers those of rank `src`, in place: the tensors stay the same objects.

    Every rank calls it once, before the optimizer is built. Frozen parameters and buffers of every dtype count too.

    Judged by: ranks start with different values, and hold rank `src`'s bytes afterwards.
    """
    raise NotImplementedError("broadcast_parameters is not written yet")


class ZeroOptimizer:
    """ZeRO stage 1: AdamW whose state is divided among the ranks.

    The trainable parameters, one after another, are one flat float32 vector of P numbers, padded with zeros to a multiple of world_size.
    A rank keeps the master copy of its own slice and the two moments of it: 12 bytes an element, 12P/N bytes a rank, and no more.

    Judged by: the parameters after each step are those of one process on the mean gradient, at world sizes that divide P and that do not;
    every rank holds the same parameters; optimizer memory is 12P/N bytes a rank; a state taken and loaded changes nothing.
    """

    def __init__(
        self,
        module: nn.Module,
        world_size: int,
        rank: int,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self.lr = lr  # a scheduler may change it between steps
        raise NotImplementedError("ZeroOptimizer.__init__ is not written yet")

    @torch.no_grad()
    def step(self) -> None:
        """One update; every rank calls it after backward.

        Reduce-scatter the gradients and divide by the world size; AdamW on the own slice, decay decoupled, moments corrected for their
        bias, eps outside the root; all-gather the slices and write them back. A parameter whose gradient is None counts as zeros.
        """
        raise NotImplementedError("ZeroOptimizer.step is not written yet")

    def zero_grad(self) -> None:
        """Clear the gradients of all parameters, not only of the own slice."""
        raise NotImplementedError("ZeroOptimizer.zero_grad is not written yet")

    def state_dict(self) -> dict[str, Any]:
        """All that steers this rank's next step: master slice, both moments, step count, learning rate. Copies: later steps change none."""
        raise NotImplementedError("ZeroOptimizer.state_dict is not written yet")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse, into an optimizer built over the same module at the same world size and rank."""
        raise NotImplementedError("ZeroOptimizer.load_state_dict is not written yet")


class DistributedDataParallel(nn.Module):
    """A module whose gradients are averaged over ranks. Construction copies rank 0's parameters and buffers to all.

    Judged by: after backward and `sync_grads()` every trainable parameter's gradient is the mean over ranks, on every rank, for one
    backward or several, with frozen and tied parameters, and with some that got no gradient.
    """

    def __init__(self, module: nn.Module, world_size: int) -> None:
        super().__init__()
        raise NotImplementedError("DistributedDataParallel.__init__ is not written yet")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the wrapped module returns."""
        raise NotImplementedError("DistributedDataParallel.forward is not written yet")

    def sync_grads(self) -> None:
        """Called after each backward: when it returns, gradients are averaged. Adding up in hooks before is fine."""
        raise NotImplementedError("DistributedDataParallel.sync_grads is not written yet")


class FullyShardedDataParallel(nn.Module):
    """A module whose parameters are cut over ranks. Construction copies rank 0's to all, and leaves a rank its share.

    `parameters()` are the rank's shards; torch's optimizers take them. A layer's whole parameters are gathered for its forward and for its
    backward, and freed after; gradients are reduced to the shards.

    Judged by: after every update the whole parameters are those of one process; P/N of them are held between steps.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        raise NotImplementedError("FullyShardedDataParallel.__init__ is not written yet")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the wrapped module returns."""
        raise NotImplementedError("FullyShardedDataParallel.forward is not written yet")

    def finish_gradient_synchronization(self) -> None:
        """Called after each backward: when it returns, each shard's gradient is its part of the mean."""
        raise NotImplementedError("FullyShardedDataParallel.finish_gradient_synchronization is not written yet")

    def gather_full_params(self) -> dict[str, torch.Tensor]:
        """Every parameter, whole, by the module's names; all ranks call it together."""
        raise NotImplementedError("FullyShardedDataParallel.gather_full_params is not written yet")


def save_sharded(per_rank_state: list[dict[str, Any]], dest_dir: str, step: int) -> Any:
    """Write one file a rank and a manifest into `dest_dir`. Rank 0 calls it with the states of all ranks, in rank order.

    A state is a dict of tensors of any dtype and shape, plain values, and dicts of these. The manifest records schema version, step, world
    size and, for each rank, file name and sha256. `dest_dir` may hold an older checkpoint.

    Judged by: a kill or a full disk at any moment leaves the old checkpoint or the new one, whole (write beside, flush, rename last).
    """
    raise NotImplementedError("save_sharded is not written yet")


def load_sharded(src_dir: str, expected_world_size: int) -> list[dict[str, Any]]:
    """The states of all ranks, in rank order, bit for bit as they were saved.

    Raises an exception, and returns nothing, for another world size, a missing, truncated or altered shard, an exchanged one, or a manifest
    that does not fit. Nothing is unpickled before its sha256 has been compared: a checkpoint must not be able to run code.

    Judged by: each of these damages, one at a time; and training on from step 10 ends in the same bytes as the unbroken run.
    """
    raise NotImplementedError("load_sharded is not written yet")


# Asked by name: --slots collectives. All ranks of the default group call each of them together. Made of sends and receives
# (torch.distributed's send, recv, isend, irecv, batch_isend_irecv), which the judge counts.


def ring_all_reduce(tensor: Tensor, timeout: float = 60.0) -> None:
    """Sum `tensor` over ranks, in place. It is contiguous, of one shape and dtype on all ranks; its length may be anything, also 0.

    Reduce-scatter, then all-gather: N - 1 rounds each, in which every rank sends a slice of 1/N to its neighbour.

    Judged by: exact sums of every length and dtype; the same bytes on all ranks; 2T(N-1)/N bytes sent a rank; where a rank sends nothing
    for `timeout` seconds, an error that names it ("rank 1").
    """
    raise NotImplementedError("ring_all_reduce is not written yet")


def reduce_scatter(tensor: Tensor) -> Tensor:
    """This rank's slice of the sum of `tensor` (1-D, not modified) over ranks, cut as `tensor.tensor_split(world_size)` cuts.

    Judged by: exact sums, also where slices differ or are empty; T(N-1)/N bytes sent a rank.
    """
    raise NotImplementedError("reduce_scatter is not written yet")


def all_gather(tensor: Tensor) -> Tensor:
    """All ranks' tensors (1-D, not modified), one after the other in rank order. Their lengths may differ, and may be 0.

    Judged by: every rank's numbers in their place; T(N-1)/N bytes sent a rank, T of the whole, beside a few for the lengths.
    """
    raise NotImplementedError("all_gather is not written yet")


def tree_broadcast(tensor: Tensor, src: int = 0) -> None:
    """Overwrite `tensor` on every rank with rank `src`'s, in place.

    Judged by: the source's bytes everywhere, whoever is the source; no rank sends more than log2(N) times, rounded up.
    """
    raise NotImplementedError("tree_broadcast is not written yet")


# Asked by name: --slots pipeline.


def pipeline_schedule(kind: str, ranks: int, micros: int, chunks: int = 1) -> list[list[tuple[str, int, int]]]:
    """What every rank does in a step, in order: a list for each rank of ("F" or "B", stage, micro-batch). A pure function.

    kind: "gpipe" (all forwards, then all backwards) or "1f1b"; "interleaved" if you like, with `chunks` stages a rank (else leave `chunks`
    out): stage s lives on rank s % ranks. Backwards come in the order of the data. Anything else raises ValueError.

    Judged by: each action once; no rank waits for ever; the bubble is (N-1)/(MV+N-1) where a backward takes twice a forward; rank r of
    1F1B holds at most N - r activations.
    """
    raise NotImplementedError("pipeline_schedule is not written yet")


# Asked by name: --slots guard.


def should_roll_back(loss: float, gradients: Iterable[Tensor], last: float) -> bool:
    """Was this step bad? All ranks ask together, each with its own loss and gradients, and get one answer.

    True where the loss or any gradient is not finite on any rank, or where the mean loss over ranks is above twice `last`, the mean loss of
    the step before (NaN at the first step).

    Judged by: NaN and inf on each rank in turn; a jump of the mean, and of one rank alone; no alarm at good steps, also after a bad one.
    """
    raise NotImplementedError("should_roll_back is not written yet")
