"""What a rank does with an implementation's save_sharded and load_sharded to show how they behave; plain data comes back.

Saves happen in forked children, so that what is loaded can only come from the disk, and a crash is seen and not suffered.

Owns the bodies of the round trips, and `Store`, which the other bodies use. Leaves damage to `checkpoint_damage.py`, crashes to
`checkpoint_crash.py`, and what all of it means to `checks/`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from minigpt_dist.verify.checkpoint_child import WATCHED, Ended, Hit, run_forked, said
from minigpt_dist.verify.checkpoint_states import (
    State,
    census,
    censuses,
    change_in_place,
    lesson_states,
    tensor_kinds,
    value_kinds,
)
from minigpt_dist.verify.contract import resolve
from minigpt_dist.verify.plug import states_of

Rows = list[dict[str, Any]]
STEP = 4211  # of checkpoints whose step is looked for: no size, rank or count is the same number


class BrokenSave(Exception):  # noqa: N818 - what happened reads better than what it is
    """A save that nothing disturbed failed, so that there is nothing to ask about."""


class Store:
    """One implementation's two functions."""

    def __init__(self, spec: str, slots: list[str]) -> None:
        found = resolve(spec, tuple(slots))
        self._save, self._load = found.require("save_sharded"), found.require("load_sharded")

    def save_here(self, states: list[State], dest: Path | str, step: int) -> Any:
        """Save in this process."""
        return self._save(states, str(dest), step)

    def save(self, states: list[State], dest: Path | str, step: int, hit: Hit | None = None) -> Ended:
        """Save in a child, which may fail."""

        def action() -> None:
            self.save_here(states, dest, step)

        return run_forked(action, hit, paths_below(Path(dest)) if hit else frozenset())

    def must_save(self, states: list[State], dest: Path | str, step: int) -> None:
        """Save in a child; BrokenSave if that fails."""
        _returned(self.save(states, dest, step, WATCHED))

    def load(self, source: Path | str, world_size: int) -> dict[str, Any]:
        """Load in this process. {"states": censuses} or {"refused": why} or {"wrong": what else happened}."""
        try:
            loaded = self._load(str(source), world_size)
        except Exception as error:
            return {"refused": said(error)}
        except BaseException as error:
            return {"wrong": said(error)}
        try:
            return {"states": censuses(states_of(loaded))}
        except ValueError:
            return {"wrong": f"a {type(loaded).__name__} in place of a list of states"}

    def raw(self, source: Path | str, world_size: int) -> Any:
        """What load_sharded returns, as it is."""
        return self._load(str(source), world_size)


def paths_below(folder: Path) -> frozenset[str]:
    """The folder itself and all in it, absolute."""
    return frozenset(os.path.abspath(p) for p in [folder, *folder.rglob("*")])


def put_back(area: Path, backup: Path) -> None:
    """Give `area` exactly the content of `backup`, at the same path: a manifest may hold absolute ones."""
    shutil.rmtree(area, ignore_errors=True)
    shutil.copytree(backup, area, symlinks=True)


def round_trip(store: Store, area: Path, world_size: int) -> Rows:
    """Save in one process, load in another."""
    _returned(store.save(lesson_states(world_size, 1), area / "step-10", 10))
    return [{"case": "saved and loaded", "loaded": store.load(area / "step-10", world_size)}]


def kinds(store: Store, area: Path, world_size: int, which: str) -> Rows:
    """Save all kinds at once; if that is refused, one by one, to tell which kind it is."""
    make: Callable[[int], State] = tensor_kinds if which == "tensors" else value_kinds
    every = [make(rank) for rank in range(world_size)]
    if store.save(as_states(every), area / "all", 10).end == "returned":
        return [{"kinds": list(every[0]), "save": "", "loaded": store.load(area / "all", world_size)}]

    def one_by_one() -> dict[str, str]:
        refusals = {}
        for kind in every[0]:
            try:
                store.save_here(as_states([{kind: state[kind]} for state in every]), area / kind, 10)
                refusals[kind] = ""
            except Exception as error:
                refusals[kind] = said(error)
        return refusals

    refusals = _returned(run_forked(one_by_one, WATCHED))
    return [{"kinds": [kind], "save": why, "loaded": {} if why else store.load(area / kind, world_size)} for kind, why in refusals.items()]


def as_states(optim_states: list[State]) -> list[State]:
    """Whole states around some for the optimizer."""
    return [{"model_state": {"weight": torch.ones(2)}, "optim_state": state} for state in optim_states]


def _returned(ended: Ended) -> Any:
    """What an undisturbed child returned; BrokenSave if it did not."""
    if ended.end != "returned":
        raise BrokenSave(f"{ended.end} {ended.said}".strip())
    return ended.value


def untouched(store: Store, area: Path, world_size: int) -> Rows:
    """The states given to a save, looked at after it."""

    def action() -> Any:
        states = lesson_states(world_size, 1)
        store.save_here(states, area / "step-10", 10)
        return censuses(states)

    return [{"case": "the states given to save_sharded, after it", "loaded": {"states": _returned(run_forked(action))}}]


def independent(store: Store, area: Path, world_size: int) -> Rows:
    """Saved tensors change after the save, loaded ones after a load: the checkpoint must not."""
    dest = area / "step-10"

    def save_and_train_on() -> Any:
        states = lesson_states(world_size, 1)
        store.save_here(states, dest, 10)
        change_in_place(states)
        return store.load(dest, world_size)

    def load_and_train_on() -> Any:
        first = states_of(store.raw(dest, world_size))
        before = censuses(first)
        change_in_place(first)
        return before, store.load(dest, world_size)

    saved = _returned(run_forked(save_and_train_on))
    elsewhere = store.load(dest, world_size)
    ended = run_forked(load_and_train_on)
    first, second = ended.value if ended.end == "returned" else (None, {"wrong": f"{ended.end} {ended.said}"})
    rows = [
        {"case": "loaded in the process that saved, after it changed its tensors in place", "loaded": saved},
        {"case": "loaded in another process, after the saved tensors were changed in place", "loaded": elsewhere},
        {"case": "loaded again, after the tensors loaded first were changed in place", "loaded": second},
    ]
    return rows if first is None else [*rows, {"case": "loaded by a fresh process", "loaded": {"states": first}}]


def overwrite(store: Store, area: Path, world_size: int) -> Rows:
    """A later step, the same step, and fewer ranks, each saved over what is there."""
    dest, rows = area / "again", list[dict[str, Any]]()
    plan = (("a later step saved over an earlier", 1, 10), ("a later step saved over an earlier", 2, 20), ("the same step saved again", 3, 20))
    for case, version, step in plan:
        ended = store.save(lesson_states(world_size, version), dest, step, WATCHED)
        if version == 1:
            _returned(ended)
        rows.append({"case": case, "version": version, "save": "" if ended.end == "returned" else f"{ended.end} {ended.said}",
                     "loaded": store.load(dest, world_size)})
        if ended.end != "returned":
            return rows
    fewer = area / "fewer"
    store.must_save(lesson_states(world_size + 1, 4), fewer, 10)
    store.must_save(lesson_states(world_size, 5), fewer, 20)
    case = f"{world_size} ranks saved over {world_size + 1}"
    rows.append({"case": case, "version": 5, "save": "", "loaded": store.load(fewer, world_size)})
    rows.append({"case": f"{case}, then loaded for {world_size + 1}", "version": 4, "more": True, "save": "",
                 "loaded": store.load(fewer, world_size + 1)})
    return rows


def side_by_side(store: Store, area: Path, world_size: int) -> Rows:
    """Checkpoints in several folders; one is moved, and another takes its place."""
    plan = {"step-10": (1, 10), "step-20": (2, 20), "step-5": (3, 5)}
    for name, (version, step) in plan.items():
        store.must_save(lesson_states(world_size, version), area / name, step)
    rows = [{"case": f"{name} of three folders side by side", "version": version, "loaded": store.load(area / name, world_size)}
            for name, (version, _) in plan.items()]
    (area / "step-10").rename(area / "moved")
    moved = {"case": "a folder that was moved", "version": 1, "or_refused": True, "loaded": store.load(area / "moved", world_size)}
    store.must_save(lesson_states(world_size, 4), area / "step-10", 10)
    taken = {"case": "a folder that was moved, another now in its place", "version": 1, "or_refused": True}
    return [*rows, moved, taken | {"loaded": store.load(area / "moved", world_size)}]


def paths(store: Store, area: Path, world_size: int) -> Rows:
    """A save to a relative folder, loaded by its absolute path from another working directory, and what it left elsewhere."""
    home = area / "home"
    home.mkdir()

    def action() -> None:
        os.chdir(home)
        store.save_here(lesson_states(world_size, 1), "here", 10)

    _returned(run_forked(action))
    # A sibling named after the folder (a versioned or temporary one) is a known way to be atomic.
    strays = sorted(p.name for p in [*home.iterdir(), *area.iterdir()] if p != home and "here" not in p.name)
    return [{"case": "saved to a relative folder, loaded from elsewhere", "loaded": store.load(home / "here", world_size), "strays": strays}]


def layout(store: Store, area: Path, world_size: int) -> Rows:
    """Which file holds which ranks' bytes, told by each rank's random stream."""
    states = lesson_states(world_size, 1)
    store.must_save(states, area / "step", 10)
    marks = [state["rng"].numpy().tobytes() for state in states]
    files = sorted(p for p in (area / "step").rglob("*") if p.is_file())
    return [{"file": str(p.relative_to(area / "step")), "ranks": [r for r, mark in enumerate(marks) if mark in p.read_bytes()]} for p in files]


def recorded_step(store: Store, area: Path, world_size: int) -> Rows:
    """Every place that tells the checkpoint's step."""
    told: dict[str, Any] = {}

    def action() -> Any:
        return _step_in(store.save_here(lesson_states(world_size, 1), area / "step", STEP))

    told["what save_sharded returned"] = _returned(run_forked(action))
    try:
        loaded = store.raw(area / "step", world_size)
        told["what load_sharded returned"] = next((s for s in map(_step_in, loaded if isinstance(loaded, tuple) else ()) if s is not None), None)
    except Exception as error:
        return [{"place": "load_sharded", "step": None, "error": said(error)}]
    for file, document in json_files(area / "step"):
        told[str(file.relative_to(area / "step"))] = _step_in(document)
    return [{"place": place, "step": step, "error": ""} for place, step in told.items()]


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


def _step_in(manifest: Any) -> int | None:
    """The step that a manifest, as an object or a mapping, tells."""
    if isinstance(manifest, (list, str)) or manifest is None:
        return None
    for name in ("step", "global_step", "iteration"):
        value = manifest.get(name) if isinstance(manifest, dict) else getattr(manifest, name, None)
        if isinstance(value, int):
            return value
    return None


PROBES: dict[str, Callable[..., Rows]] = {
    f.__name__: f for f in (round_trip, kinds, untouched, independent, overwrite, side_by_side, paths, layout, recorded_step)
}


def probe_body(spec: str, slots: list[str], probe: str, area: str, *args: Any) -> dict[str, Any]:
    """One probe in the empty folder `area`: {"rows": ...} or {"broken": why even the plain save failed}."""
    from minigpt_dist.verify import checkpoint_crash, checkpoint_damage  # they build on `Store`

    every = {**PROBES, **checkpoint_damage.PROBES, **checkpoint_crash.PROBES}
    try:
        return {"rows": every[probe](Store(spec, slots), Path(area).resolve(), *args)}
    except BrokenSave as broken:
        return {"broken": str(broken)}


__all__ = ["BrokenSave", "Rows", "Store", "census", "json_files", "paths_below", "probe_body", "put_back"]
