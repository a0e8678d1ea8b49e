"""A disk that fails, or a process that dies, at its k-th call: for every k, what is left to load?

Run as a script it plays all scenarios in forked children and prints what came of each as JSON; the tests judge that.
A script, because forking is only safe from a process without threads, and a test runner has some.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from failing_disk import Dead, Disk
from forked_ranks import Link, two_ranks

from minigpt_dist.checkpoint import CheckpointError, load_sharded, save_shard, save_sharded

OLD, NEW, NEXT = 1.0, 2.0, 3.0
KILLED = 86


def states(value: float, world_size: int = 2) -> list[dict[str, Any]]:
    return [{"model": {"w": torch.full((3,), value)}, "rng": rank} for rank in range(world_size)]


def prepare(scenario: str, root: Path) -> int:
    """Makes the folder that a scenario starts from, and returns the step that will be saved in it."""
    if scenario != "first":
        with Disk():
            save_sharded(states(OLD), root, 1)
    if scenario == "with leftovers":
        (root / ".tmp-0000").mkdir()
        (root / ".tmp-0000" / "half").write_text("half")
        shutil.copytree(next(root.glob("step-*")), root / "step-00000002")
    return 1 if scenario == "again" else 2


def found(root: Path) -> str:
    """Which checkpoint loads from `root`."""
    try:
        values = {float(state["model"]["w"][0]) for state in load_sharded(root, 2)}
    except CheckpointError as error:
        return "none" if not (root / "latest").exists() else f"damaged: {error}"
    names = {OLD: "old", NEW: "new", NEXT: "next"}
    return names[values.pop()] if len(values) == 1 else f"mixed: {values}"


def leftovers(root: Path) -> list[str]:
    return sorted(p.name for p in root.glob("*") if p.name != "latest" and not p.name.startswith("step-"))


def in_child(body: Callable[[], object]) -> int:
    """Runs `body` in a forked child; its exit status."""
    child = os.fork()
    if child == 0:
        try:
            body()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(root: Path, step: int, k: int) -> None:
    """A child saves and is killed at its k-th call."""

    def body() -> None:
        with Disk(k, lambda name: os._exit(KILLED)):
            save_sharded(states(NEW), root, step)

    assert in_child(body) == KILLED


def power_lost_at(root: Path, step: int, k: int, lose_names: bool) -> None:
    """No call from the k-th on has any effect, as if killed, but faster; what was not fsynced is lost."""

    def die(name: str) -> None:
        disk.dead = True
        raise Dead

    disk = Disk(k, die)
    with suppress(Dead), disk:
        save_sharded(states(NEW), root, step)
    assert disk.dead
    disk.lose_power(lose_names)
    disk.close()


def fail_with(code: int) -> Callable[[str], None]:
    def fail(name: str) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def failed_at(root: Path, step: int, k: int, code: int) -> str:
    """The save meets `code` at its k-th call and must live with it; what it raised."""
    try:
        with Disk(k, fail_with(code)):
            save_sharded(states(NEW), root, step)
    except CheckpointError as error:
        return f"CheckpointError: {error}"
    return "nothing"


def every_call(scenario: str, mode: str, scratch: Path) -> list[dict[str, Any]]:
    """One scenario, hit in one way, at each of its calls in turn."""
    template = scratch / "template"
    step = prepare(scenario, template)
    with Disk() as counting:
        trial = copy_of(template, scratch / "trial")
        before = len(counting.calls)
        save_sharded(states(NEW), trial, step)
    rows = []
    for k, call in enumerate(counting.calls[before:]):
        root = copy_of(template, scratch / "trial")
        row: dict[str, Any] = {"k": k, "call": call}
        if mode in ("ENOSPC", "EIO"):
            row["raised"] = failed_at(root, step, k, getattr(errno, mode))
            row["leftovers"] = leftovers(root)
        elif mode == "killed":
            killed_at(root, step, k)
        else:
            power_lost_at(root, step, k, lose_names=mode == "power lost, names too")
        row["found"] = found(root)
        if mode in ("killed", "EIO"):
            with Disk():  # no fault, and no waiting for a real fsync
                save_sharded(states(NEXT), root, 3)
            row["later"] = [found(root), *leftovers(root)]
        rows.append(row)
    shutil.rmtree(template, ignore_errors=True)
    return rows


def copy_of(template: Path, root: Path) -> Path:
    shutil.rmtree(root, ignore_errors=True)
    if template.exists():
        shutil.copytree(template, root)
    return root


def save_as_rank(root: Path, link: Link, disk: Disk) -> str:
    """One rank's part of a save; what came of it."""
    try:
        with disk:
            save_shard(states(NEW)[link.rank], root, 2, rank=link.rank, world_size=2, exchange=link.exchange)
    except (CheckpointError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def ranks_killed(hit: int, scratch: Path) -> list[dict[str, Any]]:
    """Two ranks save at the same time, and one is killed, at each of its calls in turn."""
    rows: list[dict[str, Any]] = []
    template = prepared(scratch)
    while not rows or rows[-1]["said"][hit] is None:
        root, k = copy_of(template, scratch / "trial"), len(rows)

        def body(link: Link, root: Path = root, k: int = k) -> str:
            return save_as_rank(root, link, Disk(k if link.rank == hit else None, lambda name: os._exit(KILLED)))

        rows.append({"k": k, "said": two_ranks(body), "found": found(root)})
    return rows


def ranks_failing(hit: int, scratch: Path) -> list[dict[str, Any]]:
    """Two ranks save at the same time, and one meets EIO, at each of its calls in turn."""
    template, root = prepared(scratch), scratch / "trial"

    def body(link: Link) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        while not rows or "saved" not in rows[-1]["said"]:
            if link.rank == 0:
                copy_of(template, root)
            link.exchange(b"")
            disk = Disk(len(rows) if link.rank == hit else None, fail_with(errno.EIO))
            said = [reply.decode() for reply in link.exchange(save_as_rank(root, link, disk).encode())]
            rows.append({"k": len(rows), "said": said, "found": found(root), "leftovers": leftovers(root)})
            link.exchange(b"")
        return rows

    rows: list[dict[str, Any]] = two_ranks(body)[0]
    return rows


def prepared(scratch: Path) -> Path:
    shutil.rmtree(scratch / "template", ignore_errors=True)
    prepare("next", scratch / "template")
    return scratch / "template"


# Each way of saving with each way of going wrong that takes another path through it.
CASES = {
    "first": ("power lost, names too",),
    "next": ("EIO",),
    "again": ("power lost", "power lost, names too", "ENOSPC"),
    "with leftovers": ("killed", "EIO"),
}


def main(scratch: Path) -> None:
    results = {f"{s}: {m}": every_call(s, m, scratch) for s, modes in CASES.items() for m in modes}
    for rank in range(2):
        results[f"rank {rank}: killed"] = ranks_killed(rank, scratch)
        results[f"rank {rank}: EIO"] = ranks_failing(rank, scratch)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
