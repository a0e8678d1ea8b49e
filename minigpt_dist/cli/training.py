"""One run from start to verdict: train with a checkpoint, resume it elsewhere, judge, report.

Owns the order of these and the run's folders. Leaves the ranks to `job`, the verdicts to `claims`, the words to
`report`.
"""

from __future__ import annotations

import shlex
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minigpt_dist.checkpoint import Manifest, latest_step_folder, read_manifest
from minigpt_dist.cli import report
from minigpt_dist.cli.claims import judge_run
from minigpt_dist.cli.job import Job, open_job
from minigpt_dist.cli.progress import progress
from minigpt_dist.cli.settings import Settings, make_out
from minigpt_dist.cli.usage import EXIT_OK, EXIT_VIOLATED
from minigpt_dist.config import TrainConfig
from minigpt_dist.recorder import ALL, TIMELINE
from minigpt_dist.trace import Record, Trace, merge
from minigpt_dist.worker import rank_body


@dataclass(frozen=True)
class Outcome:
    """What a run left: its trace, each rank's snapshot at the checkpoint (path -> digest), the trace of its resume.

    The configuration's `checkpoint_step` is the step of the newest checkpoint. incidents: bad steps that the guard went back from.
    """

    config: TrainConfig
    start: int
    trace: Trace
    snapshots: list[dict[str, str]]
    resumed: Trace | None
    incidents: list[str]

    def losses(self) -> dict[int, float]:
        """Step -> mean loss over ranks, of the steps that this run trained."""
        return {step: loss for step, loss in self.trace.mean_losses().items() if step > self.start}


def carry_out(settings: Settings, launched: bool, command_line: Sequence[str], began: float) -> int:
    """Train, resume, judge; print it all on the leader. The exit code is the same on every rank.

    `began`: when the command started, by time.perf_counter.
    """
    config = settings.config
    with open_job(launched, config.world_size, settings.device, settings.backend, settings.deadline_s) as job:
        with _folders(job, settings.out) as (folder, scratch):
            outcome = _train(job, settings, folder, scratch)
            manifest = _manifest(folder) if job.leader and outcome.config.checkpoint_step else None
            if job.leader and settings.out is not None:
                outcome.trace.write(folder / "trace.jsonl")
        claims, config = judge_run(outcome), outcome.config
        if job.leader:
            console = report.console()
            report.print_run(console, job, outcome, manifest)
            if settings.timeline:
                report.print_timeline(console, outcome.trace)
            report.print_claims(console, claims, config, shlex.join(command_line))
            report.print_end(console, claims, config, settings.out, time.perf_counter() - began)
    return EXIT_VIOLATED if any(claim.violations for claim in claims) else EXIT_OK


@contextmanager
def _folders(job: Job, out: Path | None) -> Iterator[tuple[Path, Path]]:
    """The run's folder, and one for its resume that goes away with the block; `out` is made last."""
    with tempfile.TemporaryDirectory(prefix="minigpt-dist-") as temporary:  # the others' stay empty: the leader's count
        scratch = Path(temporary)
        (scratch / "resumed").mkdir()
        (scratch / "run").mkdir()
        folder = job.agreed(lambda: str(scratch / "run" if out is None else make_out(out)))
        yield Path(folder), scratch / "resumed"


def _train(job: Job, settings: Settings, folder: Path, scratch: Path) -> Outcome:
    config, source = settings.config, settings.source
    watch = sorted(ALL | {TIMELINE} if settings.timeline else ALL)
    where = None if source is None else str(source)
    with progress(folder if job.leader else None, "train", config.steps - settings.start):
        ranks = job.run(rank_body, config.to_dict(), str(folder), source is not None, watch, job.device, where)
    resumed, trace, incidents = None, _trace(config, ranks), ranks[0]["incidents"]
    config = replace(config, checkpoint_step=ranks[0]["saved"])
    if config.checkpoint_step:
        with progress(scratch if job.leader else None, "resume", config.steps - config.checkpoint_step):
            again = job.run(rank_body, config.to_dict(), str(scratch), True, watch, job.device, str(folder))
        resumed = _trace(config, again)
    return Outcome(config, settings.start, trace, [rank["snapshot"] for rank in ranks], resumed, incidents)


def _trace(config: TrainConfig, ranks: list[dict[str, Any]]) -> Trace:
    header = {"impl": "minigpt_dist", "config": config.to_dict()}
    return merge(header, [[Record(**record) for record in rank["records"]] for rank in ranks])


def _manifest(folder: Path) -> Manifest:
    return read_manifest(latest_step_folder(folder))
