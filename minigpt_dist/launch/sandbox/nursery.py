"""The stems of this process: one for each kit, each a clean process from which sandboxes are forked.

Owns their start and end, and the folders that their kits lie in. Leaves what a stem does to `launch/stem.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from minigpt_dist.launch.channel import Channel
from minigpt_dist.launch.environment import PINNED_THREADS
from minigpt_dist.launch.errors import LaunchError
from minigpt_dist.launch.removal import remove_tree
from minigpt_dist.launch.sandbox.contents import Contents, executable, interpreter_paths, libraries
from minigpt_dist.launch.sandbox.kits import copy_kit, open_to_all

__all__ = ["Stem", "stem_for"]

_CODE = """import sys, json
sys.path[:] = json.loads(sys.argv[1])
from minigpt_dist.launch.stem import main
main(int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4])"""
_LAST_BYTES = 2000
_ORDERLY_S = 10.0  # it may still be importing torch
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "GLOO_SOCKET_IFNAME": "lo", **PINNED_THREADS}


class Stem:
    """A clean process with torch and one kit loaded. `path` is its sys.path, `kit` the folder of the kit."""

    def __init__(self, contents: Contents) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="minigpt-dist-stem-"))
        self.folder.chmod(0o711)
        self.kit = self.folder / "kit"
        copy_kit(contents.kit, self.kit)
        open_to_all(self.kit)
        self.path = [*interpreter_paths(), str(self.kit), str(libraries()[0].parent)]
        self._opened = 0
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it stays open as long as the process prints
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        arguments = [json.dumps(self.path), str(theirs.fileno()), json.dumps(contents.preload), str(self.folder)]
        with theirs:
            self._process = subprocess.Popen(
                [str(executable()), "-I", "-B", "-c", _CODE, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env=_ENVIRONMENT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    @property
    def last_words(self) -> str:
        """What it printed as it died: the last of it; nothing while it lives."""
        if not self.ended:
            return ""
        end = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, end - _LAST_BYTES))
        return self._errors.read().decode(errors="replace").strip()

    def open(self, plan: dict[str, Any], fds: list[int]) -> int:
        """Fork a sandbox and give it `fds`; the number by which to end it."""
        self._opened += 1
        try:
            self._channel.send({"open": plan, "id": self._opened}, *fds)
        except OSError:
            raise LaunchError("the process from which sandboxes are forked has died") from None
        return self._opened

    def end(self, number: int) -> None:
        """Kill a sandbox."""
        with contextlib.suppress(OSError):
            self._channel.send({"end": number})

    def close(self) -> None:
        """End the process, and every sandbox with it."""
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ORDERLY_S)
        self._process.kill()
        self._process.wait()
        self._errors.close()
        remove_tree(self.folder)

    def disown(self) -> None:
        """In a forked child: the process is the parent's."""
        self._channel.close()
        self._process.returncode = 0


_stems: dict[tuple[Any, ...], Stem] = {}


def stem_for(contents: Contents) -> Stem:
    """This process's stem with the kit of `contents`."""
    key = (contents.kit, contents.preload)
    stem = _stems.get(key)
    if stem is not None and (stem.ended or not stem.kit.is_dir()):  # temporary files get tidied up, by others too
        stem.close()
        stem = None
    if stem is None:
        stem = _stems[key] = Stem(contents)
    return stem


@atexit.register
def _close_stems() -> None:
    while _stems:
        _stems.popitem()[1].close()


def _disown_stems() -> None:
    while _stems:
        _stems.popitem()[1].disown()


os.register_at_fork(after_in_child=_disown_stems)
