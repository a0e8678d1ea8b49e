"""A fully sharded wrapper of DTensors: gathers are redistributions, their derivatives scatter; what is gathered lives until backward."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor


class FSDP(nn.Module):
    def __init__(self, module, compute_dtype=None):
        super().__init__()
        self.module, self.world_size = module, dist.get_world_size()
        mesh = init_device_mesh("cpu", (self.world_size,))
        cut = {}
        for p in module.parameters():
            dist.broadcast(p.detach(), src=0)
        for layer in module.modules():
            if isinstance(layer, (nn.Linear, nn.Embedding)):
                self.replace(layer, mesh, cut)

    def replace(self, layer, mesh, cut):
        whole = layer.weight
        if whole not in cut:
            spread = distribute_tensor(whole.detach().clone(), mesh, [Shard(0)])
            cut[whole] = nn.Parameter(spread, requires_grad=whole.requires_grad)
        del layer.weight
        layer.register_parameter("shard", cut[whole])
        layer.register_forward_pre_hook(self.gather)
        layer.register_forward_hook(lambda layer, inputs, output: delattr(layer, "weight"))

    def gather(self, layer, inputs):
        everywhere = layer.shard.redistribute(placements=[Replicate()])
        layer.weight = everywhere.to_local(grad_placements=[Partial()])

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self):
        for p in self.module.parameters():
            if p.grad is not None:
                if not isinstance(p, DTensor):
                    dist.all_reduce(p.grad)
                p.grad /= self.world_size

    @torch.no_grad()
    def gather_full_params(self):
        named = self.module.named_parameters()
        whole = {n: p.full_tensor() if isinstance(p, DTensor) else p.clone() for n, p in named}
        return {name.replace("shard", "weight"): t for name, t in whole.items()}
