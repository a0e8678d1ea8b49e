"""For tests that import submissions in pytest's own process: what that leaves behind goes away after each."""

from __future__ import annotations

import gc
import sys

import pytest
import torch


@pytest.fixture(autouse=True)
def own_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """sys.path, which later ranks would inherit, the table of modules, and what a loader replaces, as they were."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(torch, "compile", torch.compile)
    monkeypatch.setattr(gc, "freeze", gc.freeze)
    for name in ("submission", *(n for n in sys.modules if n.startswith("submission."))):
        monkeypatch.delitem(sys.modules, name, raising=False)
