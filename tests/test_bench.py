"""`minigpt-dist bench`: fair turns, ratios within a round, and a command that prints, writes and judges them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from minigpt_dist.bench import collectives, data_parallel, guard, launch, recompute, step, zero
from minigpt_dist.bench.comparison import Comparison
from minigpt_dist.bench.interleave import interleaved, slowest
from minigpt_dist.cli import bench
from minigpt_dist.cli.commands import parser_of
from minigpt_dist.cli.usage import EXIT_OK, EXIT_VIOLATED, UsageError
from minigpt_dist.launch import run_world

pytestmark = pytest.mark.slow

MEASURED = Comparison(
    "a call",
    {"mine": [1.0, 9.0, 3.0], "rival": [2.0, 10.0, 4.0], "other": [1.0, 1.0, 1.0]},
    ours="mine",
    goals={"rival": 0.75, "other": 1.0},
    limits={"mine": 3.0},
)


def command(line: str) -> int:
    return bench.run(parser_of(bench).parse_args(line.split()))


def rows(out: str, title: str) -> dict[str, list[str]]:
    """The table below `title`: a variant's name -> the words of its row."""
    lines = out.split(f"\n{title}")[1].split("\n\n")[0].splitlines()[2:]
    return {line.split("  ")[0]: line.split() for line in lines}


def test_turns_alternate_and_each_round_starts_with_another() -> None:
    turns: list[str] = []
    actions = {name: lambda name=name: turns.append(name) for name in "abc"}
    seconds = interleaved(actions, rounds=2, calls=2, before=lambda: turns.append("-"))
    assert "".join(turns) == "-a-b-c" + "-aa-bb-cc" + "-bb-cc-aa"
    assert [len(seconds[name]) for name in "abc"] == [2, 2, 2]


def test_a_round_takes_as_long_as_its_slowest_rank() -> None:
    assert slowest([{"x": [1.0, 5.0]}, {"x": [2.0, 4.0]}]) == {"x": [2.0, 5.0]}


def test_ratio_is_the_median_of_ratios_within_a_round() -> None:
    assert (MEASURED.ratio("rival"), MEASURED.ratio("other"), MEASURED.ratio("mine")) == (0.75, 3.0, None)


def test_goals_are_met_up_to_their_bound() -> None:
    assert {name: MEASURED.met(name) for name in MEASURED.seconds} == {"mine": True, "rival": True, "other": False}
    assert MEASURED.missed == ["other"]


def test_without_goals_nothing_can_be_missed() -> None:
    assert Comparison("a call", {"x": [1.0]}).to_dict()["rows"][0]["met"] is None


def test_steps_are_measured_beside_every_rival(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = f"step --world-size 2 --rounds 2 --steps 1 --json {tmp_path / 'out.json'}"
    assert command(line) == EXIT_OK
    out, written = capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())
    found = rows(out, "Training step, tiny: P = 29,824, 2 ranks, 2 rounds of 1 steps")
    assert list(found) == [name for name in step.VARIANTS if name != step.FSDP2]
    assert [found[name][-3:-1] for name in (step.DDP, step.ZRO)] == [["<=", "1"], ["<=", "0.5"]]
    assert all(float(found[name][-4]) > 0 for name in (step.DDP, step.ZRO))
    assert out.splitlines()[0].endswith("one thread a rank. Ratios travel to other machines, milliseconds do not.")
    assert [len(row["seconds"]) for row in written["comparisons"][0]["rows"]] == [2] * len(found)


def test_fsdp2_takes_a_step_too() -> None:
    assert [list(rank) for rank in run_world(step.step_body, 2, "tiny", [step.FSDP2], 1, 1)] == [[step.FSDP2]] * 2


def test_checkpoints_are_measured_and_put_away(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert command(f"checkpoint --world-size 2 --megabytes 1 --rounds 2 --dir {tmp_path}") == EXIT_OK
    found = rows(capsys.readouterr().out, "Checkpoint of 1 MB, 2 ranks, 2 rounds")
    assert list(found) == ["ours (save_shard, sha256)", "raw write + fsync", "torch.distributed.checkpoint (no hash)"]
    assert list(tmp_path.iterdir()) == []


def test_our_wrapper_is_measured_beside_torchs(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("ddp --world-size 2 --rounds 2 --steps 1") == EXIT_OK
    found = rows(capsys.readouterr().out, "Data-parallel step, tiny: P = 29,824, 2 ranks, 2 rounds of 1 steps")
    assert found[data_parallel.TORCH][-3:-1] == ["<=", "1.05"]


def test_the_quiet_guard_is_measured_beside_steps_without_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("guard --world-size 2 --rounds 2 --steps 1") == EXIT_OK
    out, sizes = capsys.readouterr().out, "tiny: P = 29,824, 2 ranks, 2 rounds of 1 steps"
    assert rows(out, f"The guard, {sizes}")[guard.UNGUARDED][-3:-1] == ["<=", "1.01"]
    share = rows(out, f"The guard's CPU seconds, {sizes}, rank 0")[guard.STEP]
    assert share[-3:-1] == ["<=", "0.01"]
    assert 0 < float(share[-4]) < 1


def test_recomputation_is_measured_beside_the_plain_step_and_torchs(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("recompute --world-size 2 --rounds 2 --steps 1") == EXIT_OK
    out = capsys.readouterr().out
    found = rows(out, "Step with recomputation, tiny: P = 29,824, 2 ranks, 2 rounds of 1 steps")
    assert list(found) == [recompute.PLAIN, recompute.OURS, recompute.TORCH]
    kept = out.partition("at most: ")[2].splitlines()[0].replace(",", "").split()
    assert int(kept[3]) > int(kept[6])


@pytest.mark.slow
def test_stages_2_and_3_are_each_measured_beside_stage_1_and_fsdp2(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("zero --world-size 2 --rounds 2 --steps 1") == EXIT_OK
    out = capsys.readouterr().out
    for ours in zero.GOALS:
        found = rows(out, f"Training step of {ours}, tiny: P = 29,824, 2 ranks, 2 rounds of 1 steps")
        assert list(found) == list(zero.VARIANTS)


@pytest.mark.slow
def test_every_layout_takes_a_step_beside_data_ranks_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("layouts --world-size 4 --rounds 1 --steps 1") == EXIT_OK
    title = "Training step by layout, ZeRO-1, tiny: P = 29,824, 4 ranks, 512 tokens, 1 rounds of 1 steps"
    found = rows(capsys.readouterr().out, title)
    assert list(found) == ["dp 4", "dp 2, pp 2", "dp 2, tp 2", "pp 4", "tp 2, pp 2", "tp 4"]


def test_all_reduces_are_measured_at_every_size_with_a_goal_for_the_large(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("collectives --world-size 2 --rounds 1") == EXIT_OK
    out = capsys.readouterr().out
    sizes = [f"All-reduce of {nbytes // 1024:,} KiB, 2 ranks" for nbytes in collectives.BYTES]
    assert [rows(out, size)[collectives.BACKEND][-3:-1] == ["<=", "1.3"] for size in sizes] == [False] * 3 + [True] * 2


def test_launches_are_measured_against_limits(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("launch --world-size 2 --rounds 2") == EXIT_OK
    found = rows(capsys.readouterr().out, "One all-reduce, 2 ranks, 2 rounds")
    assert [row[-4:-1] for row in found.values()] == [["<=", "150", "ms"], ["<=", "10", "ms"]]


@pytest.mark.parametrize("limit, code", [(0.0, EXIT_VIOLATED), (math.inf, EXIT_OK)])
def test_strict_exits_one_where_a_goal_is_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], limit: float, code: int
) -> None:
    monkeypatch.setattr(launch, "LIMITS", {launch.POOLED: limit})
    assert command("launch --world-size 1 --rounds 1 --strict") == code
    assert ("missed" in capsys.readouterr().out) == (code == EXIT_VIOLATED)


WRONG = {
    "speed": "what is 'speed', but should be one of step, ddp, zero, layouts, recompute, guard, collectives, checkpoint, launch, all",
    "step --size huge": "size is 'huge', but should be one of tiny, medium",
    "step --rounds 0": "rounds is 0, but should be a whole number of at least 1",
    "step --steps -1": "steps is -1, but should be a whole number of at least 1",
    "launch --world-size 0": "world_size is 0, but should be a whole number of at least 1",
    "checkpoint --megabytes 0": "megabytes is 0, but should be a whole number of at least 1",
    "checkpoint --dir absent": "dir is 'absent', but should be a folder",
    "launch --json absent/out.json": "json is 'absent/out.json', but should be a file in a folder that is there",
    "launch --deadline 0": "deadline is 0.0, but should be a positive, finite number of seconds",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_usage_is_told_before_anything_is_measured(line: str) -> None:
    with pytest.raises(UsageError) as raised:
        command(line)
    assert str(raised.value) == WRONG[line]


def test_ranks_of_a_launcher_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="one of a launcher's ranks"):
        command("launch")
