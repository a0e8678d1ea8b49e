"""Collectives made of point-to-point sends: the textbook algorithms, a file each, over one way to send and receive.

`Peers` sends, receives, counts bytes and ends every wait in time; `ring`, `tree` and `direct` are algorithms over it;
`all_reduce` chooses between ring and tree.
"""

from minigpt_dist.parallel.p2p.choice import CROSSOVER_BYTES, all_reduce
from minigpt_dist.parallel.p2p.peers import Handle, Peers, SilentPeerError

__all__ = ["CROSSOVER_BYTES", "Handle", "Peers", "SilentPeerError", "all_reduce"]
