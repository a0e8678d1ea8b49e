"""`minigpt-dist train`: what it prints, what it keeps, how it goes on, and how it says that an invariant is broken."""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from minigpt_dist.__main__ import main
from minigpt_dist.cli import training
from minigpt_dist.cli.commands import load, parser_of
from minigpt_dist.cli.settings import read_settings
from minigpt_dist.cli.training import Outcome
from minigpt_dist.trace import Record, Trace, read_trace

SIZE = ["--world-size", "2", "--steps", "4", "--reduction", "exact"]


@dataclass
class Run:
    """A finished command: exit code, its output, its folder."""

    code: int
    out: str
    folder: Path
    outcome: Outcome


def run_into(folder: Path, *words: str) -> Run:
    """`minigpt-dist WORDS --out FOLDER`, in this process."""
    seen: list[Outcome] = []
    original = training._train

    def spy(*args: object) -> Outcome:
        seen.append(original(*args))  # type: ignore[arg-type]  # handed through as they came
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(training, "_train", spy)
        code = main([*words, "--out", str(folder)])
    return Run(code, out.getvalue(), folder, seen[-1])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A small run, kept."""
    return run_into(tmp_path_factory.mktemp("cli") / "run", *SIZE)


def rows(text: str, title: str) -> list[list[str]]:
    """The cells of the table under `title`, without its head."""
    body = text[text.index(title) :].split("\n\n")[0]
    return [line.split() for line in body.splitlines()[2:]]


def test_a_run_ends_with_composition_verified_and_zero(run: Run) -> None:
    assert run.code == 0
    assert run.out.splitlines()[-1].startswith("composition verified: 2 ranks, 4 steps; ")
    assert [line[:7] for line in run.out.splitlines() if line.startswith("(")] == [
        "(a) ok:",
        "(b) ok:",
        "(c) ok:",
        "(d) ok:",
    ]


def test_the_loss_table_has_a_row_a_step_with_the_traces_figures(run: Run) -> None:
    table, trace = rows(run.out, "Loss"), read_trace(run.folder / "trace.jsonl")
    assert [row[:2] for row in table] == [[str(s), f"{loss:.6f}"] for s, loss in trace.mean_losses().items()]
    assert [row[2] for row in table] == [f"{norm:.6f}" for norm in trace.grad_norms().values()]


def test_the_memory_profile_has_a_row_a_rank_then_max_and_mean(run: Run) -> None:
    table = rows(run.out, "Memory")
    assert [row[0] for row in table] == ["0", "1", "max", "mean"]
    assert {tuple(row[1:]) for row in table} == {("119,296", "119,296", f"{12 * 14912 + 8 * 29824:,}")}


def test_the_manifest_table_tells_the_files_on_disk(run: Run) -> None:
    files = sorted((run.folder / "step-00000002").glob("*.safetensors"))
    facts = [(f.name, f"{f.stat().st_size:,}", hashlib.sha256(f.read_bytes()).hexdigest()) for f in files]
    assert [(row[0], row[1], row[4]) for row in rows(run.out, "Checkpoint manifest")] == facts
    assert [row[2:4] for row in rows(run.out, "Checkpoint manifest")] == [["0", "14912"], ["14912", "14912"]]


def test_the_trace_is_the_metrics_export(run: Run) -> None:
    records = [r for r in read_trace(run.folder / "trace.jsonl").records if r.step]
    assert [(r.step, r.rank) for r in records] == [(s, r) for s in range(1, 5) for r in range(2)]
    assert all(math.isfinite(r.loss) and math.isfinite(r.grad_norm) and sum(r.seconds.values()) > 0 for r in records)


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


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "--tie-head --dropout 0.1 --micro-batches 2", "--guard skip --max-norm 0.3"])
def test_a_whole_run_of_each_stage_is_verified_and_has_the_bits_of_stage_1(options: str, tmp_path: Path) -> None:
    seen = []
    for stage in "123":
        run = run_into(tmp_path / stage, "--zero", stage, "--world-size", "3", "--steps", "6", *options.split())
        assert run.code == 0
        records = read_trace(tmp_path / stage / "trace.jsonl").records
        seen.append([(r.step, r.rank, repr(r.loss), r.params, r.optimizer) for r in records])
    assert seen[0] == seen[1] == seen[2]


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


@pytest.mark.slow  # as above
def test_steps_that_overflow_are_told(tmp_path: Path) -> None:
    run = run_into(tmp_path / "half", *SIZE, "--dtype", "float16", "--loss-scale", "4194304", "--steps", "8")
    assert run.code == 0
    assert "skipped on all ranks, as a gradient overflowed: steps 1" in run.out


def test_on_text_the_loss_is_reported_not_judged_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "text").write_bytes(bytes(range(256)) * 2)
    assert main(["--text", str(tmp_path / "text"), "--world-size", "1", "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert "(a) reported, not judged: mean loss " in out
    assert "composition verified: 1 rank, 2 steps, (a) not judged; " in out
    assert [p.name for p in tmp_path.iterdir()] == ["text"]


def test_a_run_past_its_deadline_is_a_named_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--world-size", "2", "--deadline", "0.01"]) == 3
    assert capsys.readouterr().err.startswith("minigpt-dist: deadline of 0.01 s passed: rank")


def _edit(trace: Trace, step: int, rank: int, change: Callable[[Record], Record]) -> Trace:
    return Trace(trace.header, [change(r) if (r.step, r.rank) == (step, rank) else r for r in trace.records])


def _other_shard(r: Record) -> Record:
    return replace(r, optimizer={**r.optimizer, "shards.0.master": "0" * 64})


BROKEN: dict[str, tuple[Callable[[Outcome], Outcome], str, str]] = {
    "loss": (
        lambda o: replace(o, trace=_edit(o.trace, 3, 1, lambda r: replace(r, loss=9.0))),
        "(a) FAIL: monotone_loss [minigpt_dist, dp=2, world size 2] step 3: the mean loss is ",
        "(a)",
    ),
    "norms": (
        lambda o: replace(o, trace=_edit(o.trace, 2, 1, lambda r: replace(r, param_norm=1.0))),
        "(b) FAIL: param_norms [minigpt_dist, dp=2, world size 2] step 2 rank 1: the parameter norm is 1.0, but ",
        "(b)",
    ),
    "bytes": (
        lambda o: replace(o, trace=_edit(o.trace, 4, 0, lambda r: replace(r, bytes={**r.bytes, "optimizer": 7}))),
        "(c) FAIL: optimizer_bytes [minigpt_dist, dp=2, world size 2] step 4 rank 0: optimizer memory is 7 bytes, ",
        "(c)",
    ),
    "loaded": (
        lambda o: replace(o, resumed=o.resumed and _edit(o.resumed, 2, 1, _other_shard)),
        "(d) FAIL: resume_bytes [minigpt_dist, dp=2, world size 2] step 2 rank 1: what was loaded (sha256) is 0000",
        "(d)",
    ),
    "trained on": (
        lambda o: replace(o, resumed=o.resumed and _edit(o.resumed, 4, 0, _other_shard)),
        "(d) FAIL: resume_bytes [minigpt_dist, dp=2, world size 2] step 4 rank 0: the optimizer state's bytes (sha",
        "(d)",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_invariant_is_named_at_its_place_and_exits_one(
    what: str, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil, line, letter = BROKEN[what]
    monkeypatch.setattr(training, "_train", lambda *args: spoil(run.outcome))
    monkeypatch.setattr(training, "_manifest", lambda folder: None)
    assert main(SIZE) == 1
    out = capsys.readouterr().out
    assert line in out
    assert "\nreplay: minigpt-dist train --world-size 2 --steps 4 --reduction exact\n" in out
    assert out.splitlines()[-1].startswith(f"composition broken: {letter}; ")
