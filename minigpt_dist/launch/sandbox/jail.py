"""One sandbox: its folder on the machine, its user, the command that enters it, and its end.

Owns everything that a sandbox leaves on the machine, and that nothing of it stays. Leaves what runs inside to `launch/server.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minigpt_dist.launch.environment import PINNED_THREADS
from minigpt_dist.launch.errors import LaunchError
from minigpt_dist.launch.limits import Limits
from minigpt_dist.launch.sandbox import bwrap
from minigpt_dist.launch.sandbox.contents import (
    TMP_BYTES,
    Contents,
    copy_submission,
    executable,
    hidden_paths,
    interpreter_paths,
    libraries,
    system_paths,
)
from minigpt_dist.launch.sandbox.isolation import Isolation
from minigpt_dist.launch.sandbox.kits import copy_kit, open_to_all
from minigpt_dist.launch.sandbox.leftovers import owned_folder, sweep
from minigpt_dist.launch.sandbox.nursery import stem_for
from minigpt_dist.launch.sandbox.user import end_all_of, fresh_user

__all__ = ["Jail"]

_CODE = """import sys, json
sys.path[:] = json.loads(sys.argv[1])
from minigpt_dist.launch.server import main
main(int(sys.argv[2]), "fork", json.loads(sys.argv[3]), json.loads(sys.argv[4]))"""
SITE, SUBMISSION, SHARED = "/site", "/submission", "/shared"
_ORDERLY_S, _DEAD_S = 2.0, 30.0


class Jail:
    """A sandbox that is ready to be entered once; `close` ends and removes it.

    Attributes: `user`, the id that ranks take (None: they keep the server's); `submission`, where it lies inside; `path`, `env`, `cwd`
    and `scratch`, what ranks are given as sys.path, environment, working directory and place for files of their own.
    """

    def __init__(self, isolation: Isolation, contents: Contents, limits: Limits | None = None) -> None:
        self.isolation, self.contents, self.limits = isolation, contents, limits or Limits()
        sweep()
        self.folder, self._owner = owned_folder()
        self._alive, self._held = os.pipe()  # reads end-of-file once every process inside has ended
        self._kill: Callable[[], None] | None = None
        try:
            self.walled = isolation.name in ("bwrap", "namespaces")
            own = isolation.name != "none" and os.geteuid() == 0
            self.user = fresh_user() if own else None
            if self.user is None and not self.walled:
                self.limits = self.limits._replace(processes=None)
            os.chmod(self.folder, 0o711)
            self._fill()
        except BaseException:
            self.close()
            raise

    def _fill(self) -> None:
        self._shared = self.folder / "shared"
        self._shared.mkdir(mode=0o711)
        self.submission, self.path, self.cwd = self.contents.submission, list(sys.path), os.getcwd()
        self.env, self.scratch = dict(os.environ), str(self._shared)
        if self.isolation.name == "none":
            return
        self._readable: list[tuple[Path, str]] = []
        if self.contents.submission is not None:
            copy = self.folder / "submission"
            copied = copy_submission(self.contents.submission, copy)
            open_to_all(copy)
            self._readable.append((copy, SUBMISSION))
            self.submission = Path(SUBMISSION) / copied.relative_to(copy) if self.walled else copied
        self._fill_package()
        self.env = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "GLOO_SOCKET_IFNAME": "lo", **PINNED_THREADS}
        self.env |= {"HOME": self.scratch, "TMPDIR": self.scratch}

    def _fill_package(self) -> None:
        """The kit and the libraries, where this mode has them."""
        self.cwd = self.scratch = "/tmp"
        if self.isolation.name == "namespaces":
            self._stem = stem_for(self.contents)
            self.path = self._stem.path
            self._readable += [(self._stem.kit, str(self._stem.kit)), *((place, str(place)) for place in libraries())]
            if self.contents.extra:
                extra = self.folder / "extra"
                copy_kit(self.contents.extra, extra)
                open_to_all(extra)
                self._readable.append((extra, f"{SITE}/extra"))
            return
        kit = self.folder / "kit"
        copy_kit(self.contents.kit if self.contents.kit is None else self.contents.kit + self.contents.extra, kit)
        open_to_all(kit)
        if self.isolation.name == "bwrap":
            self._readable += [(kit, f"{SITE}/kit"), *((place, f"{SITE}/{place.name}") for place in libraries())]
            self.path = [*interpreter_paths(), f"{SITE}/kit", SITE]
            return
        scratch = self.folder / "scratch"
        scratch.mkdir(mode=0o700)
        self.adopt(scratch)
        self.path = [*interpreter_paths(), str(kit), str(libraries()[0].parent)]
        self.cwd = self.scratch = str(scratch)

    def adopt(self, place: Path | int) -> None:
        """Give a file to the sandbox's user."""
        if self.user is not None:
            os.chown(place, self.user, self.user)

    def shared_folder(self) -> Path:
        """A new folder that both sides see; what ranks shall write must be made, and given to them by `adopt`, from here."""
        if not self._shared.is_dir():
            raise LaunchError("the sandbox has been closed")
        made = Path(tempfile.mkdtemp(dir=self._shared))
        made.chmod(0o711)
        return made

    def inside(self, shared: Path) -> str:
        """Where a shared folder is inside."""
        return f"{SHARED}/{shared.name}" if self.walled else str(shared)

    def enter(self, control: int, log: int) -> None:
        """Start a rank server inside, with the far end of its control channel, printing to `log`; nothing else here is open to it."""
        sandbox = [list(self.limits), self.user, self.walled]
        if self.isolation.name == "namespaces":
            number = self._stem.open(self._plan(sandbox), [control, self._held, log])
            self._kill = lambda: self._stem.end(number)
        else:
            process = self._spawn(sandbox, control, log)
            self._kill = lambda: _kill_group(process)
        os.close(self._held)
        self._held = -1

    def _plan(self, sandbox: list[Any]) -> dict[str, Any]:
        root = self.folder / "root"
        root.mkdir()
        links, readable = system_paths()
        readable += [(str(source), target) for source, target in self._readable]
        return {
            "root": str(root),
            "links": links,
            "readable": readable,
            "hidden": hidden_paths(),
            "shared": [str(self._shared), SHARED],
            "tmp_bytes": TMP_BYTES,
            "env": self.env,
            "path": self.path,
            "extra": f"{SITE}/extra",
            "sandbox": sandbox,
        }

    def _spawn(self, sandbox: list[Any], control: int, log: int) -> subprocess.Popen[bytes]:
        words = [json.dumps(self.path), str(control), json.dumps(self.contents.preload), json.dumps(sandbox)]
        own = self.isolation.name == "none"
        command = [*([sys.executable] if own else [str(executable()), "-I", "-B"]), "-c", _CODE, *words]
        passed = [control, self._held]
        with tempfile.TemporaryFile() as options:
            if self.isolation.name == "bwrap":
                given = bwrap.arguments(self._readable, (self._shared, SHARED), self.env)
                options.write(b"".join(os.fsencode(word) + b"\0" for word in given))
                options.seek(0)
                passed.append(options.fileno())
                command = [str(bwrap.available()), "--args", str(options.fileno()), "--", *command]
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**self.env, **PINNED_THREADS},
                cwd="/" if self.walled else self.cwd,
                pass_fds=passed,
                start_new_session=True,
            )

    @property
    def last_words(self) -> str:
        """What the process that was to become this sandbox printed, if it died of it."""
        return self._stem.last_words if self.isolation.name == "namespaces" else ""

    @property
    def ended(self) -> bool:
        """Whether every process inside has ended."""
        return not self.folder.exists() or self._gone(0.0)

    def close(self) -> None:
        """End every process inside, wait until the last is gone, and remove what the sandbox had here.  Safe to call twice."""
        if not self.folder.exists():
            return
        if self._kill is not None:
            if not self._gone(_ORDERLY_S):
                self._kill()
            if self.user is not None and not self.walled:
                end_all_of(self.user)
            if not self._gone(_DEAD_S):
                raise LaunchError(f"processes of a sandbox have not ended {_DEAD_S:g} s after they were killed")
            self._kill()  # reaps
        shutil.rmtree(self.folder, ignore_errors=True)
        for fd in (self._alive, self._held, self._owner):
            if fd >= 0:
                os.close(fd)

    def disown(self) -> None:
        """In a forked child: the sandbox is the parent's to end."""
        os.close(self._alive)
        os.close(self._owner)
        self.folder = Path(os.devnull, "none")

    def _gone(self, within_s: float) -> bool:
        """Whether the pipe that every process inside holds has come to its end. What foreign code writes to it is thrown away."""
        limit = time.monotonic() + within_s
        while select.select([self._alive], [], [], max(0.0, limit - time.monotonic()))[0]:
            if not os.read(self._alive, 1 << 16):
                return True
        return False


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
