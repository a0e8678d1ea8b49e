"""The memory table: the published figures, what ranks really hold, and the command that shows both."""

from __future__ import annotations

import pytest

from minigpt_dist.bench import states
from minigpt_dist.bench.states import DTYPES, STAGES, measure_states, padding, unlike
from minigpt_dist.cli import memory_table
from minigpt_dist.cli.commands import parser_of
from minigpt_dist.cli.usage import EXIT_OK, EXIT_VIOLATED, UsageError
from minigpt_dist.memory import state_bytes


def gigabytes(stage: int, dtype: str, params: float, world_size: int) -> float:
    return params * sum(state_bytes(stage, dtype, world_size).values()) / 1e9


def test_the_papers_example_of_7_5_billion_parameters_on_64_ranks_comes_out() -> None:
    """Figure 1 has 120, 31.4, 16.6 and 1.9 GB; our stage 2 sums gradients in float32, 2 bytes a parameter and rank more."""
    found = [gigabytes(stage, "bfloat16", 7.5e9, 64) for stage in STAGES]
    assert [round(found[0]), round(found[1], 1), round(found[3], 1)] == [120, 31.4, 1.9]
    assert round(found[2] - 2 * 7.5 / 64, 1) == 16.6


@pytest.mark.parametrize("world_size", [2, *(pytest.param(N, marks=pytest.mark.slow) for N in (1, 3, 4, 5, 6, 7, 8))])
def test_ranks_hold_what_is_predicted_up_to_padding(world_size: int) -> None:
    found = measure_states(world_size, 60)
    assert not [(d, s) for d in DTYPES for s in STAGES if unlike(found[d][s], s, d, world_size)]


def test_padding_hides_no_element_of_the_model() -> None:
    """Not one more byte a parameter on one of eight ranks."""
    assert max(padding(stage, 8) for stage in STAGES) < states.NUMEL / 8


@pytest.mark.parametrize(("off", "code"), [(0, EXIT_OK), (4 * states.NUMEL // 2, EXIT_VIOLATED), (-8, EXIT_VIOLATED)])
def test_the_command_prints_both_and_its_exit_code_says_whether_they_agree(
    off: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exact = {d: [int(states.NUMEL * sum(state_bytes(s, d, 2).values())) for s in STAGES] for d in DTYPES}
    exact["float32"][2] += off
    monkeypatch.setattr(states, "measure_states", lambda world_size, deadline_s: exact)
    assert memory_table.run(parser_of(memory_table).parse_args(["--world-sizes", "2"])) == code
    out = capsys.readouterr().out
    row = next(line.split() for line in out.splitlines() if line.startswith("2 "))
    assert row[:4] == ["2", "16.00", "(16.00)", "14.00"]
    assert next(line.split() for line in out.splitlines() if line.startswith("64 ")) == [
        "64",
        "16.00",
        "8.19",
        "4.25",
        "0.25",
    ]


@pytest.mark.slow
def test_the_command_measures_on_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert memory_table.run(parser_of(memory_table).parse_args(["--world-sizes", "1,2"])) == EXIT_OK
    assert "2      16.00 (16.01)  14.00 (14.00)  12.00 (12.00)    8.00 (8.00)" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["--world-sizes 0", "--deadline 0", "--deadline nan"])
def test_wrong_usage_is_told_before_anything_is_measured(line: str) -> None:
    with pytest.raises(UsageError, match="but should be"):
        memory_table.run(parser_of(memory_table).parse_args(line.split()))
