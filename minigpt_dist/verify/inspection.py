"""What a submission offers, found on a rank: its pieces, their shape, and work of others among them.

Owns telling borrowed work from one's own. Leaves finding the pieces to `verify/contract.py`, and what follows to `scoring`.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minigpt_dist.verify.absent_cuda import names_cuda
from minigpt_dist.verify.contract import OURS, SLOTS, resolve

# Classes that do a piece's work. What they are built on (torch.optim, nn.Module, torch.distributed itself) is anyone's to use.
FOREIGN = {
    "torch.distributed.optim": "torch's ZeroRedundancyOptimizer",
    "torch.nn.parallel": "torch's DistributedDataParallel",
    "torch.distributed.fsdp": "torch's FSDP",
    "torch.distributed._composable": "torch's composable data parallel",
    "deepspeed": "DeepSpeed",
    OURS: "the reference implementation",
}
MAX_SOURCE, MAX_FILES = 1 << 22, 400


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


@dataclass(frozen=True)
class _Definition:
    """A class or function of a file: whose foreign works its text names, and the full names of everything that it names."""

    module: str  # dotted, from the submission's folder
    works: frozenset[str]
    names: frozenset[str]


Definitions = dict[str, list[_Definition]]


def _definitions(spec: str) -> Definitions | None:
    """Of a submission at a path: the definitions of its files by name; None for any other spec.

    The text is only a hint, so what cannot be parsed is left to the import, which says what is wrong.
    """
    if not _is_path(spec):
        return None
    path, found = Path(spec), defaultdict[str, list[_Definition]](list)
    for file in [f for f in sorted(path.rglob("*.py"))[:MAX_FILES] if f.is_file()] if path.is_dir() else [path]:
        module = ".".join(file.relative_to(path).with_suffix("").parts) if path.is_dir() else file.stem
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError, OSError):
            tree = ast.parse(file.read_bytes()[:MAX_SOURCE])
            aliases = _aliases(tree)
            for node in tree.body:
                if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                    names = frozenset(name for part in ast.walk(node) if (name := _dotted(part, aliases)))
                    works = frozenset(work for name in names if (work := _work(name)))
                    found[node.name].append(_Definition(module.removesuffix(".__init__"), works, names))
    return found


def _named_works(source: Definitions, module: str, name: str, depth: int = 2) -> set[str]:
    """Whose works a definition names, itself or by way of others of the submission that it names."""
    found: set[str] = set()
    for definition in source.get(name, ()):
        place = definition.module
        if f".{module}".endswith(f".{place}") or f".{place}".endswith(f".{module}"):
            found |= definition.works
            for other in definition.names if depth else ():
                owner, _, last = other.rpartition(".")
                if last in source and last != name:
                    found |= _named_works(source, owner.lstrip(".") or place, last, depth - 1)
    return found


def _aliases(tree: ast.Module) -> dict[str, str]:
    """What each name that an import binds, anywhere in the file, stands for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            owner = "." * bool(node.level) + node.module
            found.update({a.asname or a.name: f"{owner}.{a.name}" for a in node.names})
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


def _borrowed(call: Callable[..., Any], source: Definitions) -> str:
    """Whose work a piece is, if not the submission's own: by the modules of its class and bases, and by what its text names."""
    layers = inspect.getmro(call) if inspect.isclass(call) else (call,)
    for layer in layers:
        work = _work(str(getattr(layer, "__module__", "")))
        if work:
            return work
    module = str(getattr(call, "__module__", "")).removeprefix("submission.")
    return ", ".join(sorted(_named_works(source, module, str(getattr(call, "__name__", "")))))
