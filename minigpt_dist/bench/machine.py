"""On what something was measured."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """Plain data: cores this process may use, load (the last minute's mean, if known), versions, system."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return {
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{sys.platform} {platform.machine()}",
    }
