"""Correct variants of the start, the data-parallel wrapper, checkpoints and the corpus: other messages, other forms."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minigpt_dist.verify.faults import base
from minigpt_dist.verify.faults.catalogue import Names
from minigpt_dist.verify.faults.variants.registry import variant
from minigpt_dist.verify.faults.wrapper import LessonDDP


@variant
def broadcast_as_one_vector() -> Names:
    """Tensors of one dtype travel as one message."""

    def broadcast_parameters(module: nn.Module, src: int = 0) -> None:
        tensors = [t.detach() for t in [*module.parameters(), *module.buffers()]]
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            alike = [t for t in tensors if t.dtype is dtype]
            flat = torch.cat([t.flatten() for t in alike])
            if dist.is_initialized():
                dist.broadcast(flat, src=src)
            for t, part in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
                t.copy_(part.view(t.shape))

    return {"broadcast_parameters": broadcast_parameters}


@variant
def broadcast_as_objects() -> Names:
    """The state travels as pickled objects."""

    def broadcast_parameters(module: nn.Module, src: int = 0) -> None:
        named = [[t.detach() for t in [*module.parameters(), *module.buffers()]]]
        if dist.is_initialized():
            dist.broadcast_object_list(received := [[t.clone() for t in named[0]]], src=src)
            for mine, theirs in zip(named[0], received[0], strict=True):
                mine.copy_(theirs)

    return {"broadcast_parameters": broadcast_parameters}


@variant
def wrapper_with_one_message() -> Names:
    """A data-parallel wrapper that averages all gradients in one message a dtype."""

    class Wrapper(LessonDDP):
        def sync_grads(self) -> None:
            params = [p for p in self.module.parameters() if p.requires_grad]
            for p in params:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            flat = torch.cat([p.grad.flatten() for p in params if p.grad is not None]) / self.world_size
            if self.world_size > 1:
                dist.all_reduce(flat)
            for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
                p.grad = part.view(p.shape)

    return {"DistributedDataParallel": Wrapper}


@variant
def shards_written_in_parallel() -> Names:
    """A pool of threads writes the shards."""

    def save_sharded(states: list[dict[str, Any]], dest: str, step: int) -> object:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(base.encode, states))
        return base.save_sharded(states, dest, step)

    return {"save_sharded": save_sharded}


@variant
def load_returns_the_manifest_too() -> Names:
    """load_sharded returns (manifest, states)."""

    def load_sharded(src: str, expected_world_size: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        return json.loads((Path(src) / "manifest.json").read_text()), base.load_sharded(src, expected_world_size)

    return {"load_sharded": load_sharded}


@variant
def load_returns_states_by_rank() -> Names:
    """load_sharded returns {rank: state}."""
    return {
        "load_sharded": lambda src, expected_world_size: dict(enumerate(base.load_sharded(src, expected_world_size)))
    }


@variant
def uniform_corpus() -> Names:
    """Uniform random tokens, as in many lessons: nothing to learn, but a function of the seed."""

    def make_corpus(seed: int, total_tokens: int, vocab: int = 64) -> Tensor:
        return torch.randint(0, vocab, (total_tokens,), generator=torch.Generator().manual_seed(seed))

    return {"make_corpus": make_corpus}
