"""No attack: every rank keeps the whole state, and shows a slice of it. The attacks on memory hide the rest, each elsewhere."""

import torch
import torch.distributed as dist
from wrong import *  # noqa: F403


class Hiding:
    """Keeps tensors by name."""

    def __init__(self):
        self.kept = {}

    def put(self, name, tensor):
        self.kept[name] = tensor.clone()

    def get(self, name):
        return self.kept[name]


class ZeroOptimizer:
    hiding = Hiding

    def __init__(self, module, world_size, rank, lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8):
        self.module, self.world_size, self.lr, self.betas, self.eps = module, world_size, lr, (beta1, beta2), eps
        whole = torch.cat([p.detach().flatten() for p in module.parameters()])
        self.hidden, self.steps = self.hiding(), 0
        for name, value in (("w", whole), ("m", torch.zeros_like(whole)), ("v", torch.zeros_like(whole))):
            self.hidden.put(name, value)
        self.shown = [torch.zeros(-(-whole.numel() // world_size)) for _ in "wmv"]

    def step(self):
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.module.parameters()]
        g = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(g)
        g /= self.world_size
        self.steps += 1
        b1, b2 = self.betas
        m = self.hidden.get("m").mul_(b1).add_(g, alpha=1 - b1)
        v = self.hidden.get("v").mul_(b2).addcmul_(g, g, value=1 - b2)
        root = (v / (1 - b2**self.steps)).sqrt().add_(self.eps)
        w = self.hidden.get("w").addcdiv_(m / (1 - b1**self.steps), root, value=-self.lr)
        for name, value in (("w", w), ("m", m), ("v", v)):
            self.hidden.put(name, value)
        at = 0
        with torch.no_grad():
            for p in self.module.parameters():
                p.copy_(w[at : at + p.numel()].view_as(p))
                at += p.numel()

    def zero_grad(self):
        for p in self.module.parameters():
            p.grad = None
