"""The environment variables that a rank is given.

Owns what is pinned for every rank, and what must not reach it from the parent.  Leaves setting them to `rank`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

__all__ = ["PINNED_THREADS", "rank_environment"]

# Bits depend on the number of threads, so a rank has one.
PINNED_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
_OF_A_LAUNCHER = frozenset(
    ["MASTER_ADDR", "MASTER_PORT", "ROLE_NAME"]
    + [f"{scope}{name}" for scope in ("", "LOCAL_", "GROUP_", "ROLE_") for name in ("RANK", "WORLD_SIZE")]
)


def rank_environment(
    rank: int, world_size: int, extra: Mapping[str, str], given: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The parent's environment as it is now, or what is `given`, less what a launcher said of the parent's own rank, then `extra`."""
    environment = {
        name: value
        for name, value in given.items()
        if name not in _OF_A_LAUNCHER and not name.startswith("TORCHELASTIC_")
    }
    loopback = "lo0" if sys.platform == "darwin" else "lo"  # the host's own name need not resolve
    environment.setdefault("GLOO_SOCKET_IFNAME", loopback)
    place = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size)}
    return {**environment, **PINNED_THREADS, **place, **extra}
