"""Saves that end suddenly, or meet a full disk, at each point in turn, and what can be loaded afterwards.

What a killed process leaves is what the folder held at that moment: so one save, the folder copied before each of its
file operations, shows every way of being killed between two. Only an end in the middle of a write needs a process each.

Owns choosing the points and trying them. Leaves the instruments to `checkpoint_child.py`.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minigpt_dist.verify.checkpoint_child import (
    FileWatch,
    Tell,
    file_size_limit,
    keeps_old,
    run_forked,
    said,
    skip_fsync,
)
from minigpt_dist.verify.checkpoint_states import lesson_states
from minigpt_dist.verify.checkpoint_store import Rows, Store, paths_below, put_back, returned

PREVIOUS, OLD, NEW, NEXT = 1, 2, 3, 4  # versions: in another folder; in the same; the save that is hit; the one after
MOST_OPS = 40  # more than any save of this few files needs


@dataclass
class Scene:
    """A root with the previous checkpoint and the folder to save into, and a copy of it to start from again."""

    store: Store
    area: Path
    world_size: int

    def __post_init__(self) -> None:
        self.root, self.backup, self.snapshots = (self.area / name for name in ("root", "backup", "snapshots"))
        self.dest, self.previous = self.root / "checkpoint", self.root / "previous"

    def prepare(self, over_old: bool) -> None:
        self.root.mkdir()
        plan = [(lesson_states(self.world_size, PREVIOUS), self.previous, 10)]
        if over_old:
            plan.append((lesson_states(self.world_size, OLD), self.dest, 20))
        self.store.must_save(*plan)
        shutil.copytree(self.root, self.backup, symlinks=True)

    def save(self, version: int = NEW, step: int = 30) -> None:
        self.store.save_here(lesson_states(self.world_size, version), self.dest, step)

    def found(self) -> dict[str, Any]:
        """What the two folders load as."""
        return {name: self.store.load(getattr(self, name), self.world_size) for name in ("dest", "previous")}

    def saved_next(self) -> dict[str, Any]:
        """What loads after one more save, which nothing disturbs."""
        failure = self.store.save(lesson_states(self.world_size, NEXT), self.dest, 40)
        return {"wrong": failure} if failure else self.store.load(self.dest, self.world_size)

    def limits(self) -> list[int]:
        """Sizes at which files of the checkpoint are cut: early in each, and at the last byte of the largest."""
        files = [p for p in self.dest.rglob("*") if p.is_file() and not p.is_symlink()]
        sizes = sorted({p.stat().st_size for p in files} - {0})
        return sorted({sizes[0] // 2, sizes[-1] - 1}) if sizes else []


def killed(store: Store, area: Path, world_size: int, over_old: bool) -> Rows:
    """Kill a save before each file operation, and in the middle of writes; over an old checkpoint or into a new folder.

    First row: a save that nothing befell. "keep": must the old checkpoint in the same folder still load?
    """
    scene = Scene(store, area, world_size)
    scene.prepare(over_old)
    existing = paths_below(scene.dest)

    def watched(tell: Tell) -> None:
        def snapshot(i: int, operation: str) -> None:
            tell(operation)
            if i < MOST_OPS:
                shutil.copytree(scene.root, scene.snapshots / str(i), symlinks=True)

        skip_fsync()
        watch = FileWatch(existing)
        watch.before = snapshot
        with watch:
            scene.save()

    whole = run_forked(watched)
    if whole.end != "returned" and not over_old:
        returned(whole)
    rows: Rows = [{"case": "that nothing befell", "keep": False, "end": whole.end, "said": whole.said} | scene.found()]
    if whole.end != "returned":
        return rows
    limits = scene.limits()
    for i, operation in enumerate(whole.told[:MOST_OPS]):
        put_back(scene.root, scene.snapshots / str(i))
        row = {"case": f"killed before '{operation}', its file operation {i}"} | scene.found()
        row["keep"] = over_old and keeps_old(whole.told[:i], whole.told)
        if i == len(whole.told) // 2:
            row["again"] = scene.saved_next()
        rows.append(row)
    return rows + [_killed_at(scene, limit, existing, over_old, whole.told) for limit in limits]


def _killed_at(
    scene: Scene, at_byte: int, existing: frozenset[str], over_old: bool, whole: list[str]
) -> dict[str, Any]:
    """Kill a save, in a process of its own, as soon as a file grows beyond `at_byte`."""

    def action(tell: Tell) -> None:
        skip_fsync()
        watch = FileWatch(existing)
        watch.before = lambda i, operation: tell(operation)
        with file_size_limit(at_byte, fatal=True), watch:
            scene.save()

    put_back(scene.root, scene.backup)
    ended = run_forked(action)
    row = {"case": f"killed at byte {at_byte} of a file"} | scene.found()
    row["keep"] = over_old and ended.end == "killed" and keeps_old(ended.told, whole)
    return row


def disk_errors(store: Store, area: Path, world_size: int) -> Rows:
    """Give a save over an old checkpoint an error at each file operation and at some bytes, all in one process."""
    scene = Scene(store, area, world_size)
    scene.prepare(over_old=True)

    def attempts(tell: Tell) -> Rows:
        skip_fsync()
        watch = FileWatch()
        rows = [{"case": "that nothing befell"} | _attempt(scene, watch, None, None)]
        limits = scene.limits()
        for op in range(MOST_OPS if rows[0]["end"] == "returned" else 0):
            row = _attempt(scene, watch, op, None)
            if not row["hit"]:
                break
            rows.append({"case": f"given 'no space left' at '{row['hit']}', its file operation {op}"} | row)
        rows += [{"case": f"given an error at byte {n} of a file"} | _attempt(scene, watch, None, n) for n in limits]
        scene.save(NEXT, 40)
        rows[-1]["again"] = store.load(scene.dest, world_size)
        return rows

    ended = run_forked(attempts)
    if ended.end == "returned":
        rows: Rows = ended.value
        return rows
    put_back(scene.root, scene.backup)
    return [{"case": "given disk errors", "end": ended.end, "said": ended.said} | scene.found()]


def _attempt(scene: Scene, watch: FileWatch, op: int | None, at_byte: int | None) -> dict[str, Any]:
    """One save with an error at file operation `op`, or at byte `at_byte` of any file, and what loads then."""
    hit: list[str] = []

    def strike(i: int, operation: str) -> None:
        if i == op:
            hit.append(operation)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    put_back(scene.root, scene.backup)
    watch.before = strike
    row: dict[str, Any] = {"end": "returned", "said": ""}
    try:
        with nullcontext() if at_byte is None else file_size_limit(at_byte, fatal=False), watch:
            scene.save()
    except Exception as error:
        row = {"end": "raised", "said": said(error)}
    return row | {"hit": hit[0] if hit else ""} | scene.found()


PROBES: dict[str, Callable[..., Rows]] = {"killed": killed, "disk_errors": disk_errors}
