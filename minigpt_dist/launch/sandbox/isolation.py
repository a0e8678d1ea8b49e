"""The modes of isolation, and the choice of one that is seen to work here.

Owns the names, what each mode promises, and the order of strength. Leaves trying a mode to `selftest.py`.
"""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from minigpt_dist.launch.errors import LaunchError

__all__ = ["MODES", "Isolation", "IsolationError", "choose"]

MODES = ("namespaces", "bwrap", "uid", "none")  # strongest first; the first two are equal, and bubblewrap starts slower
_OPEN = ", the suite and its answers too: take the right to read them from others"


class IsolationError(LaunchError):
    """A mode of isolation was required and does not work here."""


@dataclass(frozen=True)
class Isolation:
    """A mode in force. `notes` say what it gives: network, files, processes, memory, user; and what it does not."""

    name: str
    notes: tuple[str, ...] = ()


def choose(mode: str = "auto", require: bool = False) -> Isolation:
    """The mode asked for, or for "auto" the strongest that passes its self-test here; weaker ones follow where one fails.

    Raises ValueError for an unknown mode, IsolationError where `require` and the mode (for "auto": any but none) fails.
    """
    if mode != "auto" and mode not in MODES:
        raise ValueError(f"isolation is {mode!r}, but should be one of auto, {', '.join(MODES)}")
    candidates = MODES if mode == "auto" else MODES[MODES.index(mode) :]
    failures: list[str] = []
    for name in candidates:
        failure = _failure(name)
        if failure is None:
            weaker = name != mode and (mode != "auto" or name == "none")
            if require and weaker:
                raise IsolationError(f"isolation {mode} is required, but does not work here: {'; '.join(failures)}")
            return Isolation(name, _notes(name) + tuple(failures))
        failures.append(f"{name} does not work here: {failure}")
    raise IsolationError("; ".join(failures))


@functools.cache
def _failure(name: str) -> str | None:
    """Why a mode does not work here; None if it does."""
    if name == "none":
        return None
    if sys.platform != "linux":
        return f"it needs Linux, this is {sys.platform}"
    from minigpt_dist.launch.sandbox.selftest import failure_of  # it starts worlds, which start sandboxes

    return failure_of(name)


def _readable_by_all(file: str) -> bool:
    path = Path(file).resolve()
    return bool(path.stat().st_mode & 0o004) and all(folder.stat().st_mode & 0o001 for folder in path.parents)


def _notes(name: str) -> tuple[str, ...]:
    root = os.geteuid() == 0
    user = "a user of its own for the ranks" if root else "no user of its own: the caller's, without privileges"
    limits = "processes, memory, file size, descriptors and processor time are limited"
    if name in ("bwrap", "namespaces"):
        return (
            "network: a loopback of its own and nothing else",
            "files: only the interpreter, torch, a kit of probes and the submission, read-only; /tmp of 512 MiB",
            "processes: its own, all dead at the end",
            f"limits: {limits}",
            f"user: {user}",
        )
    if name == "uid":
        return (
            "network: not cut off",
            "files: what permissions allow every user to read" + _OPEN * _readable_by_all(__file__),
            "processes: those of its user, all killed at the end",
            f"limits: {limits}",
            f"user: {user}",
        )
    return ("network, files, processes and user are not isolated: for code that is trusted", f"limits: {limits}")
