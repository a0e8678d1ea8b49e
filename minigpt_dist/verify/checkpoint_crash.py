"""Saves that are killed, or meet a full disk, at each point in turn, and what can be loaded afterwards.

Owns choosing the points and trying them. Leaves the faulty child to `checkpoint_child.py`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minigpt_dist.verify.checkpoint_child import Ended, Hit, keeps_old
from minigpt_dist.verify.checkpoint_probe import BrokenSave, Rows, Store, put_back
from minigpt_dist.verify.checkpoint_states import lesson_states

PREVIOUS, OLD, NEW, NEXT = 1, 2, 3, 4  # versions: in another folder, in the same folder, the one that is hit, the one after
MOST_OPS, MOST_BYTES = 12, 4


def crash(store: Store, area: Path, world_size: int, fatal: bool, over_old: bool) -> Rows:
    """Hit a save at each point. fatal: kill it; else give it an error. over_old: into a folder that holds a checkpoint already.

    First row: a save that nothing hits. "keep": must the old checkpoint in the same folder still load?
    """
    root, backup = area / "root", area / "backup"
    dest, previous = root / "checkpoint", root / "previous"
    root.mkdir()
    store.must_save(lesson_states(world_size, PREVIOUS), previous, 10)
    if over_old:
        store.must_save(lesson_states(world_size, OLD), dest, 20)
    shutil.copytree(root, backup, symlinks=True)
    new = lesson_states(world_size, NEW)

    def attempt(hit: Hit) -> tuple[Ended, dict[str, Any]]:
        ended = store.save(new, dest, 30, hit)
        return ended, {"end": ended.end, "said": ended.said, "dest": store.load(dest, world_size), "previous": store.load(previous, world_size)}

    whole, row = attempt(Hit(fatal=False))
    rows: Rows = [row | {"case": "not hit", "keep": False}]
    if whole.end != "returned":
        if over_old:
            return rows
        raise BrokenSave(f"{whole.end} {whole.said}")
    hits = _points(whole.ops, _sizes(dest), fatal)
    for i, hit in enumerate(hits):
        put_back(root, backup)
        ended, row = attempt(hit)
        done = ended.ops if hit.op is None else ended.ops[:-1]
        row |= {"case": _words(hit, ended), "keep": over_old and keeps_old(done, whole.ops)}
        if i in (0, len(hits) // 2, len(hits) - 1):
            again = store.save(lesson_states(world_size, NEXT), dest, 40)
            row["again"] = store.load(dest, world_size) if again.end == "returned" else {"wrong": f"{again.end} {again.said}"}
        rows.append(row)
    return rows


def _sizes(folder: Path) -> list[int]:
    return sorted({p.stat().st_size for p in folder.rglob("*") if p.is_file() and not p.is_symlink()} - {0})


def _points(ops: list[str], sizes: list[int], fatal: bool) -> list[Hit]:
    """Operations, all or evenly sampled, the first rename among them; and bytes: early in every file, and the last of the largest ones."""
    chosen = set(range(len(ops)))
    if len(ops) > MOST_OPS:
        first = next((i for i, op in enumerate(ops) if op.startswith("rename")), 0)
        chosen = {i * (len(ops) - 1) // (MOST_OPS - 2) for i in range(MOST_OPS - 1)} | {first, min(first + 1, len(ops) - 1)}
    limits = sorted({sizes[0] // 2, *(size - 1 for size in sizes[-MOST_BYTES + 1 :])}) if sizes else []
    return [*(Hit(fatal, op=k) for k in sorted(chosen)), *(Hit(fatal, at_byte=limit) for limit in limits)]


def _words(hit: Hit, ended: Ended) -> str:
    what = "killed" if hit.fatal else "given a disk error"
    if hit.op is None:
        return f"{what} at byte {hit.at_byte} of a file"
    return f"{what} at operation {hit.op} ({ended.ops[-1] if ended.ops else 'not reached'})"


PROBES: dict[str, Callable[..., Rows]] = {"crash": crash}
