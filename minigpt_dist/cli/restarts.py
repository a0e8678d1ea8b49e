"""A launcher's job over its starts: what earlier ones left in the run's folder, and where the next one goes on.

The journal, one line a start, says which job owns the folder and what it was asked to train: a start at another world size keeps the
global batch of the first. A job is known by the name that its launcher gives it (`--rdzv-id`), the same at every start.

Owns the journal, and which checkpoint is believed. Leaves options to `settings`, resharding to the checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minigpt_dist.cli.usage import UsageError
from minigpt_dist.config import TrainConfig

if TYPE_CHECKING:
    from minigpt_dist.cli.job import Job
    from minigpt_dist.cli.settings import Settings

JOURNAL = "job.jsonl"
UNNAMED = "none"  # what torch elastic calls a job without --rdzv-id: any other may be called so too


@dataclass(frozen=True)
class Start:
    """One start of a job. step: completed updates it went on from, those of `checkpoint` (a folder; None: the run's beginning).

    asked: the configuration of the command line, whose world size is the one that the global batch was given at.
    """

    job: str
    world_size: int
    step: int
    checkpoint: str | None
    asked: dict[str, Any]


def launched_job() -> str | None:
    """The launcher's name for this process's job; None where there is no launcher, or none that starts a job again.

    UsageError for a job that may be started again and has no name: its folder could not be told from another's.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name == UNNAMED and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        wanted = "should have one (--rdzv-id NAME, or --standalone), as it may be started again and go on in its folder"
        raise UsageError(f"the launcher's job has no name, but {wanted}")
    return None if name == UNNAMED else name


def earlier_starts(out: Path) -> list[Start]:
    """The starts of this process's job so far, oldest first; none where `out` is not there, empty, or another's.

    A leader that is killed may leave half a line at the end, and only there. UsageError for any other that is no start.
    """
    try:
        *lines, _ = (out / JOURNAL).read_text(encoding="utf-8").split("\n")
    except OSError:
        return []
    try:
        starts = [Start(**json.loads(line)) for line in lines]
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"out is {str(out)!r}, whose {JOURNAL} holds a line that is no start of a job: {error}"
        ) from None
    return starts if starts and starts[0].job == launched_job() else []


def begin(job: Job, settings: Settings, folder: Path) -> Settings:
    """What this start is to carry out, the same on all ranks: from where the folder's newest good checkpoint allows.

    The leader notes the start in the folder, puts the metrics of the one before aside, and says what became of it.
    """
    if settings.job is None:
        return settings
    source, start = job.agreed(lambda: _begin(settings, folder))
    config = settings.config
    if config.checkpoint_step and config.checkpoint_step <= start:  # written before the loss: the last step's then
        config = replace(config, checkpoint_step=config.steps)
    return replace(settings, source=None if source is None else Path(source), start=start, config=config)


def _begin(settings: Settings, folder: Path) -> tuple[str | None, int]:
    """On the leader."""
    earlier, config = settings.earlier, settings.config
    found, start, damaged = last_good(folder, config.steps) if earlier else (None, 0, [])
    source = found or settings.source
    start = start if found else settings.start
    for line in damaged:
        print(f"passed over a damaged checkpoint: {line}", flush=True)
    if earlier:
        _put_aside(folder, len(earlier))
        print(_restart_line(earlier, config, source, start), flush=True)
    assert settings.job is not None
    name = None if source is None else str(source)
    asked = earlier[0].asked if earlier else settings.asked
    _note(folder, Start(settings.job, config.world_size, start, name, asked))
    return name, start


def last_good(folder: Path, steps: int) -> tuple[Path | None, int, list[str]]:
    """The newest checkpoint below step `steps` of which every byte is as its manifest says, and its step.

    With it, why newer ones were passed over. (None, 0, ...) if none is good. `latest` is not asked: what it names is one of these.
    """
    from minigpt_dist.checkpoint import CheckpointError, verify_checkpoint
    from minigpt_dist.checkpoint.commit import step_folders

    damaged = []
    for candidate in reversed(step_folders(folder)):
        try:
            manifest = verify_checkpoint(candidate, "full")
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        if manifest.step < steps:  # of one at the last step nothing would be left to train, and nothing to judge
            return candidate, manifest.step, damaged
    return None, 0, damaged


def _restart_line(earlier: Sequence[Start], config: TrainConfig, source: Path | None, start: int) -> str:
    count = len(earlier)
    word = {1: "once", 2: "twice"}.get(count, f"{count} times")
    place = f"resumed from step {start} of {source}" if source else "from step 0, as there is no good checkpoint yet"
    batch = f"{config.micro_batches} micro-batches a rank"
    return f"restarted {word}: world size {earlier[-1].world_size} before, {config.world_size} now ({batch}); {place}"


def _put_aside(folder: Path, count: int) -> None:
    """Move what the start before has recorded into a folder of its own: a killed rank may have left half a line."""
    aside = folder / f"start-{count}"
    aside.mkdir(exist_ok=True)
    for file in [*folder.glob("metrics-rank*.jsonl"), *folder.glob("trace.jsonl")]:
        file.rename(aside / file.name)


def _note(folder: Path, start: Start) -> None:
    """Append the start to the journal; half a line that a killed leader left is first ended, and cut out."""
    path = folder / JOURNAL
    whole = path.read_bytes() if path.exists() else b""
    with path.open("ab") as file:
        file.truncate(whole.rfind(b"\n") + 1)
        file.write(json.dumps(asdict(start)).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
