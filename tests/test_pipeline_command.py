"""`minigpt-dist pipeline`: what it shows is what ran, and it says where that is not what should have run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minigpt_dist.__main__ import main
from minigpt_dist.bench import pipeline
from minigpt_dist.config import ModelConfig
from minigpt_dist.parallel.pipeline import interleaved, one_f_one_b, simulate
from minigpt_dist.parallel.pipeline.gantt import Panel, draw

SMALL = "--stages 2 --micro-batches 3 --layers 3 --embed-dim 16 --steps 1"


def command(line: str) -> int:
    return main(["pipeline", *line.split()])


def test_the_command_shows_chart_table_bubbles_and_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(SMALL) == 0
    out = capsys.readouterr().out
    assert [len(line) for line in out.splitlines() if line.startswith("rank 0 |")] == [len("rank 0 ||") + 100]
    live = [line.split()[-4:] for line in out.splitlines() if re.match(r"[01]  +\d", line)]
    assert [row[:2] for row in live] == [["2", "2"], ["1", "1"]]
    assert all(row[2] == row[3] for row in live)
    assert re.findall(r"(formula|simulated|measured),? .*?([\d.]+)%", out)[:2] == [
        ("formula", "25.0"),
        ("simulated", "25.0"),
    ]
    assert "have the bits of one process" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", ["--schedule gpipe", "--schedule interleaved --micro-batches 4 --tie-head", "--cut even"]
)
def test_every_schedule_is_shown(more: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="draws a picture, with the extra report")
    target = tmp_path / "chart.svg"
    assert command(f"{SMALL} {more} --svg {target}") == 0
    assert f"{target}: the chart" in capsys.readouterr().out
    assert target.read_text(encoding="utf-8").count("as run") == 1


@pytest.mark.slow
def test_a_different_bit_more_activations_or_other_bytes_end_in_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = pipeline.run_pipeline(ModelConfig(num_layers=2), one_f_one_b(2, 2), 4, 1, "even", 60)
    broken = {
        "head.weight: other bits": {"wrong": ["head.weight"]},
        "rank 1 held 2 activations, but should hold 1": {"live": [2, 2]},
        "rank 0 kept 1 bytes": {"live_bytes": [1, found.live_bytes[1]]},
    }
    for said, change in broken.items():
        monkeypatch.setattr(pipeline, "run_pipeline", lambda *_, change=change: replace(found, **change))
        assert command(SMALL) == 1
        assert said in capsys.readouterr().out


@pytest.mark.slow
def test_a_picture_has_a_bar_an_action_and_a_colour_a_chunk(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="draws a picture, with the extra report")
    schedule = interleaved(2, 2, 2)
    draw([Panel("simulated", simulate(schedule), "units")], tmp_path / "chart.svg", "title")
    drawn = (tmp_path / "chart.svg").read_text(encoding="utf-8")
    bars = {
        colour: drawn.count(f"fill: {colour}; stroke: #ffffff")
        for colour in ("#9ecae1", "#4a98c9", "#fdd0a2", "#fd8d3c")
    }
    assert bars == dict.fromkeys(bars, 4)


WRONG = {
    "--schedule zigzag": "schedule is 'zigzag', but should be one of gpipe, 1f1b, interleaved",
    "--stages 0": "stages is 0, but should be a whole number of at least 1",
    "--micro-batches few": "micro_batches is 'few', but should be a whole number",
    "--chunks 2": "chunks is 2, but should be given with an interleaved schedule only",
    "--schedule interleaved --stages 3": "micros is 8, but should be a multiple of the 3 ranks",
    "--stages 4 --layers 1": "stages are 4, but should be 1 to 3, the number of layers",
    "--embed-dim 30": "embed_dim is 30, but should be a multiple of num_heads (4)",
    "--cut short": "cut is 'short', but should be one of balanced, even",
    "--png absent/chart.png": "png is 'absent/chart.png', but should be a .png file in a folder that is there",
    "--svg chart.png": "svg is 'chart.png', but should be a .svg file in a folder that is there",
    "--deadline 0": "deadline is 0.0, but should be a positive, finite number of seconds",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_command_line_is_told_before_a_rank_starts(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("ranks started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pipeline, "run_world", started)
    assert command(line) == 2
    assert capsys.readouterr().err.startswith(f"minigpt-dist: {WRONG[line]}")
    assert list(tmp_path.iterdir()) == []
