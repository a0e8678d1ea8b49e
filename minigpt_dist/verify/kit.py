"""The kit: the modules of this package that a sandbox holds, so that ranks can run the judge's bodies there.

Owns the list: what the bodies import, and nothing else. Not in a sandbox are, by that, the reference pieces, the oracles, the checks,
the faults, the suite. Of the reference, a sandbox holds what stands beside the pieces under judgement, and never those.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection

from minigpt_dist.launch.sandbox.contents import LAUNCH, PACKAGE

BODIES = (
    "verify.contract",
    "verify.model_probe",
    "verify.corpus_probe",
    "verify.broadcast_probe",
    "verify.ddp_probe",
    "verify.linear_probe",
    "verify.checkpoint_probe",
    "verify.collectives_probe",
    "verify.schedule_probe",
    "verify.guard_probe",
    "verify.composed_probe",
    "verify.inspection",
)
PRELOAD = tuple(f"minigpt_dist.{name}" for name in BODIES)


def _imported(name: str) -> set[str]:
    """The modules of this package that a module imports as it is loaded; what its functions import later is no part of a kit."""
    file = PACKAGE.joinpath(*name.split(".")[1:])
    tree = ast.parse((file / "__init__.py" if file.is_dir() else file.with_suffix(".py")).read_bytes())
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            found.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {name for name in found if name.startswith(f"{PACKAGE.name}.") and _is_file(name)}


def _is_file(name: str) -> bool:
    return PACKAGE.joinpath(*name.split(".")[1:]).with_suffix(".py").is_file()


@functools.cache
def kit() -> tuple[str, ...]:
    """The bodies' modules, all that these import, and the server's: dotted names."""
    found: set[str] = set()
    waiting = {*PRELOAD, *LAUNCH}
    while waiting:
        found.add(name := waiting.pop())
        waiting |= _imported(name) - found
    return tuple(sorted(found))


_REFERENCE = {
    "model": ("model",),
    "corpus": ("corpus",),
    "broadcast": ("parallel.ddp",),
    "optimizer": tuple(f"parallel.{name}" for name in ("adam", "clipping", "ddp", "exact", "flat", "stages", "zero")),
    "checkpoint": ("checkpoint", "cut", "parts"),
}


def beside(slots: Collection[str]) -> tuple[str, ...]:
    """The reference pieces that stand beside an implementation's own, which fill `slots`; none where it fills all by itself."""
    others = [names for slot, names in _REFERENCE.items() if slots and slot not in slots]
    return tuple(sorted({f"minigpt_dist.{name}" for names in others for name in names}))
