"""Sides of a refactor check at work, all at the same time, and what each of them wrote.

Owns the interpreter they start from, its environment, deadline and end. Leaves what they do to `refactor_driver.py` and what it means to
`refactor.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minigpt_dist.config import TrainConfig
from minigpt_dist.launch.environment import PINNED_THREADS
from minigpt_dist.launch.errors import LaunchError
from minigpt_dist.trace import Trace, read_trace
from minigpt_dist.verify import refactor_driver
from minigpt_dist.verify.capture import read_shots
from minigpt_dist.verify.locate_run import Recomputed, Run, judged_corpus
from minigpt_dist.verify.sides import Side

HOME = Path(__file__).parents[2]
POLL_S = 0.1
START_S = 60.0  # for an interpreter with torch on a busy machine
# A start that keeps the driver's folder off sys.path: its neighbours must not be found by their short names.
_BOOT = "import sys, runpy; del sys.path[0]; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
COMMAND = "train command"
Report = dict[str, Any]


def is_command(case: str) -> bool:
    """Is it the case of the package's own command, rather than of its pieces in the check's loop?"""
    return case.endswith(COMMAND)


class NoImplementationError(ValueError):
    """A side has nothing to run. The message is one line."""


@dataclass(frozen=True)
class Ran:
    """One side that has run: a folder a case, and what was reported of each."""

    side: Side
    folder: Path

    def reports(self) -> list[Report]:
        """Whole lines that the driver has written so far."""
        try:
            text = (self.folder / "done.jsonl").read_text()
        except OSError:
            return []
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def report(self, case: str) -> Report:
        """{"case": name}, with "skipped" or "error" beside it. NoImplementationError if the contract's names are not there."""
        for line in self.reports():
            broken = line.get("import")
            if broken and broken["kind"] == "Unsupported":
                raise NoImplementationError(f"{self.side.label} is without an implementation: {broken['message']}")
            if broken:
                return {"case": case, "error": broken}
            if line.get("case") == case:
                return line
        output = (self.folder / "output").read_text(errors="replace").strip().splitlines()
        words = output[-1] if output else "its process ended without a word"
        return {"case": case, "error": {"kind": "RankDied", "message": words, "rank": 0, "traceback": ""}}

    def run(self, case: str, config: TrainConfig) -> Run:
        """The run that the side wrote."""
        shots, resumed = [], []
        for rank in range(config.world_size):
            shots += read_shots(self.folder / case / f"rank{rank}.safetensors")
            again = self.folder / case / f"rank{rank}-resumed.safetensors"
            resumed += read_shots(again) if again.exists() else []
        return Run(config, {(s.step, s.rank): s for s in shots}, {(s.step, s.rank): s for s in resumed})

    def trace(self, case: str) -> Trace:
        """The trace that the side's own command wrote. ValueError if it is of another format."""
        return read_trace(self.folder / case / "run" / "trace.jsonl")

    def oracle(self, case: str) -> Recomputed | None:
        """What one process of the side gave; None if that was not asked for.

        The contract's master copies are float32, also under a float64 model: its rounding is what is allowed.
        """
        file = self.folder / case / "oracle.safetensors"
        if not file.exists():
            return None
        first, *rest = read_shots(file)
        return Recomputed(first.get("params"), {(s.step, s.rank): s.parts for s in rest}, dtype="float32")


class Sides:
    """The interpreter that sides are started from. A context manager: leaving it ends every process."""

    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process writes
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, refactor_driver.__file__],
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # one kill ends the sides and their ranks
        )

    def __enter__(self) -> Sides:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._errors.close()

    @contextmanager
    def ran(
        self,
        sides: Sequence[Side],
        chosen: Mapping[str, TrainConfig],
        *,
        deadline_s: float = 60.0,
        oracle: bool = False,
        tell: Callable[[int], object] = lambda done: None,
    ) -> Iterator[list[Ran]]:
        """Run `sides` at the same time over the cases; what they wrote is there for the length of the block.

        deadline_s: for one case. oracle: recompute, too. tell: hears how many cases are done, over all sides.
        Raises LaunchError if a side comes to no end; what goes wrong in a case is in its report.
        """
        with tempfile.TemporaryDirectory(prefix="minigpt-dist-diff-") as temporary:
            done = [Ran(side, Path(temporary) / str(i)) for i, side in enumerate(sides)]
            jobs = [_write_job(one, chosen, deadline_s, oracle) for one in done]
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # told below
                self._process.stdin.write(json.dumps(jobs).encode() + b"\n")
                self._process.stdin.flush()
            self._wait(done, tell, START_S + 2 * deadline_s * len(chosen))
            yield done

    def _wait(self, done: Sequence[Ran], tell: Callable[[int], object], limit_s: float) -> None:
        assert self._process.stdout is not None
        limit = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not selector.select(POLL_S):
                tell(sum(len(one.reports()) for one in done))
                if time.monotonic() > limit:
                    late = " and ".join(one.side.label for one in done)
                    raise LaunchError(f"{late} have not come to an end within {limit_s:g} s")
        if not self._process.stdout.readline():
            self._errors.seek(0)
            raise LaunchError(f"the interpreter of the sides has died:\n{self._errors.read().decode(errors='replace')}")


def _write_job(one: Ran, chosen: Mapping[str, TrainConfig], deadline_s: float, oracle: bool) -> str:
    side, folder, plain = one.side, one.folder, TrainConfig().to_dict()
    (folder / "empty").mkdir(parents=True)
    listed = [
        {
            "name": name,
            "config": c.to_dict(),
            "tokens": judged_corpus(c).tolist(),
            "defaults": {**plain, **plain["model"]},
            "command": _command(c) if is_command(name) else None,
        }
        for name, c in chosen.items()
    ]
    job = {
        "root": str(side.root) if side.root else None,
        "path": str(side.path) if side.path else None,
        "cases": listed,
        "out": str(folder),
        "deadline_s": deadline_s,
        "oracle": oracle,
    }
    (folder / "job.json").write_text(json.dumps(job))
    return str(folder / "job.json")


def _command(c: TrainConfig) -> list[str]:
    """Options that the command has had from the first."""
    options = {"world-size": c.world_size, "steps": c.steps, "batch": c.batch, "seed": c.seed, "out": "run"}
    return ["train", *(word for name, value in options.items() for word in (f"--{name}", str(value)))]


def _environment() -> dict[str, str]:
    """This process's, less what a launcher said of it; nothing compiled is left in a side's tree."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    inherited = {name: value for name, value in os.environ.items() if name not in launcher}
    return {
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",  # the host's own name need not resolve
        **inherited,
        **PINNED_THREADS,
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(HOME)])),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
