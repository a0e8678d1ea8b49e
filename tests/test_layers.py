"""Architecture rules: imports point down only, the loop is small, one file names collectives, one package knows rendezvous."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "minigpt_dist"
LAYERS = {
    0: ("require", "config", "layout", "model", "cut", "parts", "loss", "corpus", "batches", "trace", "launch"),
    1: ("parallel", "checkpoint", "guard", "drift", "overlap", "cadence", "memory", "activations", "planner"),
    2: ("loop",),
    3: ("worker", "runner", "rescue", "recorder"),
    4: ("verify",),
    5: ("grading", "suite", "bench"),
    6: ("cli", "__main__", "pytest_plugin", "pytest_on_request", "pytest_schedule", "__init__"),
}
LAYER_OF = {room: layer for layer, rooms in LAYERS.items() for room in rooms}
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> list[str]:
    """Every module that `path` imports, anywhere in it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


@pytest.mark.parametrize("path", FILES, ids=[str(p.relative_to(PACKAGE)) for p in FILES])
def test_imports_point_down_only(path: Path) -> None:
    rooms = {name.split(".")[1] for name in imports_of(path) if name.startswith("minigpt_dist.")}
    upward = sorted(r for r in rooms if r in LAYER_OF and LAYER_OF[r] > LAYER_OF[room_of(path)])
    assert upward == []


def test_every_room_has_a_layer() -> None:
    assert {room_of(path) for path in FILES} <= set(LAYER_OF)


def test_loop_imports_no_distributed_and_fits_on_a_screen() -> None:
    assert not [
        name for name in imports_of(PACKAGE / "loop.py") if "distributed" in name or name.startswith("minigpt_dist")
    ]
    tree = ast.parse((PACKAGE / "loop.py").read_text(encoding="utf-8"))
    (train,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "train"]
    assert train.end_lineno is not None
    assert train.end_lineno - train.lineno < 45


def test_training_never_imports_the_judge() -> None:
    for room in ("worker.py", "runner.py", "recorder.py", "loop.py", "trace.py", "memory.py"):
        assert not [name for name in imports_of(PACKAGE / room) if "verify" in name]


def test_only_collectives_calls_torch_distributed_among_the_pieces() -> None:
    users = {
        p.name
        for room in ("parallel", "checkpoint")
        for p in (PACKAGE / room).rglob("*.py")
        if "torch.distributed" in imports_of(p)
    }
    # peers.py sends and receives; dcp.py speaks torch.distributed.checkpoint's file format, in one process.
    assert users <= {"collectives.py", "peers.py", "dcp.py"}


def test_only_launch_knows_rendezvous() -> None:
    users = [p.name for p in FILES if "init_process_group(" in p.read_text(encoding="utf-8") and room_of(p) != "launch"]
    assert users == [
        "refactor_driver.py"
    ]  # it runs beside another revision's package, and must not import that one's launch
