"""An implementation's save_sharded and load_sharded as the judge calls them, and folders put back as they were.

Saves happen in forked children, so that what is loaded can only come from the disk, and a crash is seen, not suffered.

Owns the calling of the two functions. Leaves what is asked of them to the files of probes beside it.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from minigpt_dist.verify.checkpoint_child import Ended, Tell, run_forked, said, skip_fsync
from minigpt_dist.verify.checkpoint_states import State, censuses
from minigpt_dist.verify.contract import resolve
from minigpt_dist.verify.plug import states_of

Rows = list[dict[str, Any]]


class BrokenSave(Exception):  # noqa: N818 - what happened reads better than what it is
    """A save that nothing disturbed failed, so that there is nothing to ask about."""


class Store:
    """One implementation's two functions."""

    def __init__(self, spec: str, slots: list[str]) -> None:
        found = resolve(spec, tuple(slots))
        self._save, self.load_here = found.require("save_sharded"), found.require("load_sharded")

    def save_here(self, states: list[State], dest: Path | str, step: int) -> Any:
        """Save in this process; what save_sharded returned."""
        return self._save(states, str(dest), step)

    def must_save(self, *plan: tuple[list[State], Path | str, int], wait_for_disk: bool = False) -> None:
        """Save each (states, dest, step) of `plan`, in one child; BrokenSave if that fails."""

        def action(tell: Tell) -> None:
            if not wait_for_disk:
                skip_fsync()
            for states, dest, step in plan:
                self.save_here(states, dest, step)

        returned(run_forked(action))

    def save(self, states: list[State], dest: Path | str, step: int) -> str:
        """Save in a child, undisturbed; "" or how that failed."""
        try:
            self.must_save((states, dest, step))
        except BrokenSave as broken:
            return str(broken)
        return ""

    def load(self, source: Path | str, world_size: int) -> dict[str, Any]:
        """Load in this process. {"states": censuses} or {"refused": why} or {"wrong": what else happened}."""
        try:
            loaded = self.load_here(str(source), world_size)
        except Exception as error:
            return {"refused": said(error)}
        except BaseException as error:
            return {"wrong": said(error)}
        try:
            return {"states": censuses(states_in(loaded))}
        except ValueError:
            return {"wrong": f"a {type(loaded).__name__} in place of a list of states"}


def states_in(loaded: Any) -> list[Any]:
    """The list of states in what load_sharded returned; of a pair it is the list, whatever the manifest is."""
    return states_of(loaded)


def returned(ended: Ended) -> Any:
    """What an undisturbed child returned; BrokenSave if it did not."""
    if ended.end != "returned":
        raise BrokenSave(ended.words())
    return ended.value


def paths_below(folder: Path) -> frozenset[str]:
    """The folder itself and all in it, absolute; none if it is not there."""
    return frozenset(os.path.abspath(p) for p in [folder, *folder.rglob("*")]) if folder.exists() else frozenset()


def put_back(area: Path, backup: Path) -> None:
    """Give `area` exactly the content of `backup`, at the same path: a manifest may hold absolute ones."""
    shutil.rmtree(area, ignore_errors=True)
    shutil.copytree(backup, area, symlinks=True)


def json_files(folder: Path) -> list[tuple[Path, Any]]:
    """Files below `folder` that hold a JSON object, and it."""
    found = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.stat().st_size < 1 << 20):
        try:
            document = json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            continue
        if isinstance(document, dict):
            found.append((path, document))
    return found
