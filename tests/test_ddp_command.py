"""`minigpt-dist ddp`: three ways to the same parameters, and a difference is said at the step where it begins."""

from __future__ import annotations

import pytest

from minigpt_dist.__main__ import main
from minigpt_dist.bench import agreement

RIGHT = agreement.Row(1, 4.0, 4.0, 4.0, 1e-7, 0.0)


def command(line: str) -> int:
    return main(["ddp", *line.split()])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_ours_torchs_and_one_process_agree_at_every_step(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(f"--world-size 3 --steps 4 --dtype {dtype}") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["1", "2", "3", "4"]
    assert all(row[1] == row[2] == row[3] for row in rows)
    assert len({row[1] for row in rows}) == 4


@pytest.mark.parametrize("apart", [1e-3, float("nan")])
def test_a_difference_is_said_at_the_step_where_it_begins(
    apart: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = agreement.Row(2, 4.0, 4.0, 4.0, apart, 0.0)
    monkeypatch.setattr(agreement, "compare", lambda *_: [RIGHT, wrong, wrong])
    assert command("--steps 3") == 1
    assert f"step 2: parameters are {apart:.1e} apart, but should be at most 1e-05" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--world-size 0", "world_size is 0, but should be a whole number of at least 1"),
        ("--dtype bfloat16", "dtype is 'bfloat16', but should be one of float32, float64"),
        ("--bucket-mb 0", "bucket_mb is 0.0, but should be a positive number"),
    ],
)
def test_a_wrong_command_line_is_told_before_a_rank_starts(
    line: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "run_world", None)
    assert command(line) == 2
    assert capsys.readouterr().err == f"minigpt-dist: {said}\n"
