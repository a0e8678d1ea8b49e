"""No attack: the work done plainly. It must pass what the attacks fail, or a broken sandbox would look like a strong one."""

import torch
import torch.distributed as dist
from wrong import *  # noqa: F403


class ZeroOptimizer:
    def __init__(self, module, world_size, rank, lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8):
        self.module, self.world_size, self.lr, self.betas, self.eps = module, world_size, lr, (beta1, beta2), eps
        self.total = sum(p.numel() for p in module.parameters())
        self.width = -(-self.total // world_size)
        start = rank * self.width
        self.master = self.flat(p.detach() for p in module.parameters())[start : start + self.width].clone()
        self.mean, self.square, self.steps = torch.zeros(self.width), torch.zeros(self.width), 0
        self.start = start

    def flat(self, tensors):
        out = torch.zeros(self.width * self.world_size)
        out[: self.total] = torch.cat([t.flatten().float() for t in tensors])
        return out

    def step(self):
        grads = self.flat(p.grad if p.grad is not None else torch.zeros_like(p) for p in self.module.parameters())
        dist.all_reduce(grads)
        g = grads[self.start : self.start + self.width] / self.world_size
        self.steps += 1
        b1, b2 = self.betas
        self.mean.mul_(b1).add_(g, alpha=1 - b1)
        self.square.mul_(b2).addcmul_(g, g, value=1 - b2)
        root = (self.square / (1 - b2**self.steps)).sqrt().add_(self.eps)
        self.master.addcdiv_(self.mean / (1 - b1**self.steps), root, value=-self.lr)
        parts = [torch.empty(self.width) for _ in range(self.world_size)]
        dist.all_gather(parts, self.master)
        whole, at = torch.cat(parts), 0
        with torch.no_grad():
            for p in self.module.parameters():
                p.copy_(whole[at : at + p.numel()].view_as(p))
                at += p.numel()

    def zero_grad(self):
        for p in self.module.parameters():
            p.grad = None
