"""Sides of a refactor check at work: one interpreter a side, all at the same time, and what each of them wrote.

Owns the processes, their environment, deadline and end. Leaves what they do to `refactor_driver.py` and what it means to
`refactor.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minigpt_dist.config import TrainConfig
from minigpt_dist.launch.environment import PINNED_THREADS
from minigpt_dist.launch.errors import LaunchError
from minigpt_dist.verify import refactor_driver
from minigpt_dist.verify.capture import read_shots
from minigpt_dist.verify.locate_run import Recomputed, Run, judged_corpus
from minigpt_dist.verify.sides import Side

HOME = Path(__file__).parents[2]
POLL_S = 0.1
START_S = 60.0  # for an interpreter with torch on a busy machine
# A start that keeps the driver's folder off sys.path: its neighbours must not be found by their short names.
_BOOT = "import sys, runpy; del sys.path[0]; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
Report = dict[str, Any]


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

    def oracle(self, case: str) -> Recomputed | None:
        """What one process of the side gave; None if that was not asked for.

        The contract's master copies are float32, also under a float64 model: its rounding is what is allowed.
        """
        file = self.folder / case / "oracle.safetensors"
        if not file.exists():
            return None
        first, *rest = read_shots(file)
        return Recomputed(first.get("params"), {(s.step, s.rank): s.parts for s in rest}, dtype="float32")


@contextmanager
def ran(
    sides: Sequence[Side],
    chosen: Mapping[str, TrainConfig],
    *,
    deadline_s: float = 60.0,
    oracle: bool = False,
    tell: Callable[[int], object] = lambda done: None,
) -> Iterator[list[Ran]]:
    """Run all sides at the same time over the cases; what they wrote is there for the length of the block.

    deadline_s: for one case. oracle: recompute, too. tell: hears how many cases are done, over all sides.
    Raises LaunchError if a side comes to no end; what goes wrong in a case is in its report.
    """
    with tempfile.TemporaryDirectory(prefix="minigpt-dist-diff-") as temporary:
        done = [Ran(side, Path(temporary) / str(i)) for i, side in enumerate(sides)]
        with contextlib.ExitStack() as stack:
            processes = []
            for one in done:
                processes.append(_start(one, chosen, deadline_s, oracle))
                stack.callback(_end, processes[-1])
            _wait(processes, done, tell, START_S + 2 * deadline_s * len(chosen))
        yield done


def _start(one: Ran, chosen: Mapping[str, TrainConfig], deadline_s: float, oracle: bool) -> subprocess.Popen[bytes]:
    side, folder, plain = one.side, one.folder, TrainConfig().to_dict()
    (folder / "empty").mkdir(parents=True)
    listed = [
        {
            "name": name,
            "config": c.to_dict(),
            "tokens": judged_corpus(c).tolist(),
            "defaults": {**plain, **plain["model"]},
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
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-c", _BOOT, refactor_driver.__file__, str(folder / "job.json")],
            cwd=folder / "empty",
            env=_environment(side),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # one kill ends the driver and its ranks
        )


def _environment(side: Side) -> dict[str, str]:
    """This process's, with the side's own package first; nothing compiled is left in its tree."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    inherited = {name: value for name, value in os.environ.items() if name not in launcher}
    search = [str(side.root) if side.root else "", os.environ.get("PYTHONPATH", ""), str(HOME)]
    return {
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",  # the host's own name need not resolve
        **inherited,
        **PINNED_THREADS,
        "PYTHONPATH": os.pathsep.join(filter(None, search)),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _wait(
    processes: Sequence[subprocess.Popen[bytes]], done: Sequence[Ran], tell: Callable[[int], object], limit_s: float
) -> None:
    waited = 0.0
    for process, one in zip(processes, done, strict=True):
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
                break
            waited += POLL_S
            tell(sum(len(each.reports()) for each in done))
            if waited > limit_s:
                raise LaunchError(f"{one.side.label} has not come to an end within {limit_s:g} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the driver and its ranks
    process.wait()
