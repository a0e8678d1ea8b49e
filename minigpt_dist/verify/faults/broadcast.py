"""Faults of the start: what does not reach every rank."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from minigpt_dist.verify.faults.catalogue import Names, fault


@fault(source="pytorch/pytorch#111138", needs="a buffer filled differently by each rank", check="broadcast.first", stage="broadcast", step=0, rank=1,
       tensor="running", green=("param_norms",))
def broadcast_skips_buffers() -> Names:
    """Only parameters are copied at construction; registered buffers start different on each rank."""

    def broadcast_parameters(module: nn.Module, src: int = 0) -> None:
        for p in module.parameters():
            whole = p.detach().contiguous()
            dist.broadcast(whole, src=src)
            p.detach().copy_(whole)

    return {"broadcast_parameters": broadcast_parameters}


@fault(source="allenai/OLMo-core#319", needs="ranks seeded differently", check="broadcast.first", stage="broadcast", step=0, rank=1, tensor="weight")
def replicas_start_different() -> Names:
    """No broadcast: every rank keeps the weights of its own seed."""
    return {"broadcast_parameters": lambda module, src=0: None}
