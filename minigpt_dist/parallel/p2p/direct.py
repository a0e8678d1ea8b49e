"""Direct exchange: every rank sends to every other what is meant for it, in N-1 rounds of pairs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from minigpt_dist.parallel.p2p.peers import Peers
from minigpt_dist.parallel.p2p.ring import flat


def all_to_all(outputs: Sequence[Tensor], inputs: Sequence[Tensor], peers: Peers) -> None:
    """Send `inputs[r]` to rank r and receive `outputs[r]` from it; both contiguous, each as large as its partner's. T(N-1)/N bytes."""
    N, rank = peers.size, peers.rank
    for name, tensors in (("outputs", outputs), ("inputs", inputs)):
        if len(tensors) != N:
            raise ValueError(f"{name} are {len(tensors)} tensors, but should be {N}, one a rank")
    if outputs[rank].shape != inputs[rank].shape:
        raise ValueError(
            f"outputs[{rank}] has shape {tuple(outputs[rank].shape)}, but should have {tuple(inputs[rank].shape)}, as inputs[{rank}]"
        )
    for k in range(1, N):
        to, source = (rank + k) % N, (rank - k) % N
        peers.exchange([(to, flat(inputs[to]))], [(source, flat(outputs[source]))])
    outputs[rank].copy_(inputs[rank])
