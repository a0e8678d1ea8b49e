"""What a rank does with save_sharded and load_sharded to show how they behave; plain data comes back.

Owns the bodies of the round trips, and the door to all probes. Leaves damage to `checkpoint_damage.py`, planted pickles
to `checkpoint_payload.py`, crashes to `checkpoint_crash.py`, and what all of it means to `checks/`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from minigpt_dist.verify import checkpoint_crash, checkpoint_damage, checkpoint_large, checkpoint_payload
from minigpt_dist.verify.checkpoint_child import Tell, run_forked, said
from minigpt_dist.verify.checkpoint_files import Files, files_below, put_files
from minigpt_dist.verify.checkpoint_states import (
    State,
    censuses,
    change_in_place,
    lesson_states,
    mark,
    tensor_kinds,
    value_kinds,
)
from minigpt_dist.verify.checkpoint_store import BrokenSave, Rows, Store, json_files, returned, states_in

STEP = 4211  # of checkpoints whose step is looked for: no size, rank or count is the same number


def round_trip(store: Store, area: Path, world_size: int) -> Rows:
    """Save in one process, load in another."""
    store.must_save((lesson_states(world_size, 1), area / "step-10", 10), wait_for_disk=True)
    return [{"case": "saved and loaded", "loaded": store.load(area / "step-10", world_size)}]


def kinds(store: Store, area: Path, world_size: int, which: str) -> Rows:
    """Save all kinds at once; if that is refused, one by one, to tell which kind it is."""
    make: Callable[[int], State] = tensor_kinds if which == "tensors" else value_kinds
    every = [make(rank) for rank in range(world_size)]
    if not store.save(as_states(every), area / "all", 10):
        return [{"kinds": list(every[0]), "save": "", "loaded": store.load(area / "all", world_size)}]

    def one_by_one(tell: Tell) -> dict[str, str]:
        refusals = {}
        for kind in every[0]:
            try:
                store.save_here(as_states([{kind: state[kind]} for state in every]), area / kind, 10)
                refusals[kind] = ""
            except Exception as error:
                refusals[kind] = said(error)
        return refusals

    refusals = returned(run_forked(one_by_one))
    return [
        {"kinds": [kind], "save": why, "loaded": {} if why else store.load(area / kind, world_size)}
        for kind, why in refusals.items()
    ]


def as_states(optim_states: list[State]) -> list[State]:
    """Whole states around some for the optimizer."""
    return [{"model_state": {"weight": torch.ones(2)}, "optim_state": state} for state in optim_states]


def untouched(store: Store, area: Path, world_size: int) -> Rows:
    """The states given to a save, looked at after it."""

    def action(tell: Tell) -> Any:
        states = lesson_states(world_size, 1)
        store.save_here(states, area / "step-10", 10)
        return censuses(states)

    return [{"case": "the states given to save_sharded, after it", "loaded": {"states": returned(run_forked(action))}}]


def independent(store: Store, area: Path, world_size: int) -> Rows:
    """Saved tensors change after the save, loaded ones after a load: the checkpoint must not."""
    dest = area / "step-10"

    def save_and_train_on(tell: Tell) -> Any:
        states = lesson_states(world_size, 1)
        store.save_here(states, dest, 10)
        change_in_place(states)
        return store.load(dest, world_size)

    def load_and_train_on(tell: Tell) -> Any:
        first = states_in(store.load_here(str(dest), world_size))
        before = censuses(first)
        change_in_place(first)
        return before, store.load(dest, world_size)

    saved = returned(run_forked(save_and_train_on))
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
    dest, fewer = area / "again", area / "fewer"
    first, more = (lesson_states(world_size, 1), dest, 10), (lesson_states(world_size + 1, 2), fewer, 10)
    store.must_save(first, more)
    plan = (
        ("a later step saved over an earlier", dest, 3, 20),
        ("the same step saved again", dest, 4, 20),
        (f"{world_size} ranks saved over {world_size + 1}", fewer, 5, 20),
    )
    rows: Rows = []
    for case, folder, version, step in plan:
        failure = store.save(lesson_states(world_size, version), folder, step)
        rows.append({"case": case, "version": version, "save": failure, "loaded": store.load(folder, world_size)})
    case = f"{plan[-1][0]}, then loaded for {world_size + 1}"
    return [*rows, {"case": case, "version": 2, "more": True, "save": "", "loaded": store.load(fewer, world_size + 1)}]


def side_by_side(store: Store, area: Path, world_size: int) -> Rows:
    """Checkpoints in several folders; one is moved, and another takes its place."""
    places = {"step-10": (1, 10), "step-20": (2, 20), "step-5": (3, 5)}
    plan = [(lesson_states(world_size, version), area / name, step) for name, (version, step) in places.items()]
    store.must_save(*plan)
    rows: Rows = []
    for name, (version, _) in places.items():
        loaded = store.load(area / name, world_size)
        rows.append({"case": f"{name} of three folders side by side", "version": version, "loaded": loaded})
    if not (area / "step-10").is_dir():
        return rows
    moved, row = area / "moved", {"case": "a folder that was moved", "version": 1, "or_refused": True}
    (area / "step-10").rename(moved)
    rows.append(row | {"loaded": store.load(moved, world_size)})
    store.must_save((lesson_states(world_size, 4), area / "step-10", 10))
    return [*rows, row | {"case": f"{row['case']}, another now in its place", "loaded": store.load(moved, world_size)}]


def paths(store: Store, area: Path, world_size: int) -> Rows:
    """A save to a relative folder, loaded by its absolute path from elsewhere, and what it left beside the folder."""
    home = area / "home"
    home.mkdir()

    def action(tell: Tell) -> None:
        os.chdir(home)
        store.save_here(lesson_states(world_size, 1), "here", 10)

    returned(run_forked(action))
    # A sibling named after the folder (a versioned or temporary one) is a known way to be atomic.
    strays = sorted(p.name for p in [*home.iterdir(), *area.iterdir()] if p != home and "here" not in p.name)
    return [
        {
            "case": "saved to a relative folder, loaded from elsewhere",
            "loaded": store.load(home / "here", world_size),
            "strays": strays,
        }
    ]


def layout(store: Store, area: Path, world_size: int) -> Rows:
    """Which file holds which ranks' bytes, told by each rank's random stream."""
    states = lesson_states(world_size, 1)
    store.must_save((states, area / "step", 10))
    marks = [mark(state) for state in states]
    files = sorted(p for p in (area / "step").rglob("*") if p.is_file())
    return [
        {
            "file": str(p.relative_to(area / "step")),
            "ranks": [r for r, mark in enumerate(marks) if mark in p.read_bytes()],
        }
        for p in files
    ]


def recorded_step(store: Store, area: Path, world_size: int) -> Rows:
    """Every place that tells the checkpoint's step."""
    told: dict[str, Any] = {}

    def action(tell: Tell) -> Any:
        return _step_in(store.save_here(lesson_states(world_size, 1), area / "step", STEP))

    told["what save_sharded returned"] = returned(run_forked(action))
    try:
        loaded = store.load_here(str(area / "step"), world_size)
        told["what load_sharded returned"] = next(
            (s for s in map(_step_in, loaded if isinstance(loaded, tuple) else ()) if s is not None), None
        )
    except Exception as error:
        return [{"place": "load_sharded", "step": None, "error": said(error)}]
    for file, document in json_files(area / "step"):
        told[str(file.relative_to(area / "step"))] = _step_in(document)
    return [{"place": place, "step": step, "error": ""} for place, step in told.items()]


def _step_in(manifest: Any) -> int | None:
    """The step that a manifest, as an object or a mapping, tells."""
    if isinstance(manifest, (list, str)) or manifest is None:
        return None
    for name in ("step", "global_step", "iteration"):
        value = manifest.get(name) if isinstance(manifest, dict) else getattr(manifest, name, None)
        if isinstance(value, int):
            return value
    return None


OWN = (round_trip, kinds, untouched, independent, overwrite, side_by_side, paths, layout, recorded_step)
PROBES: dict[str, Callable[..., Rows]] = {
    **{probe.__name__: probe for probe in OWN},
    **checkpoint_damage.PROBES,
    **checkpoint_payload.PROBES,
    **checkpoint_crash.PROBES,
    **checkpoint_large.PROBES,
}


def across_body(
    spec: str, slots: list[str], area: str, world_size: int, files: Files | None
) -> tuple[Files, dict[str, Any]]:
    """Save, and what was written; or, of these files, what is loaded: in a folder of its own, at the same place both times."""
    folder = Path(area)
    folder.mkdir(parents=True)
    try:
        store = Store(spec, slots)
        if files is None:
            failure = store.save(lesson_states(world_size, 1), folder / "step-10", 10)
            return files_below(folder), {"wrong": failure} if failure else {}
        put_files(files, folder)
        return [], store.load(folder / "step-10", world_size)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def probe_body(spec: str, slots: list[str], probe: str, area: str, *args: Any) -> dict[str, Any]:
    """One probe in the folder `area`, made for it: {"rows": ...} or {"broken": why even the plain save failed}."""
    Path(area).mkdir(parents=True)
    folder = Path(area).resolve()
    try:
        answer: dict[str, Any] = {"rows": PROBES[probe](Store(spec, slots), folder, *args)}
    except BrokenSave as broken:
        answer = {"broken": str(broken)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    # Foreign errors name files by paths that are others in each run; a verdict says the same thing every time.
    steady: dict[str, Any] = json.loads(json.dumps(answer).replace(f"{folder}/", ""))
    return steady
