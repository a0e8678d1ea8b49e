"""What a submission offers, found on a rank: its pieces, their shape, and work of others among them.

Owns telling borrowed work from one's own. Leaves finding the pieces to `verify/contract.py`, and what follows to `scoring`.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from minigpt_dist.verify.absent_cuda import names_cuda
from minigpt_dist.verify.contract import OURS, SLOTS, resolve
from minigpt_dist.verify.entries import entry_of

# Classes that do a piece's work. What they are built on (torch.optim, nn.Module, torch.distributed itself) is anyone's to use.
FOREIGN = {
    "torch.distributed.optim": "torch's ZeroRedundancyOptimizer",
    "torch.nn.parallel": "torch's DistributedDataParallel",
    "torch.distributed.fsdp": "torch's FSDP",
    "torch.distributed._composable": "torch's composable data parallel",
    "deepspeed": "DeepSpeed",
    OURS: "the reference implementation",
}
MAX_SOURCE = 1 << 22


def inspect_body(spec: str, slots: list[str]) -> dict[str, Any]:
    """On a rank: {shape, slots, names, origins, borrowed, stood_in} of an implementation. Raises what importing it raises."""
    source = _definitions(spec)  # read before anything of the submission runs
    found = resolve(spec, tuple(slots))
    ours = {slot for slot in SLOTS if found.slots and slot not in found.slots}
    pieces = {name: call for name, call in found.names.items() if _slot_of(name) not in ours}
    borrowed = {} if source is None else {name: _borrowed(call, source) for name, call in pieces.items()}
    return {
        "shape": found.shape,
        "slots": sorted({_slot_of(name) for name in pieces}),
        "names": sorted(pieces),
        "origins": {str(k): str(v) for k, v in found.origins.items()},
        "borrowed": {name: what for name, what in borrowed.items() if what},
        "stood_in": [*map(str, found.extras.get("stood_in", ())), *_quiet_parts(spec)],
    }


def _quiet_parts(spec: str) -> list[str]:
    """What of torch is there in name only, and named by the files of the submission that were imported."""
    if torch.cuda.is_available() or not _is_path(spec):
        return []
    folder, places = Path(spec).resolve(), [str(getattr(m, "__file__", "")) for m in list(sys.modules.values())]
    files = [file for place in places if (file := Path(place)).suffix == ".py" and file.is_relative_to(folder)]
    return ["torch.cuda"] if any(names_cuda(file.read_bytes()[:MAX_SOURCE]) for file in files) else []


def _is_path(spec: str) -> bool:
    return spec.endswith(".py") or "/" in spec


def _slot_of(name: str) -> str:
    return next(slot for slot, names in SLOTS.items() if name in names)


def _definitions(spec: str) -> dict[str, set[str]] | None:
    """Of a submission at a path: for each definition of its entry, the foreign works that it uses; None for any other spec.

    The text is only a hint, so what cannot be parsed is left to the import, which says what is wrong.
    """
    if not _is_path(spec):
        return None
    try:
        tree = ast.parse(entry_of(Path(spec)).read_bytes()[:MAX_SOURCE])
    except (ValueError, SyntaxError, RecursionError, MemoryError, OSError):
        return {}
    aliases = _aliases(tree)
    return {
        node.name: {work for part in ast.walk(node) if (work := _work(_dotted(part, aliases)))}
        for node in tree.body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    }


def _aliases(tree: ast.Module) -> dict[str, str]:
    """What each name that an import binds, anywhere in the file, stands for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
        elif isinstance(node, ast.Import):
            found.update({a.asname: a.name for a in node.names if a.asname})
    return found


def _dotted(node: ast.AST, aliases: dict[str, str]) -> str:
    """The full name that a node of a syntax tree stands for; "" for one that is no name."""
    if not isinstance(node, (ast.Name, ast.Attribute)):
        return ""
    first, dot, rest = ast.unparse(node).partition(".")
    return aliases.get(first, first) + dot + rest


def _work(dotted: str) -> str:
    """Whose work a full name is, if it is in the list."""
    return next((what for module, what in FOREIGN.items() if dotted == module or dotted.startswith(module + ".")), "")


def _borrowed(call: Callable[..., Any], source: dict[str, set[str]]) -> str:
    """Whose work a piece is, if not the submission's own: by the modules of its class and bases, and by what its text names."""
    layers = inspect.getmro(call) if inspect.isclass(call) else (call,)
    for layer in layers:
        work = _work(str(getattr(layer, "__module__", "")))
        if work:
            return work
    named = source.get(str(getattr(call, "__name__", "")), set())
    return ", ".join(sorted(named))
