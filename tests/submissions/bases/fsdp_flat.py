"""A right fully sharded wrapper: a flat vector a layer, cut in equal parts; layers see views of the whole, whose memory is freed."""

import torch
import torch.distributed as dist
from torch import nn


class Unit:
    """Parameters that are gathered together, each with the places (module, name) that have it.

    Autograd's graph keeps views of `full`: between uses their memory is given back.
    """

    def __init__(self, params, places):
        self.places, self.world_size, self.rank = places, dist.get_world_size(), dist.get_rank()
        numel = sum(p.numel() for p in params)
        self.size = -(-numel // self.world_size)
        self.shard = nn.Parameter(self.cut(torch.cat([p.detach().reshape(-1) for p in params])))
        self.full = torch.empty(self.size * self.world_size)
        self.views = [part.view(p.shape) for part, p in zip(self.parts(params), params, strict=True)]
        self.leaves = []
        self.forget()

    def parts(self, params):
        return self.full[: sum(p.numel() for p in params)].split([p.numel() for p in params])

    def cut(self, flat):
        padded = torch.zeros(self.size * self.world_size)
        padded[: flat.numel()] = flat
        return padded[self.rank * self.size : (self.rank + 1) * self.size].clone()

    def free(self):
        self.full.untyped_storage().resize_(0)

    def gather(self):
        if not self.full.untyped_storage().size():
            self.full.untyped_storage().resize_(self.full.numel() * 4)
            dist.all_gather_into_tensor(self.full.data, self.shard.detach())

    def show(self):
        """Gather, and put the views where the modules look for their parameters."""
        self.gather()
        if not self.leaves:
            self.leaves = [v.data.requires_grad_(torch.is_grad_enabled()) for v in self.views]
            for leaf in self.leaves:
                if leaf.requires_grad:
                    leaf.register_post_accumulate_grad_hook(self.on_grad)
        self.put(self.leaves)

    def put(self, values):
        for value, places in zip(values, self.places, strict=True):
            for owner, name in places:
                owner._parameters.pop(name, None)
                owner.__dict__[name] = value

    def on_grad(self, leaf):
        if all(v.grad is not None for v in self.leaves):
            self.reduce()

    def reduce(self):
        grads = [torch.zeros_like(v) if v.grad is None else v.grad for v in self.leaves]
        flat = torch.cat([g.reshape(-1) for g in grads])
        self.forget()
        mean = self.mean(flat)
        self.shard.grad = mean if self.shard.grad is None else self.shard.grad + mean

    def mean(self, flat):
        dist.all_reduce(flat)
        return self.cut(flat) / self.world_size

    def forget(self):
        self.leaves = []
        self.free()
        self.put([None] * len(self.views))

    def finish(self):
        if any(v.grad is not None for v in self.leaves):
            self.reduce()
        self.forget()


class FullyShardedDataParallel(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        self.start()
        self.units, self.names = [], {}
        for layer in module.modules():
            self.add_unit(layer)
        for layer in module.modules():
            layer.register_forward_pre_hook(lambda layer, x: self.before(layer))
            layer.register_forward_hook(lambda layer, x, out: self.after(layer, out))
        self.shards = nn.ParameterList(unit.shard for unit in self.units)

    def start(self):
        for p in self.module.parameters():
            dist.broadcast(p.data, src=0)

    def add_unit(self, layer):
        """Its own parameters, if it has any that no unit has yet. A tied one is shown in all its places."""
        params = [p for p in layer._parameters.values() if p is not None and p.requires_grad]
        if not params:
            return
        named = list(self.module.named_modules())
        every = [
            [(m, f"{path}.{n}", n) for path, m in named for n, q in m._parameters.items() if q is p] for p in params
        ]
        unit = Unit(params, [[(m, n) for m, _, n in places] for places in every])
        self.names.update({name.lstrip("."): (unit, i) for i, places in enumerate(every) for _, name, _ in places})
        self.units.append(unit)

    def units_of(self, layer):
        return [u for u in self.units if any(m is layer for places in u.places for m, _ in places)]

    def before(self, layer):
        for unit in self.units_of(layer):
            unit.show()

    def after(self, layer, out):
        units = self.units_of(layer)
        for unit in units:
            unit.free()
        if units and out.requires_grad:
            out.register_hook(lambda grad: [unit.gather() for unit in units] and None)

    def forward(self, *args, **kwargs):
        out = self.module(*args, **kwargs)
        if not torch.is_grad_enabled():
            self.finish_gradient_synchronization()
        return out

    def finish_gradient_synchronization(self):
        for unit in self.units:
            unit.finish()

    @torch.no_grad()
    def full_parameters(self):
        found = {}
        for name, (unit, i) in self.names.items():
            unit.gather()
            found[name] = unit.views[i].clone()
            unit.free()
        return found
