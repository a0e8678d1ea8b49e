"""`minigpt-dist bench --profile`: a run's figures, goals that were set before, and numbers that drift."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from minigpt_dist.__main__ import main
from minigpt_dist.bench import profile
from minigpt_dist.bench.goals import BY_NAME, met
from minigpt_dist.bench.profile import percentile, profile_of
from minigpt_dist.cli import bench
from minigpt_dist.drift import LEAST, Drift
from minigpt_dist.launch import ledger, run_world
from minigpt_dist.parallel.collectives import all_reduce_start
from minigpt_dist.recorder import Recorder
from minigpt_dist.trace import Record, Trace

BYTES = {"params": 40, "grads": 40, "optimizer": 30, "buffers": 0}


def trace_of(steps: int = 12) -> Trace:
    """Two ranks, of which rank 1 is slower by a tenth; step s takes s ms of compute and as long in communication; 8 tokens a rank."""
    records = []
    for step in range(steps + 1):
        for rank in range(2):
            ms = 1e-3 * step * (1 + 0.1 * rank)
            seconds = {"forward_backward": ms, "communication": ms} if step else {}
            drift = {"loss": 2.0} if step == 7 else {}
            records.append(
                Record(step, rank, loss=float(rank), bytes=BYTES, tokens=[0] * 8, seconds=seconds, drift=drift)
            )
    return Trace({}, records)


def test_figures_are_those_of_the_slowest_rank_after_the_warm_up() -> None:
    found = profile_of(trace_of(), price_per_hour=3.6)
    times = [2 * step * 1.1 for step in range(3, 13)]
    assert found["tokens_per_second"] == pytest.approx(16 * 10 / (1e-3 * sum(times)))
    assert [found[f"step_ms_p{p}"] for p in (50, 90, 99)] == pytest.approx([times[4], times[8], times[9]])
    assert (found["communication_share"], found["total_bytes"], found["drift_steps"]) == (
        pytest.approx(0.5),
        110.0,
        1.0,
    )
    assert found["price_per_million_tokens"] == pytest.approx(3.6 / 3600 / found["tokens_per_second"] * 1e6)


def test_every_figure_can_have_a_goal() -> None:
    assert set(profile_of(trace_of(), price_per_hour=1.0)) == set(BY_NAME)


def test_a_trace_that_only_warms_up_has_no_profile() -> None:
    with pytest.raises(ValueError, match="steps are 3, but should be above 2"):
        profile_of(trace_of(2))


@pytest.mark.parametrize("percent, value", [(50, 2.0), (75, 3.0), (76, 4.0), (99, 4.0), (1, 1.0)])
def test_percentiles_are_values_that_occurred(percent: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == value


def test_goals_are_met_up_to_their_bound_and_never_by_what_is_no_number() -> None:
    assert [met("step_ms_p50", v, 2.0) for v in (2.0, 2.1, math.nan)] == [True, False, False]
    assert [met("tokens_per_second", v, 2.0) for v in (2.0, 1.9, math.nan)] == [True, False, False]


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The command over the trace above, in place of a run's."""
    monkeypatch.setattr(bench, "prepare", lambda: None)
    monkeypatch.setattr(profile, "train_profiled", lambda *args: trace_of())
    return main(["bench", "--profile", *words])


@pytest.mark.parametrize("goal, code, mark", [(110, 0, "met"), (109, 1, "missed")])
def test_a_goal_stands_beside_its_figure_and_a_missed_one_exits_one(
    goal: float,
    code: int,
    mark: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "goals.toml").write_text(f"[goals]\ntotal_bytes = {goal}\ntokens_per_second = 1\n")
    assert command(monkeypatch, "--goals", str(tmp_path / "goals.toml"), "--json", str(tmp_path / "out.json")) == code
    row = next(line.split() for line in capsys.readouterr().out.splitlines() if "total_bytes" in line)
    assert row[-4:] == ["110", "<=", str(goal), mark]
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["missed"], written["figures"]["total_bytes"]) == (["total_bytes"] if code else [], 110)


@pytest.mark.parametrize(
    "text, line",
    [
        ("", "but should be a file with one table, [goals]"),
        ("[goals]\n", "but should be a file with one table, [goals]"),
        ("goals = 3", "but should be a file with one table, [goals]"),
        ("[goals]\nloss = 1\n[more]\n", "but should be a file with one table, [goals]"),
        ("[goals", "but should be a TOML file"),
        ("[goals]\nspeed = 1", "goal is 'speed', but should be one of tokens_per_second, "),
        ("[goals]\nloss = true", "loss is True, but should be a finite number of at least 0"),
        ("[goals]\nloss = nan", "loss is nan, but should be a finite number of at least 0"),
        ("[goals]\nloss = -1", "loss is -1, but should be a finite number of at least 0"),
        (
            "[goals]\nprice_per_million_tokens = 1",
            "price_per_hour is not given, but should be, as there is a goal for the price",
        ),
    ],
)
def test_goals_that_make_no_sense_are_told_in_one_line(
    text: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "goals.toml").write_text(text)
    assert command(monkeypatch, "--goals", str(tmp_path / "goals.toml")) == 2
    err = capsys.readouterr().err
    assert (line in err, err.count("\n")) == (True, 1)


@pytest.mark.parametrize(
    "words, line",
    [
        ("--goals x", "goals is given, but should be only with --profile"),
        (
            "--profile --goals absent.toml",
            "goals is 'absent.toml' (No such file or directory), but should be a readable file",
        ),
        ("--profile --price-per-hour -1", "price_per_hour is -1.0, but should be a finite number of at least 0"),
        ("--profile --steps 2", "steps is 2, but should be above 2, which warm up"),
        ("step --profile", "what is 'step', but should not be given with --profile"),
    ],
)
def test_wrong_options_are_told_in_one_line(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words.split()]) == 2
    assert capsys.readouterr().err == f"minigpt-dist: {line}\n"


@pytest.mark.slow
def test_a_run_is_profiled_with_its_real_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--profile", "--world-size", "2", "--steps", "8", "--price-per-hour", "1"]) == 0
    rows = {line.split("  ")[0]: line.split() for line in capsys.readouterr().out.splitlines()[2:]}
    assert rows["bytes a rank: optimizer"][-1] == f"{12 * 29_824 // 2:,}"
    assert 0 < float(rows["share of a step in communication"][-1]) < 1


def test_time_in_communication_is_a_phase_of_its_own_and_part_of_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    now, talked = [0.0], [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(ledger, "seconds", lambda: talked[0])
    recorder = Recorder(nn.Linear(1, 1), None, 0, watch=frozenset())
    recorder.started(0)
    now[0], talked[0] = 5.0, 2.0
    recorder.backward_done(1)
    now[0], talked[0] = 9.0, 2.5
    recorder.updated(1, [0.0])
    assert recorder.records[-1].seconds == {"forward_backward": 3.0, "optimizer": 3.5, "communication": 2.5}


def timed_body() -> list[bool]:
    """Is there time on the ledger: at first, after an exchange and a wait, after it was cleared."""
    ledger.clear()
    found = [ledger.seconds() > 0]
    work = all_reduce_start(torch.ones(1))
    called = ledger.seconds()
    assert work is not None
    work.wait()
    found += [0 < called < ledger.seconds()]
    ledger.clear()
    return [*found, ledger.seconds() > 0]


def test_the_ledger_counts_the_time_of_calls_and_of_waits() -> None:
    assert run_world(timed_body, 2) == [[False, True, False]] * 2


def flags(values: list[Any], name: str = "grad_norm") -> list[dict[str, float]]:
    drift = Drift()
    return [drift.flags({name: value}) for value in values]


def test_a_jump_is_flagged_with_its_factor_and_what_stays_becomes_usual() -> None:
    found = flags([1.0] * LEAST + [10.0] * 20)
    assert found[: LEAST + 1] == [{}] * LEAST + [{"grad_norm": 10.0}]
    assert found[-1] == {}


def test_a_fall_is_flagged_but_for_the_loss() -> None:
    values = [1.0] * LEAST + [0.1]
    assert (flags(values)[-1], flags(values, "loss")[-1]) == ({"grad_norm": 0.1}, {})


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_flagged_at_once_and_not_remembered(value: float) -> None:
    assert flags([value, 1.0, 1.0, 1.0, 1.0, 1.0]) == [{"grad_norm": math.inf}, {}, {}, {}, {}, {}]


def test_the_first_steps_have_no_usual_value() -> None:
    assert flags([1.0, 100.0, 0.01]) == [{}, {}, {}]


def observed(jump: float) -> list[dict[str, float]]:
    """The drift that a recorder notes over some steps, the last of which moves the parameters `jump` times as far."""
    model = nn.Linear(3, 3)
    recorder = Recorder(model, None, 0, watch=frozenset())
    recorder.started(0)
    for step in range(1, 8):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + 0.01 * (jump if step == 7 else 1))
        recorder.updated(step, [1.0])
    return [record.drift for record in recorder.records]


def test_an_unusual_update_is_noted_in_the_record_of_its_step() -> None:
    assert [sorted(drift) for drift in observed(10)] == [[]] * 7 + [["update_ratio"]]
    assert observed(10)[-1]["update_ratio"] == pytest.approx(10, rel=1e-3)
    assert observed(1) == [{}] * 8
