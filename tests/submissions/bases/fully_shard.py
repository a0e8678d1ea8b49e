"""Right: `fully_shard(module)` in place, a unit at a time, uneven rows; no way to read whole parameters but in a forward pass."""

import torch
import torch.distributed as dist


class Rows:
    """One parameter, of which a rank has the rows from `first` on, as many as there are."""

    def __init__(self, p):
        self.p, self.rows = p, p.shape[0]
        dist.broadcast(p.data, src=0)
        self.block = -(-self.rows // dist.get_world_size())
        self.shard, self.grad = self.cut(p.data), None
        self.full = torch.empty_like(p.data)
        self.free()
        p.sharded_rows = self
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda p: self.reduce())

    def cut(self, whole):
        return whole[dist.get_rank() * self.block :][: self.block].clone()

    def free(self):
        self.p.data = self.shard
        self.full.untyped_storage().resize_(0)
        if self.grad is not None:
            self.p.grad, self.grad = self.grad, None

    def gather(self):
        if self.full.untyped_storage().size():
            return
        self.full.untyped_storage().resize_(self.full.numel() * 4)
        self.grad, self.p.grad = self.p.grad, None
        for rank, block in enumerate(self.full.data.split(self.block)):
            if rank == dist.get_rank():
                block.copy_(self.shard)
            dist.broadcast(block, src=rank)
        self.p.data = self.full

    def reduce(self):
        whole = self.p.grad.contiguous()
        dist.all_reduce(whole)
        self.p.grad = None
        mine = self.cut(whole) / dist.get_world_size()
        before, self.grad = self.grad, None
        self.free()
        self.p.grad = mine if before is None else before + mine


def fully_shard(module):
    """Cut what no call on a part of `module` has cut yet; it is gathered around the module's forward, and for its backward."""
    unit = [Rows(p) for p in module.parameters() if not hasattr(p, "sharded_rows")]

    def gather(*_):
        for rows in unit:
            rows.gather()

    def after(_, __, out):
        for rows in unit:
            rows.free()
        if out.requires_grad:
            out.register_hook(gather)

    module.register_forward_pre_hook(gather)
    module.register_forward_hook(after)
    return module


def fsdp_on_after_backward(module, optimizer):
    for p in module.parameters():
        p.sharded_rows.free()
