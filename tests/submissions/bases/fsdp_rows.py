"""A right fully sharded wrapper: weights of Linear and Embedding are cut by rows, padded; hooks gather and free them; norms stay whole."""

import torch
import torch.distributed as dist
from torch import nn


class FSDP(nn.Module):
    def __init__(self, module, compute_dtype=None):
        super().__init__()
        self.module, self.compute_dtype = module, compute_dtype
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.start()
        self.rows, self.shards, self.full = {}, {}, {}
        for layer in module.modules():
            if isinstance(layer, (nn.Linear, nn.Embedding)) and layer.weight not in self.rows:
                self.cut(layer.weight)
        for layer in module.modules():
            if isinstance(layer, (nn.Linear, nn.Embedding)):
                layer.register_forward_pre_hook(lambda layer, x: self.gather(layer.weight))
                layer.register_forward_hook(self.after_forward)
        for p in self.rows:
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self.on_grad)

    def start(self):
        for t in [*self.module.parameters(), *self.module.buffers()]:
            dist.broadcast(t.detach(), src=0)

    def cut(self, p):
        self.rows[p] = p.shape[0]
        self.full[p] = torch.empty_like(p.detach())
        self.full[p].untyped_storage().resize_(0)
        p.data = self.part(p.detach())
        self.shards[p] = p.data

    def part(self, whole):
        size = -(-whole.shape[0] // self.world_size)
        padded = whole.new_zeros((size * self.world_size, *whole.shape[1:]))
        padded[: whole.shape[0]] = whole
        return padded[self.rank * size : (self.rank + 1) * size].clone()

    def whole(self, p):
        shard = self.shards[p]
        parts = [torch.empty_like(shard) for _ in range(self.world_size)]
        dist.all_gather(parts, shard)
        return torch.cat(parts)[: self.rows[p]]

    def gather(self, p):
        full = self.full[p]
        if full.untyped_storage().size():
            return
        full.untyped_storage().resize_(full.numel() * full.element_size())
        full.copy_(self.whole(p))
        p.data = full
        if p.grad is not None:
            p.shard_grad, p.grad = p.grad, None

    def free(self, p):
        """Autograd keeps views of the whole weight: their memory is given back, and filled again for backward."""
        p.data = self.shards[p]
        self.full[p].untyped_storage().resize_(0)
        if p.grad is None:
            p.grad = self.saved_grad(p)

    def saved_grad(self, p):
        grad, p.shard_grad = getattr(p, "shard_grad", None), None
        return grad

    def after_forward(self, layer, inputs, output):
        self.free(layer.weight)
        if output.requires_grad:
            output.register_hook(lambda grad: self.gather(layer.weight))

    def on_grad(self, p):
        mean, before = self.reduce(p), self.saved_grad(p)
        p.grad = None
        self.free(p)
        p.grad = mean if before is None else before + mean

    def reduce(self, p):
        grad = p.grad / self.world_size
        dist.all_reduce(grad)
        return self.part(grad)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self):
        for p in self.module.parameters():
            if p in self.rows:
                self.free(p)
            elif p.grad is not None:
                self.average(p)

    def average(self, p):
        dist.all_reduce(p.grad)
        p.grad /= self.world_size

    @torch.no_grad()
    def gather_full_params(self):
        named = self.module.named_parameters()
        return {name: self.whole(p) if p in self.rows else p.detach().clone() for name, p in named}
