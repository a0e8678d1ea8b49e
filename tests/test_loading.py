"""A submission is imported as its author meant it, without what is slow and changes no verdict."""

from __future__ import annotations

from pathlib import Path

import pytest
from own_imports import own_imports  # noqa: F401 - a fixture for all tests here

from minigpt_dist.verify.loading import load_path

COMPILES = """
import torch

@torch.compile
def plain(x):
    return x * 2

@torch.compile(mode="max-autotune", fullgraph=True)
def tuned(x):
    return plain(x) + 1

layer = torch.nn.Linear(2, 2)
layer.compile()
shape = tuned(torch.compile(layer, dynamic=True)(torch.ones(2))).shape
"""


@pytest.mark.parametrize("text, said", [(COMPILES, ["torch.compile"]), ("shape = (2,)", [])])
def test_what_is_compiled_runs_as_it_is_written(text: str, said: list[str], tmp_path: Path) -> None:
    (tmp_path / "given.py").write_text(text)
    module, stood_in = load_path(tmp_path / "given.py")
    assert (tuple(module.shape), stood_in) == ((2,), said)
