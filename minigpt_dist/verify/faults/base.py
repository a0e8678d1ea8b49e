"""What faults are planted in: a second, correct implementation of the contract, in the plain style of the lesson.

Owns a ZeRO-1 that copies gradients and parameters instead of viewing them, cut into small methods, so that a fault is one of them
written wrong. It shares no code with `parallel/`: the judge must pass it (it is one of the correct variants) as well as ours.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor, nn


class LessonZero:
    """Adam on one slice of a float32 copy of all trainable parameters; step() = reduce, update, gather."""

    def __init__(
        self,
        module: nn.Module,
        world_size: int,
        rank: int,
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self.module, self.world_size, self.rank = module, world_size, rank
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.step_count = 0
        self.total = sum(p.numel() for p in self.params())
        self.chunk = -(-self.total // world_size)
        self.master = self.cut(self.flat_params())
        self.exp_avg = torch.zeros_like(self.master)
        self.exp_avg_sq = torch.zeros_like(self.master)

    def params(self) -> Iterator[nn.Parameter]:
        return (p for p in self.module.parameters() if p.requires_grad)

    def padded(self, parts: list[Tensor]) -> Tensor:
        flat = torch.cat([t.detach().float().flatten() for t in parts]) if parts else torch.zeros(0)
        return torch.cat([flat, torch.zeros(self.chunk * self.world_size - flat.numel())])

    def cut(self, flat: Tensor) -> Tensor:
        return flat[self.rank * self.chunk : (self.rank + 1) * self.chunk].clone()

    def flat_params(self) -> Tensor:
        return self.padded(list(self.params()))

    def flat_grads(self) -> Tensor:
        return self.padded([torch.zeros_like(p) if p.grad is None else p.grad for p in self.params()])

    def reduce(self) -> Tensor:
        """Mean over ranks of this rank's slice of the gradient."""
        flat = self.flat_grads()
        if self.world_size > 1:
            dist.all_reduce(flat)
        return self.cut(flat) / self.world_size

    def update(self, grad: Tensor) -> None:
        beta1, beta2 = self.betas
        self.master.mul_(1 - self.lr * self.weight_decay)
        self.exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
        self.exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        self.apply(self.exp_avg / (1 - beta1**self.step_count), self.exp_avg_sq / (1 - beta2**self.step_count))

    def apply(self, first: Tensor, second: Tensor) -> None:
        self.master.addcdiv_(first, second.sqrt().add_(self.eps), value=-self.lr)

    def gather(self) -> Tensor:
        """All slices of the master copy, in rank order."""
        if self.world_size == 1:
            return self.master
        parts = [torch.empty_like(self.master) for _ in range(self.world_size)]
        dist.all_gather(parts, self.master)
        return torch.cat(parts)

    @torch.no_grad()
    def write_back(self, flat: Tensor) -> None:
        offset = 0
        for p in self.params():
            p.copy_(flat[offset : offset + p.numel()].view(p.shape))
            offset += p.numel()

    def step(self) -> None:
        self.step_count += 1
        self.update(self.reduce())
        self.write_back(self.gather())

    def zero_grad(self) -> None:
        for p in self.module.parameters():
            p.grad = None

    def state_dict(self) -> dict[str, Any]:
        tensors = {name: getattr(self, name).clone() for name in ("master", "exp_avg", "exp_avg_sq")}
        return {**tensors, "step_count": self.step_count, "lr": self.lr}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("master", "exp_avg", "exp_avg_sq"):
            getattr(self, name).copy_(state[name])
        self.step_count, self.lr = state["step_count"], state["lr"]


def broadcast_parameters(module: nn.Module, src: int = 0) -> None:
    """Tensor by tensor, parameters then buffers."""
    if not dist.is_initialized():
        return
    for t in [*module.parameters(), *module.buffers()]:
        whole = t.detach().contiguous()
        dist.broadcast(whole, src=src)
        t.detach().copy_(whole)


def _pack(state: dict[str, Any], path: str = "") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by path, and the rest as JSON."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            tensors[f"{path}{key}"] = value.detach().clone().contiguous()
        elif isinstance(value, dict):
            inner, plain[key] = _pack(value, f"{path}{key}/")
            tensors |= inner
        else:
            plain[key] = value
    return tensors, plain


def _unpack(tensors: dict[str, Tensor], plain: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(plain))
    for path, tensor in tensors.items():
        *parents, name = path.split("/")
        place = state
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = tensor
    return state


def encode(state: dict[str, Any]) -> bytes:
    """One rank's state as bytes, without pickle."""
    tensors, plain = _pack(state)
    return save(tensors, metadata={"plain": json.dumps(plain)})


def decode(raw: bytes) -> dict[str, Any]:
    """The inverse of `encode`."""
    length = int.from_bytes(raw[:8], "little")
    return _unpack(load(raw), json.loads(json.loads(raw[8 : 8 + length])["__metadata__"]["plain"]))


def write(path: Path, raw: bytes) -> None:
    """Write and flush to disk."""
    with path.open("wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def save_sharded(per_rank_state: list[dict[str, Any]], dest_dir: str, step: int) -> dict[str, Any]:
    """Files under temporary names, then renamed, the manifest last."""
    dest = Path(dest_dir)
    dest.mkdir(parents=True, exist_ok=True)
    shards = []
    for rank, state in enumerate(per_rank_state):
        raw = encode(state)
        write(dest / f"rank{rank}.tmp", raw)
        shards.append(
            {"rank": rank, "path": f"rank{rank}.bin", "sha256": hashlib.sha256(raw).hexdigest(), "bytes": len(raw)}
        )
    manifest = {"schema_version": 1, "world_size": len(per_rank_state), "step": step, "shards": shards}
    write(dest / "manifest.tmp", json.dumps(manifest).encode())
    for shard in shards:
        os.replace(dest / f"rank{shard['rank']}.tmp", dest / str(shard["path"]))
    os.replace(dest / "manifest.tmp", dest / "manifest.json")
    return manifest


def load_sharded(src_dir: str, expected_world_size: int) -> list[dict[str, Any]]:
    """Verify, then decode. RuntimeError for anything that is not what the manifest says."""
    src = Path(src_dir)
    manifest = json.loads((src / "manifest.json").read_text())
    if manifest["schema_version"] != 1:
        raise RuntimeError("unknown schema version")
    if manifest["world_size"] != expected_world_size or len(manifest["shards"]) != expected_world_size:
        raise RuntimeError(f"world size {manifest['world_size']}, expected {expected_world_size}")
    states = []
    for shard in manifest["shards"]:
        raw = (src / shard["path"]).read_bytes()
        if len(raw) != shard["bytes"] or hashlib.sha256(raw).hexdigest() != shard["sha256"]:
            raise RuntimeError(f"shard {shard['path']} is damaged")
        states.append(decode(raw))
    return states
