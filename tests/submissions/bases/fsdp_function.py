"""A right fully sharded wrapper: each layer's forward is an autograd function that gathers the weight it needs, then and in backward.

The layers are known by the classes of the course's own package, which is not here.
"""

import torch
import torch.distributed as dist
from torch import nn


def gathered(shard, shape):
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, shard.detach().contiguous())
    return torch.cat(parts)[: shape.numel()].view(shape)


def scattered(whole):
    size = -(-whole.numel() // dist.get_world_size())
    padded = whole.new_zeros(size * dist.get_world_size())
    padded[: whole.numel()] = whole.reshape(-1)
    return padded[dist.get_rank() * size :][:size].clone()


def mean_part(grad):
    grad = grad.contiguous()
    dist.all_reduce(grad)
    return scattered(grad / dist.get_world_size())


class LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, shape):
        ctx.save_for_backward(x, shard)
        ctx.shape = shape
        return x @ gathered(shard, shape).T

    @staticmethod
    def backward(ctx, grad):
        x, shard = ctx.saved_tensors
        weight_grad = grad.flatten(0, -2).T @ x.flatten(0, -2)
        part = mean_part(weight_grad) if ctx.needs_input_grad[1] else None
        return grad @ gathered(shard, ctx.shape), part, None


class EmbeddingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, shard, shape):
        ctx.save_for_backward(ids)
        ctx.shape = shape
        return gathered(shard, shape)[ids]

    @staticmethod
    def backward(ctx, grad):
        (ids,) = ctx.saved_tensors
        whole = grad.new_zeros(ctx.shape)
        whole.index_add_(0, ids.flatten(), grad.flatten(0, -2))
        return None, mean_part(whole), None


class FullyShardedWrapper(nn.Module):
    def __init__(self, module, compute_dtype=None):
        from course_basics.model import Embedding, Linear

        super().__init__()
        self.module, self.shapes = module, {}
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, src=0)
        for layer in module.modules():
            if isinstance(layer, (Linear, Embedding)):
                self.shard(layer, LinearFunction if isinstance(layer, Linear) else EmbeddingFunction)

    def shard(self, layer, function):
        p = layer.weight
        if p not in self.shapes:
            self.shapes[p] = p.shape
            p.data = scattered(p.data)
        layer.forward = lambda x: function.apply(x, p, self.shapes[p])

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def get_fsdp(module, compute_dtype=None):
    return FullyShardedWrapper(module, compute_dtype)


def fsdp_on_after_backward(fsdp_model, optimizer):
    for p in fsdp_model.parameters():
        if p not in fsdp_model.shapes and p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def fsdp_gather_full_params(fsdp_model):
    shapes = fsdp_model.shapes
    return {
        name: gathered(p, shapes[p]) if p in shapes else p.detach().clone()
        for name, p in fsdp_model.module.named_parameters()
    }
