"""Correct peers: well-known packages under the same judge, so that what fails them is a false alarm of ours.

Owns the list (`catalogue.py`), what each is by design (`traits.py`), and one file a package. A peer runs inside ranks only.
"""

from minigpt_dist.verify.peers.catalogue import LAYERS, PEERS, Peer, build, traits_of, unavailable
from minigpt_dist.verify.peers.traits import Traits

__all__ = ["LAYERS", "PEERS", "Peer", "Traits", "build", "traits_of", "unavailable"]
