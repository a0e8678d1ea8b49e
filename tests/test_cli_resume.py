"""`minigpt-dist train --resume`: at the same layout, stage and ranks or at others, and the settings that a run must keep."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_runs import SIZE, Run, rows, run_into

from minigpt_dist.__main__ import main
from minigpt_dist.cli import training
from minigpt_dist.cli.commands import load, parser_of
from minigpt_dist.cli.settings import read_settings
from minigpt_dist.trace import read_trace


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A small run, kept."""
    return run_into(tmp_path_factory.mktemp("cli") / "run", *SIZE)


def test_a_resumed_run_ends_in_the_bytes_of_the_unbroken_one(run: Run, tmp_path: Path) -> None:
    resumed = run_into(tmp_path / "on", "--resume", str(run.folder))
    last, again = read_trace(run.folder / "trace.jsonl").at(4), read_trace(tmp_path / "on" / "trace.jsonl").at(4)
    assert resumed.code == 0
    assert [(r.params, r.optimizer, r.loss) for r in again] == [(r.params, r.optimizer, r.loss) for r in last]
    assert [row[0] for row in rows(resumed.out, "Loss")] == ["3", "4"]


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_run_resumed_at_another_stage_ends_in_the_bytes_of_the_unbroken_one(
    run: Run, stage: int, tmp_path: Path
) -> None:
    resumed = run_into(tmp_path / "on", "--resume", str(run.folder), "--zero", str(stage))
    last, again = read_trace(run.folder / "trace.jsonl").at(4), read_trace(tmp_path / "on" / "trace.jsonl").at(4)
    assert resumed.code == 0
    assert [(r.params, r.optimizer, r.loss) for r in again] == [(r.params, r.optimizer, r.loss) for r in last]


def test_a_run_resumed_on_fewer_ranks_ends_in_the_same_parameters(run: Run, tmp_path: Path) -> None:
    run_into(tmp_path / "on", "--resume", str(run.folder), "--world-size", "1")
    assert (
        read_trace(tmp_path / "on" / "trace.jsonl").at(4)[0].params
        == read_trace(run.folder / "trace.jsonl").at(4)[0].params
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--lr 0.5", "lr is 0.5, but should be 0.01, as in the checkpoint to go on from"),
        ("--embed-dim 64", "embed_dim is 64, but should be 32, as in the checkpoint to go on from"),
        ("--text x", "text is 'x', but should be None, as in the checkpoint to go on from"),
        ("--steps 2", "steps is 2, but should be above 2, the step of the checkpoint"),
        ("--checkpoint-step 1", "checkpoint_step is 1, but should be a step in 3..4, or 0 for no checkpoint"),
        ("--world-size 3", "world_size is 3, but should be one of 1, 2, which divide the 2 micro-batches of a step"),
        ("--dp 4", "world_size is 4, but should be one of 1, 2, which divide the 2 micro-batches of a step"),
        (
            "--dp 4 --tp 2",
            "number of replicas is 4, but should be one of 1, 2, which divide the 2 micro-batches of a step",
        ),
        ("--tp 3", "world_size is 2, but should be a multiple of tp (3)"),
        ("--tp 8 --dp 1", "num_heads is 4, but should be a multiple of tp (8)"),
        ("--tp 0", "tp is 0, but should be a whole number of at least 1"),
        ("--dp 2 --tp 2 --world-size 2", "world_size is 2, but should be 4, dp * tp * pp"),
    ],
)
def test_a_resumed_run_refuses_another_setting(
    words: str, line: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--resume", str(run.folder), *words.split()]) == 2
    assert capsys.readouterr().err == f"minigpt-dist: {line}\n"


@pytest.mark.parametrize(
    ("words", "axes"),
    [
        ("", (2, 1, 1)),
        ("--tp 2", (1, 2, 2)),
        ("--dp 1 --tp 4", (1, 4, 2)),
        ("--dp 2 --tp 2", (2, 2, 1)),
        ("--dp 1", (1, 1, 2)),
    ],
)
def test_a_resumed_run_has_the_layout_asked_for_and_the_global_batch_that_was(
    words: str, axes: tuple[int, int, int], run: Run
) -> None:
    args = parser_of(load("train")).parse_args(["--resume", str(run.folder), *words.split()])
    config = read_settings(args, None).config
    assert (config.dp, config.tp, config.micro_batches) == axes


def test_an_altered_checkpoint_is_told_before_ranks_start(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = "rank-00001-of-00002.safetensors"
    for file in (run.folder / "step-00000002").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / shard).write_bytes((tmp_path / shard).read_bytes()[:-1] + b"\x7f")
    monkeypatch.setattr(training, "_train", lambda *args: pytest.fail("ranks started"))
    assert main(["--resume", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"minigpt-dist: resume is {str(tmp_path)!r}, but should be the folder of a run with a good")
    assert (shard in err, err.count("\n")) == (True, 1)


@pytest.mark.slow  # four ranks; the worker's own runs are compared in the quick tests of tensor parallelism
def test_replicas_of_two_ranks_are_verified_and_go_on_where_they_were(tmp_path: Path) -> None:
    size = ["--tp", "2", "--dp", "2", "--sequence-parallel", "--recompute", "--steps", "4"]
    first = run_into(tmp_path / "first", *size)
    assert (first.code, first.outcome.config.world_size) == (0, 4)
    assert "12P/N with P = 15360, N = 2: of the model's 29824" in first.out
    second = run_into(tmp_path / "second", "--resume", str(first.folder), "--steps", "6")
    assert second.code == 0
    assert second.outcome.trace.at(4)[0].params == first.outcome.trace.at(4)[0].params


@pytest.mark.slow  # as above
@pytest.mark.parametrize("words", ["--dp 1 --tp 4", "--dp 2 --tp 1 --zero 3", "--world-size 2"])
def test_a_run_of_two_ranks_a_replica_goes_on_at_another_layout(words: str, tmp_path: Path) -> None:
    first = run_into(tmp_path / "first", "--tp", "2", "--dp", "2", "--steps", "4", "--dtype", "float64")
    second = run_into(tmp_path / "second", "--resume", str(first.folder), *words.split())
    assert second.code == 0
    assert second.outcome.losses() == pytest.approx({s: first.outcome.losses()[s] for s in (3, 4)}, abs=1e-11)
