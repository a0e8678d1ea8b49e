"""Sandboxes made by bubblewrap: namespaces of its own for files, processes, network, and no way back.

Owns bubblewrap's arguments. They go by a descriptor, since its command line can be read from inside.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from minigpt_dist.launch.sandbox.contents import TMP_BYTES, hidden_paths, system_paths

__all__ = ["arguments", "available"]

_UNSHARED = ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try")


def available() -> str | None:
    """Where bubblewrap is; None if it is not installed."""
    return shutil.which("bwrap")


def arguments(readable: list[tuple[Path, str]], shared: tuple[Path, str], env: dict[str, str]) -> list[str]:
    """Options for bwrap, without the command. `readable` pairs places here with places inside; `shared` is writable, file by file."""
    made: set[str] = set()
    out = [*_UNSHARED, "--die-with-parent", "--new-session", "--hostname", "sandbox"]
    tmp = ["--perms", "1777", "--size", str(TMP_BYTES), "--tmpfs"]
    out += [*_privileges(), "--proc", "/proc", "--dev", "/dev", *tmp, "/dev/shm", *tmp, "/tmp", *_system(made)]
    for source, target in readable:
        out += [*_parents(target, made), "--ro-bind", str(source), target]
    for place in hidden_paths():
        out += ["--perms", "0755", "--tmpfs", place]
    out += [*_parents(shared[1], made), "--bind", str(shared[0]), shared[1], "--chdir", "/tmp", "--clearenv"]
    for name, value in env.items():
        out += ["--setenv", name, value]
    return out


def _privileges() -> list[str]:
    """Root keeps what the server needs to make its ranks another user's; others get a user namespace and keep nothing."""
    if os.geteuid() == 0:
        kept = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_KILL")
        return [word for name in kept for word in ("--cap-add", name)]
    return ["--unshare-user", "--uid", "1000", "--gid", "1000", "--cap-drop", "ALL"]


def _system(made: set[str]) -> list[str]:
    """The system's libraries, the interpreter, and the few files of /etc that libraries look for."""
    links, places = system_paths()
    out = [word for name, target in links for word in ("--symlink", target, name)]
    for source, target in places:
        out += [*_parents(target, made), "--ro-bind", source, target]
    return out


def _parents(target: str, made: set[str]) -> list[str]:
    """Make the folders above `target` readable by all: bubblewrap would make them private."""
    out = []
    for folder in [str(p) for p in reversed(Path(target).parents)][1:]:
        if folder not in made and folder not in ("/tmp", "/usr"):
            made.add(folder)
            out += ["--perms", "0755", "--dir", folder]
    return out
