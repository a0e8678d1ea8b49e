"""From options to a run that can be carried out: every check that needs no rank, before anything is started or written.

Owns the defaults that depend on each other, what a resumed run may change, and the messages for files. Leaves ranges to
`config`.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from minigpt_dist.cli.planned import take_plan
from minigpt_dist.cli.usage import UsageError, one_of, seconds
from minigpt_dist.config import ModelConfig, TrainConfig

BYTE_VOCAB = 256  # a text's tokens are its bytes
DEVICES, BACKENDS = ("auto", "cpu", "cuda"), ("gloo", "nccl")
SAVING = ("checkpoint_step", "checkpoint_every", "checkpoint_minutes")
LAYOUT = ("tp", "pp", "schedule", "sequence_parallel", "zero_stage", "offload", "recompute", "overlap")
FREE_ON_RESUME = ("steps", "world_size", *LAYOUT, *SAVING, "guard", "max_rollbacks", "spike")


@dataclass(frozen=True)
class Settings:
    """A run: `source` is the run it continues, `start` the step that one had reached, `out` where its files stay.

    timeline: keep when what was computed and exchanged, and show the last step."""

    config: TrainConfig
    device: str
    backend: str | None
    deadline_s: float
    out: Path | None = None
    source: Path | None = None
    start: int = 0
    timeline: bool = False


def read_settings(args: argparse.Namespace, launched_ranks: int | None) -> Settings:
    """The run that the options ask for. UsageError names the first thing wrong.

    `launched_ranks` is the world size that a launcher has decided, None where this process starts the ranks.
    """
    one_of("device", args.device, DEVICES)
    if args.backend is not None:
        one_of("backend", args.backend, BACKENDS)
    deadline_s = seconds("deadline", args.deadline)
    given = _given(args)
    if args.plan is not None:
        take_plan(given, Path(args.plan))
    _take_launcher(given, launched_ranks)
    source = None if args.resume is None else Path(args.resume)
    try:
        config, start = _fresh(given, args.dp) if source is None else _continued(given, args.dp, source)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not (config.checkpoint_step == 0 or start < config.checkpoint_step <= config.steps):
        wanted = f"a step in {start + 1}..{config.steps}, or 0 for no checkpoint"
        raise UsageError(f"checkpoint_step is {config.checkpoint_step}, but should be {wanted}")
    _check_text(config)
    out = None if args.out is None else checked_out(Path(args.out))
    return Settings(config, args.device, args.backend, deadline_s, out, source, start, args.timeline)


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were really given, by field of TrainConfig and ModelConfig."""
    known = [f.name for f in (*fields(TrainConfig), *fields(ModelConfig))]
    return {name: value for name in known if (value := getattr(args, name, None)) is not None}


def _take_launcher(given: dict[str, Any], launched_ranks: int | None) -> None:
    if launched_ranks is None:
        return
    asked = given.setdefault("world_size", launched_ranks)
    if asked != launched_ranks:
        raise UsageError(f"world_size is {asked}, but should be {launched_ranks}, the ranks that the launcher started")


def _take_replicas(given: dict[str, Any], dp: int | None, usual: TrainConfig) -> None:
    """The world size that `dp` replicas of the model need, each of as many ranks as are given, or usual."""
    if dp is None:
        return
    if dp < 1:
        raise UsageError(f"dp is {dp}, but should be a whole number of at least 1")
    wanted = dp * given.get("tp", usual.tp) * given.get("pp", usual.pp)
    asked = given.setdefault("world_size", wanted)
    if asked != wanted:
        raise UsageError(f"world_size is {asked}, but should be {wanted}, dp * tp * pp")


def _fresh(given: dict[str, Any], dp: int | None) -> tuple[TrainConfig, int]:
    """A run from step 0. Half of it lies before the checkpoint, unless asked otherwise."""
    _take_replicas(given, dp, TrainConfig())
    text = given.get("text")
    if text is not None and given.setdefault("vocab", BYTE_VOCAB) < BYTE_VOCAB:
        wanted = f"at least {BYTE_VOCAB}, as the tokens of a text are its bytes"
        raise UsageError(f"vocab is {given['vocab']}, but should be {wanted}")
    config = _with(TrainConfig(), given)
    if "checkpoint_step" not in given:
        config = replace(config, checkpoint_step=max(1, config.steps // 2))
    return config, 0


def _continued(given: dict[str, Any], dp: int | None, source: Path) -> tuple[TrainConfig, int]:
    """A run that goes on from the latest checkpoint of `source`, which also says what it is a run of.

    What is not given of the layout stays as it was.
    """
    saved, start = _saved_run(source)
    _take_replicas(given, dp, saved)
    layout = {name: given[name] for name in ("world_size", *LAYOUT) if name in given}
    if any(value != getattr(saved, name) for name, value in layout.items()):
        from minigpt_dist.worker import resized  # here: torch, which fresh runs leave to the rank server

        saved = resized(saved, **{"world_size": saved.world_size, **layout})
    free = (*FREE_ON_RESUME, "text") if saved.text is not None else FREE_ON_RESUME  # the file may have moved
    for name, value in given.items():
        kept = getattr(saved.model if hasattr(saved.model, name) else saved, name)
        if value != kept and name not in free:
            raise UsageError(f"{name} is {value!r}, but should be {kept!r}, as in the checkpoint to go on from")
    config = _with(saved, given)
    if config.steps <= start:
        raise UsageError(f"steps is {config.steps}, but should be above {start}, the step of the checkpoint")
    if "checkpoint_step" not in given:
        config = replace(config, checkpoint_step=config.steps)
    return config, start


def _saved_run(source: Path) -> tuple[TrainConfig, int]:
    from minigpt_dist.checkpoint import CheckpointError, verify_checkpoint  # here: as above

    wanted = "the folder of a run with a good checkpoint"
    try:
        manifest = verify_checkpoint(source, "fast")
        return TrainConfig.from_dict(manifest.meta["config"]), manifest.step
    except CheckpointError as error:
        raise UsageError(f"resume is {str(source)!r}, but should be {wanted}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        found = f"{str(source)!r}, whose checkpoint holds no configuration"
        raise UsageError(f"resume is {found}, but should be {wanted}") from error


def _with(config: TrainConfig, given: dict[str, Any]) -> TrainConfig:
    """`config` with the given fields replaced. ValueError for values out of range."""
    sizes = {f.name for f in fields(ModelConfig)}
    model = replace(config.model, **{name: value for name, value in given.items() if name in sizes})
    return replace(config, model=model, **{name: value for name, value in given.items() if name not in sizes})


def _check_text(config: TrainConfig) -> None:
    if config.text is None:
        return
    try:
        with open(config.text, "rb") as file:
            found = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise UsageError(f"text is {config.text!r} ({error.strerror}), but should be a readable file") from error
    if found < config.total_tokens:
        raise UsageError(
            f"text is {found} bytes long, but should be at least {config.total_tokens}, all that the run reads"
        )


def checked_out(out: Path, what: str = "out") -> Path:
    """`out`, the option `what`, if it can be a folder of its own: empty or not there yet. Makes nothing."""
    wanted = "a new or empty folder"
    try:
        held = sorted(os.listdir(out))[:1] if os.path.lexists(out) else []
    except OSError as error:
        raise UsageError(f"{what} is {str(out)!r} ({error.strerror}), but should be {wanted}") from error
    if held:
        raise UsageError(f"{what} is {str(out)!r}, which holds {held[0]!r}, but should be {wanted}")
    return out


def make_out(out: Path, what: str = "out") -> Path:
    """Make the folder, as the last thing before ranks start. UsageError if that cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise UsageError(f"{what} is {str(out)!r} ({error.strerror}), but should be a folder to write in") from error
    return out.absolute()
