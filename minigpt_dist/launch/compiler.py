"""Importing this makes torch import its compiler: 600 modules and seconds, which `torch.compile` over a function costs each process once.

For servers that fork ranks whose code does that. Nothing is compiled.
"""

from __future__ import annotations

import torch

torch.compile(torch.nn.Identity())
