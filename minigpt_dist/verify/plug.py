"""From an implementation's names to the `Pieces` that a worker wires into the loop.

Owns the calling conventions of the contract: lesson-style `save_sharded(all_states, ...)` on rank 0, `load_sharded` returning a list or a
(manifest, list) pair, `MiniGPT` with or without sizes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minigpt_dist.config import ModelConfig, TrainConfig
from minigpt_dist.parallel.collectives import all_reduce_sum, barrier, world
from minigpt_dist.runner import Pieces
from minigpt_dist.verify.bucket_bytes import bucket_bytes
from minigpt_dist.verify.contract import Implementation
from minigpt_dist.verify.keywords import accepted, accepts
from minigpt_dist.verify.optimizers import MADE, NotSupportedError, own_method
from minigpt_dist.verify.portable import pack, unpack
from minigpt_dist.verify.shapes import finish_of, required, start_of

BUCKET_MB = 0.01
WRAPPED = "wrapper of the run"  # the last `Wrapped`, in an implementation's extras
SIZES = {
    "vocab": ("vocab", "vocab_size"),
    "embed_dim": ("embed_dim", "n_embd", "dim"),
    "num_heads": ("num_heads", "n_head"),
    "num_layers": ("num_layers", "n_layer"),
    "seq_len": ("seq_len", "block_size", "context_length"),
}


def build_model(impl: Implementation, sizes: ModelConfig) -> nn.Module:
    """The implementation's MiniGPT at `sizes`. NotSupportedError if its constructor cannot be told them."""
    build = impl.require("MiniGPT")
    options: dict[str, Any] = {}
    for ours, theirs in SIZES.items():
        name = next((n for n in theirs if accepts(build, n)), None)
        if name is not None:
            options[name] = getattr(sizes, ours)
        elif getattr(sizes, ours) != getattr(ModelConfig(), ours):
            raise NotSupportedError(f"MiniGPT takes no {ours}")
    extra = {"dropout": sizes.dropout, "tie_head": sizes.tie_head, "mlp_ratio": sizes.mlp_ratio}
    options.update(accepted(build, {k: v for k, v in extra.items() if v != getattr(ModelConfig(), k)}))
    model: nn.Module = build(**options)
    return model


def _build_optimizer(impl: Implementation, module: nn.Module, config: TrainConfig, world_size: int, rank: int) -> Any:
    build = impl.require("ZeroOptimizer")
    options: dict[str, Any] = {"lr": config.lr, "eps": config.eps, "weight_decay": config.weight_decay}
    if impl.averages_outside:
        return build(module.parameters(), torch.optim.AdamW, betas=config.betas, **options)
    options["reduction"] = config.reduction
    if accepts(build, "betas"):
        options["betas"] = config.betas
    else:
        options["beta1"], options["beta2"] = config.betas
    return build(module, world_size=world_size, rank=rank, **accepted(build, options))


def _with_state(impl: Implementation, optimizer: Any) -> Any:
    """An optimizer without any state_dict, or with torch's under a constructor that was never called, is taken to give none.

    A run takes the state at every step; what such an optimizer really holds is measured all the same, and resuming is not asked of it.
    """
    impl.extras[MADE] = type(optimizer)
    if own_method(type(optimizer), "state_dict"):
        return optimizer
    try:
        optimizer.state_dict()
    except AttributeError:
        optimizer.state_dict = dict
    return optimizer


class Wrapped:
    """A model inside an implementation's data-parallel wrapper, or beside the judge's own averaging where it has none."""

    def __init__(self, impl: Implementation) -> None:
        self.impl = impl
        self.wraps = "DistributedDataParallel" in impl.names and "ddp" in impl.slots
        self.wrapper: Any = None
        self.module: nn.Module | None = None
        self.begun = False

    def start(self, module: nn.Module) -> None:
        """Make all ranks equal: by the wrapper's construction, or by the broadcast."""
        if self.wraps:
            self.wrapper, self.module = build_wrapper(self.impl, module), module
        else:
            self.impl.require("broadcast_parameters")(module)

    def bytes_of_buckets(self) -> int:
        """What the wrapper keeps beside the gradients themselves."""
        return 0 if self.module is None else bucket_bytes(self.wrapper, self.module)

    def forward(self, module: nn.Module, ids: Tensor) -> Tensor:
        if self.wrapper is not None and not self.begun:
            begin(self.impl, self.wrapper)
            self.begun = True
        out: Tensor = module(ids) if self.wrapper is None else self.wrapper(ids)
        return out

    def after_backward(self, module: nn.Module) -> None:
        """End the wrapper's averaging; average here for an optimizer that expects it done."""
        if self.wrapper is not None:
            finish(self.impl, self.wrapper)
            self.begun = False
        elif self.impl.averages_outside:
            average_gradients(module.parameters())


def build_wrapper(impl: Implementation, module: nn.Module) -> Any:
    """The data-parallel wrapper around `module`, with the arguments its constructor has."""
    build = impl.require("DistributedDataParallel")
    named = {"world_size": world()[0], "rank": world()[1], "bucket_size_mb": BUCKET_MB, "bucket_cap_mb": BUCKET_MB}
    sizes = {
        name: int(BUCKET_MB * 2**20) if "byte" in name else BUCKET_MB for name in required(build) if "bucket" in name
    }
    return build(module, **{**sizes, **accepted(build, named)})


def begin(impl: Implementation, wrapper: Any) -> None:
    """The call before a step, if the wrapper has one: the function of an `adapters.py`, or its own method where there is none."""
    by_function = impl.extras.get("start")
    if by_function is not None:
        by_function(wrapper, None)
    elif impl.extras.get("finish") is None and (call := start_of(wrapper)) is not None:
        call()


def finish(impl: Implementation, wrapper: Any) -> None:
    """The call after backward, if the wrapper has one."""
    by_function = impl.extras.get("finish")
    if by_function is not None:
        by_function(wrapper, None)
        return
    call = finish_of(wrapper)
    if call is not None:
        call()


def average_gradients(params: Iterable[nn.Parameter]) -> None:
    """What a data-parallel wrapper does before an optimizer of torch's shape steps: the mean over ranks, zeros where a rank has none.

    One exchange says who has a gradient, and one for each dtype carries them all.
    """
    N, _ = world()
    trained = [p for p in params if p.requires_grad]
    if N == 1 or not trained:
        return
    users = all_reduce_sum(torch.tensor([float(p.grad is not None) for p in trained])).tolist()
    due = [p for p, ranks in zip(trained, users, strict=True) if ranks]
    for dtype in dict.fromkeys(p.dtype for p in due):
        same = [p for p in due if p.dtype == dtype]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in same])
        parts = all_reduce_sum(flat).div_(N).split([p.numel() for p in same])
        for p, mean in zip(same, parts, strict=True):
            p.grad = mean.view(p.shape).clone()


def save_state(impl: Implementation, state: dict[str, Any], folder: Path, step: int) -> None:
    """Collect all states on rank 0, and let the implementation write them, as in the lesson."""
    N, rank = world()
    if not theirs(impl, "checkpoint"):
        state = pack(state)
    states: list[Any] | None = [None] * N if rank == 0 else None
    if N == 1:
        states = [copy.deepcopy(state)]
    else:
        dist.gather_object(state, states)
    if rank == 0:
        impl.require("save_sharded")(states, str(folder / "checkpoint"), step)
    barrier()


def load_state(impl: Implementation, folder: Path, world_size: int, rank: int) -> dict[str, Any]:
    state: dict[str, Any] = states_of(impl.require("load_sharded")(str(folder / "checkpoint"), world_size))[rank]
    return state if theirs(impl, "checkpoint") else unpack(state)


def theirs(impl: Implementation, slot: str) -> bool:
    """Is this piece the implementation's own, rather than ours in its company?"""
    return not impl.slots or slot in impl.slots


def states_of(loaded: Any) -> list[Any]:
    """The per-rank states in what `load_sharded` returned: a list, or a pair with the manifest."""
    if isinstance(loaded, tuple):
        parts = [
            part for kind in (list, dict) for part in loaded if isinstance(part, kind)
        ]  # a manifest may be a dict too
        loaded = parts[0] if parts and not all(isinstance(part, dict) for part in loaded) else list(loaded)
    if isinstance(loaded, dict) and all(isinstance(k, int) for k in loaded):
        loaded = [loaded[k] for k in sorted(loaded)]
    if not isinstance(loaded, list):
        raise ValueError(
            f"load_sharded returned {type(loaded).__name__}, but should return a list of states, one a rank"
        )
    return loaded


def _corpus(config: TrainConfig) -> Tensor:
    from minigpt_dist.corpus import make_corpus  # ours, like the pieces below, is nothing that a sandbox holds

    return make_corpus(config.seed, config.total_tokens, config.model.vocab)


def pieces_of(impl: Implementation) -> Pieces:
    """The worker's pieces, each from the implementation; an absent one raises MissingPieceError when it is called.

    The data is the judge's: what an implementation's own corpus gives is judged apart, and a corpus with nothing to learn
    must not decide whether the composition's loss falls.
    """
    if impl.ours:
        from minigpt_dist.worker import OURS

        return OURS
    if "pieces" in impl.extras:
        return impl.extras["pieces"]()  # type: ignore[no-any-return]  # extras are Any
    wrapped = impl.extras[WRAPPED] = Wrapped(impl)
    return Pieces(
        model=lambda sizes: build_model(impl, sizes),
        corpus=_corpus,
        broadcast=wrapped.start,
        optimizer=lambda module, config, N, rank: _with_state(impl, _build_optimizer(impl, module, config, N, rank)),
        save=lambda state, folder, step, config: save_state(impl, state, folder, step),
        load=lambda folder, N, rank: load_state(impl, folder, N, rank),
        forward=wrapped.forward,
        after_backward=wrapped.after_backward,
    )
