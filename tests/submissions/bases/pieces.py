"""A right submission of the pieces that are asked by name, from collectives made of sends to ZeRO."""

from __future__ import annotations

import copy
import math
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


def swap(outgoing, like, timeout=60.0):
    """Send to the next rank, receive from the one before."""
    N, rank = dist.get_world_size(), dist.get_rank()
    before, inbox, works = (rank - 1) % N, torch.empty_like(like), []
    if outgoing.numel():
        works.append(dist.isend(outgoing.contiguous().view(torch.uint8), (rank + 1) % N))
    if like.numel():
        works.append(dist.irecv(inbox.view(torch.uint8), before))
    for work in works:
        try:
            work.wait(timedelta(seconds=timeout))
        except RuntimeError as error:
            raise TimeoutError(f"rank {before} is silent") from error
    return inbox


def reduced(parts, timeout=60.0):
    """Leave the sum of part `rank` in it."""
    N, rank = dist.get_world_size(), dist.get_rank()
    for k in range(N - 1):
        out, into = (rank - 1 - k) % N, (rank - 2 - k) % N
        parts[into] += swap(parts[out], parts[into], timeout)


def passed_round(parts, timeout=60.0):
    """Fill the other ranks' parts."""
    N, rank = dist.get_world_size(), dist.get_rank()
    for k in range(N - 1):
        out, into = (rank - k) % N, (rank - 1 - k) % N
        parts[into].copy_(swap(parts[out], parts[into], timeout))


def ring_all_reduce(tensor, timeout=60.0):
    parts = list(tensor.view(-1).tensor_split(dist.get_world_size()))
    reduced(parts, timeout)
    passed_round(parts, timeout)


def reduce_scatter(tensor):
    parts = list(tensor.clone().tensor_split(dist.get_world_size()))
    reduced(parts)
    return parts[dist.get_rank()].clone()


def all_gather(tensor):
    lengths = [torch.full((1,), tensor.numel()) for _ in range(dist.get_world_size())]
    passed_round(lengths)
    parts = [tensor.new_empty(int(n)) for n in lengths]
    parts[dist.get_rank()] = tensor.clone()
    passed_round(parts)
    return torch.cat(parts)


def tree_broadcast(tensor, src=0):
    N, rank = dist.get_world_size(), dist.get_rank()
    place, span, raw = (rank - src) % N, 1, tensor.view(-1).view(torch.uint8)
    while span < N and tensor.numel():
        if place < span and place + span < N:
            dist.send(raw, (rank + span) % N)
        elif span <= place < 2 * span:
            dist.recv(raw, (rank - span) % N)
        span *= 2


def pipeline_schedule(kind, ranks, micros):
    if kind not in ("gpipe", "1f1b") or ranks < 1 or micros < 1:
        raise ValueError(f"{kind} of {ranks} ranks and {micros} micro-batches")
    rows = []
    for rank in range(ranks):
        ahead = micros if kind == "gpipe" else min(ranks - rank - 1, micros)
        row = [("F", rank, m) for m in range(ahead)]
        for m in range(micros - ahead):
            row += [("F", rank, m + ahead), ("B", rank, m)]
        rows.append(row + [("B", rank, m) for m in range(micros - ahead, micros)])
    return rows


def should_roll_back(loss, gradients, last):
    bad = not (math.isfinite(loss) and all(bool(torch.isfinite(g).all()) for g in gradients))
    seen = torch.tensor([0.0 if bad else loss, float(bad)], dtype=torch.float64)
    dist.all_reduce(seen)
    return bool(seen[1] > 0 or seen[0] / dist.get_world_size() > 2 * last)


def total(x, group=None):
    x = x.clone().contiguous()
    dist.all_reduce(x, group=group)
    return x


class SumBackward(torch.autograd.Function):
    """Before a product of which each rank has some columns."""

    @staticmethod
    def forward(ctx, x, group=None):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return total(grad, ctx.group), None


class SumForward(torch.autograd.Function):
    """After a product of which each rank has some rows."""

    @staticmethod
    def forward(ctx, x):
        return total(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


def part(whole, rank, world_size, dim=0):
    size = -(-whole.shape[dim] // world_size)
    lo, hi = (min(r * size, whole.shape[dim]) for r in (rank, rank + 1))
    return whole.narrow(dim, lo, hi - lo).clone()


class ColumnParallelLinear(nn.Module):
    def __init__(self, weight, bias, world_size, rank):
        super().__init__()
        self.weight = nn.Parameter(part(weight, rank, world_size))
        self.bias = None if bias is None else nn.Parameter(part(bias, rank, world_size))

    def forward(self, x):
        return F.linear(SumBackward.apply(x), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    def __init__(self, weight, bias, world_size, rank):
        super().__init__()
        self.weight = nn.Parameter(part(weight, rank, world_size, 1))
        self.bias = None if bias is None else nn.Parameter(bias.clone())

    def forward(self, x):
        out = SumForward.apply(F.linear(x, self.weight))
        return out if self.bias is None else out + self.bias


class VocabParallelEmbedding(nn.Module):
    def __init__(self, weight, world_size, rank):
        super().__init__()
        size = -(-len(weight) // world_size)
        self.lo, self.hi = (min(r * size, len(weight)) for r in (rank, rank + 1))
        rows = part(weight, rank, world_size)
        self.weight = nn.Parameter(torch.cat([rows, weight.new_zeros(size - len(rows), weight.shape[1])]))

    def forward(self, ids):
        here = (ids >= self.lo) & (ids < self.hi)
        found = F.embedding(torch.where(here, ids - self.lo, 0), self.weight)
        return SumForward.apply(found * here.unsqueeze(-1))


def vocab_parallel_cross_entropy(logits, targets, vocab, world_size, rank):
    size = -(-vocab // world_size)
    lo = min(rank * size, vocab)
    top = logits.detach().amax(1) if logits.shape[1] else logits.new_full((len(logits),), -math.inf)
    dist.all_reduce(top, op=dist.ReduceOp.MAX)
    shifted = logits - top[:, None]
    ids = torch.arange(lo, lo + logits.shape[1])
    chosen = torch.where(ids == targets[:, None], shifted, 0.0).sum(1)
    return SumForward.apply(shifted.exp().sum(1)).log() - SumForward.apply(chosen)


class ParallelAttention(nn.Module):
    def __init__(self, qkv, proj, num_heads, world_size, rank):
        super().__init__()
        self.heads = num_heads // world_size
        self.qkv = nn.ParameterList(part(block, rank, world_size) for block in qkv.chunk(3))
        self.proj = nn.Parameter(part(proj, rank, world_size, 1))

    def forward(self, x):
        x = SumBackward.apply(x)
        q, k, v = (F.linear(x, w).unflatten(2, (self.heads, -1)).transpose(1, 2) for w in self.qkv)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return SumForward.apply(F.linear(out.transpose(1, 2).flatten(2), self.proj))


class SequenceLayerNorm(nn.Module):
    def __init__(self, weight, bias, world_size, rank, group=None):
        super().__init__()
        self.weight, self.bias, self.group = nn.Parameter(weight.clone()), nn.Parameter(bias.clone()), group

    def forward(self, x):
        weight, bias = (SumBackward.apply(p, self.group) for p in (self.weight, self.bias))
        return F.layer_norm(x, weight.shape, weight, bias)


def mine(x):
    return part(x, dist.get_rank(), dist.get_world_size(), 1)


def everyones(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 1)


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return everyones(x)

    @staticmethod
    def backward(ctx, grad):
        return mine(total(grad))


class ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return mine(total(x))

    @staticmethod
    def backward(ctx, grad):
        return everyones(grad.contiguous())


def gather_sequence(x):
    return GatherSequence.apply(x)


def scatter_sequence(x):
    return ScatterSequence.apply(x)


def clip_sharded_grad_norm(sharded, replicated, max_norm):
    cut, whole = ([p for p in params if p.grad is not None] for params in (sharded, replicated))
    squares = [sum((p.grad.double().pow(2).sum() for p in params), torch.zeros(()).double()) for params in (cut, whole)]
    norm = float((total(squares[0]) + squares[1]).sqrt())
    for p in (*cut, *whole):
        p.grad.mul_(min(1.0, max_norm / (norm + 1e-6)))
    return norm


class Zero2Optimizer:
    def __init__(self, module, world_size, rank, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.N, self.rank, self.module = world_size, rank, module
        sizes = [p.numel() for p in self.params]
        self.starts = {p: sum(sizes[:i]) for i, p in enumerate(self.params)}
        self.chunk = -(-sum(sizes) // world_size)
        flat = torch.cat([p.detach().flatten() for p in self.params])
        flat = torch.cat([flat, flat.new_zeros(self.chunk * world_size - len(flat))])
        self.master = nn.Parameter(flat[rank * self.chunk : (rank + 1) * self.chunk].clone())
        self.sums = torch.zeros_like(self.master)
        self.adam = torch.optim.AdamW([self.master], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        for p in self.params:
            p.register_post_accumulate_grad_hook(self.arrived)

    def overlap(self, p):
        lo, hi = self.rank * self.chunk, (self.rank + 1) * self.chunk
        a = max(self.starts[p], lo)
        b = max(a, min(self.starts[p] + p.numel(), hi))
        return slice(a - self.starts[p], b - self.starts[p]), slice(a - lo, b - lo)

    def arrived(self, p):
        grad, p.grad = total(p.grad.flatten()), None
        here, there = self.overlap(p)
        if here.start < here.stop:
            self.sums[there] += grad[here]

    def whole(self, p):
        value = torch.zeros(p.numel())
        here, there = self.overlap(p)
        if here.start < here.stop:
            value[here] = self.master.detach()[there]
        return total(value).view(p.shape)

    def step(self):
        self.master.grad = self.sums / self.N
        self.adam.step()
        self.zero_grad()
        self.updated()

    def updated(self):
        for p in self.params:
            p.data.copy_(self.whole(p))

    def zero_grad(self):
        self.master.grad = None
        self.sums.zero_()
        for p in self.params:
            p.grad = None


class Zero3Optimizer(Zero2Optimizer):
    def __init__(self, module, *args, **options):
        super().__init__(module, *args, **options)
        for m in module.modules():
            if any(True for _ in m.parameters(recurse=False)):
                m.register_forward_pre_hook(lambda m, _: self.fill(m.parameters(recurse=False)))
                m.register_forward_hook(self.ran)
        self.free(self.params)

    def fill(self, params):
        for p in params:
            if p.requires_grad and p.untyped_storage().nbytes() == 0:
                p.untyped_storage().resize_(4 * p.numel())
                p.data.copy_(self.whole(p))

    def free(self, params):
        for p in params:
            if p.requires_grad:
                p.untyped_storage().resize_(0)

    def ran(self, m, _, out):
        self.free(m.parameters(recurse=False))
        if out.requires_grad:
            out.register_hook(lambda _: self.fill(m.parameters(recurse=False)))

    def arrived(self, p):
        super().arrived(p)
        self.free([p])

    def updated(self):
        pass

    @contextmanager
    def gathered(self):
        self.fill(self.params)
        yield
        self.free(self.params)


class Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, count, *inputs):
        args = inputs[:count]
        ctx.block, ctx.trained = block, inputs[count:]
        ctx.others = [None if isinstance(a, torch.Tensor) else a for a in args]
        ctx.stream, ctx.cast = torch.get_rng_state(), torch.is_autocast_enabled("cpu")
        ctx.buffers = [b.clone() for b in block.buffers()]
        ctx.save_for_backward(*(a for a in args if isinstance(a, torch.Tensor)))
        ctx.places = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
        return block(*args)

    @staticmethod
    def backward(ctx, grad):
        args, now = list(ctx.others), [b.clone() for b in ctx.block.buffers()]
        for i, t in zip(ctx.places, ctx.saved_tensors, strict=True):
            args[i] = t.detach().requires_grad_(ctx.needs_input_grad[2 + i])
        wanted = [a for a in (*args, *ctx.trained) if isinstance(a, torch.Tensor) and a.requires_grad]
        with torch.enable_grad(), torch.random.fork_rng([]), torch.autocast("cpu", torch.bfloat16, enabled=ctx.cast):
            torch.set_rng_state(ctx.stream)
            restore(ctx.block, ctx.buffers)
            out = ctx.block(*args)
        restore(ctx.block, now)
        found = iter(torch.autograd.grad(out, wanted, grad, allow_unused=True))
        mine = [next(found) if isinstance(a, torch.Tensor) and a.requires_grad else None for a in args]
        return None, None, *mine, *found


@torch.no_grad()
def restore(block, values):
    for buffer, value in zip(block.buffers(), values, strict=True):
        buffer.copy_(value)


def recompute(block, *args):
    if not torch.is_grad_enabled():
        return block(*args)
    return Recomputed.apply(block, len(args), *args, *(p for p in block.parameters() if p.requires_grad))


class MixedPrecisionOptimizer:
    def __init__(
        self,
        module,
        world_size,
        rank,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        max_norm=None,
        init_scale=2.0**16,
        growth_interval=2000,
    ):
        self.params, self.N = list(module.parameters()), world_size
        self.masters = [nn.Parameter(p.detach().float()) for p in self.params]
        self.adam = torch.optim.AdamW(self.masters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        self.max_norm, self.scale, self.interval, self.clean = max_norm, init_scale, growth_interval, 0

    def backward(self, loss):
        (self.scale * loss).backward()

    def step(self):
        for p, master in zip(self.params, self.masters, strict=True):
            master.grad = total(p.grad.float()) / self.N / self.scale
        if not all(bool(m.grad.isfinite().all()) for m in self.masters):
            self.scale, self.clean = self.scale / 2, 0
            return False
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.masters, self.max_norm)
        self.adam.step()
        for p, master in zip(self.params, self.masters, strict=True):
            p.data.copy_(master.data)
        self.clean += 1
        if self.clean == self.interval:
            self.scale, self.clean = self.scale * 2, 0
        return True

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    def state_dict(self):
        masters = [m.detach().clone() for m in self.masters]
        return {
            "masters": masters,
            "adam": copy.deepcopy(self.adam.state_dict()),
            "scale": self.scale,
            "clean": self.clean,
        }

    def load_state_dict(self, state):
        for master, saved in zip(self.masters, state["masters"], strict=True):
            master.data.copy_(saved)
        self.adam.load_state_dict(copy.deepcopy(state["adam"]))
        self.scale, self.clean = state["scale"], state["clean"]
