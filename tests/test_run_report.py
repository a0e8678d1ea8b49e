"""`minigpt-dist report`: a page that needs nothing else, from a finished run, a live one, or one killed in the middle of a line."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

import pytest

from minigpt_dist.cli import run_report
from minigpt_dist.cli.commands import parser_of
from minigpt_dist.cli.run_page.curves import charts
from minigpt_dist.cli.run_page.metrics import read_run
from minigpt_dist.cli.usage import UsageError
from minigpt_dist.trace import Record, Trace, to_line


def record(step: int, rank: int) -> Record:
    trained = step > 0
    return Record(
        step=step,
        rank=rank,
        loss=4.0 - 0.1 * step + rank if trained else math.nan,
        grad_sq=0.25 if trained else math.nan,
        bytes={"params": 1024 * (1 + rank)} if step == 1 else {},
        tokens=list(range(8)),
        seconds={"forward_backward": 0.002, "optimizer": 0.001 * (1 + rank)} if trained else {},
    )


def live_run(folder: Path, reached: tuple[int, ...] = (3, 3), tail: str = "") -> Path:
    """A folder as ranks leave it while they train: rank r has written steps 0 to reached[r]."""
    for rank, last in enumerate(reached):
        lines = "".join(to_line(record(step, rank)) + "\n" for step in range(last + 1))
        (folder / f"metrics-rank{rank}.jsonl").write_text(lines + tail)
    return folder


def command(line: str) -> argparse.Namespace:
    return parser_of(run_report).parse_args(line.split())


@pytest.mark.slow
def test_the_page_holds_every_curve_and_every_step_and_loads_nothing(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    assert run_report.run(command(str(live_run(tmp_path)))) == 0
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 5
    assert re.findall(r"<td>(\d)</td>", page) == ["1", "2", "3"]
    assert not re.findall(r"(?:src|href)=\"http", page)


@pytest.mark.slow
def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    from minigpt_dist.cli.run_page.page import render

    assert render(read_run(live_run(tmp_path)), "x") == render(read_run(tmp_path), "x")


def test_curves_are_means_sums_and_extremes_over_ranks(tmp_path: Path) -> None:
    found = {chart.title: chart.lines for chart in charts(read_run(live_run(tmp_path)))}
    assert found["Loss, nats a token"]["mean over ranks"] == pytest.approx({1: 4.4, 2: 4.3, 3: 4.2})
    assert found["Gradient norm, over all ranks"]["2-norm of the mean"][1] == pytest.approx(math.sqrt(0.5))
    assert found["Step time by phase, ms, slowest rank"]["optimizer"][1] == pytest.approx(2.0)
    assert found["Tokens a second, all ranks"]["tokens"][1] == pytest.approx(16 / 0.004)
    assert found["Memory a rank, KiB: largest and mean over ranks"] == {
        "params, max": {1: 2.0},
        "params, mean": {1: 1.5},
    }


@pytest.mark.slow
def test_tensorboard_reads_back_every_point_of_every_curve(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="events are written and read by the extra tensorboard")
    pytest.importorskip("matplotlib", reason="the page is drawn by the extra report")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "events"
    assert run_report.run(command(f"{live_run(tmp_path)} --tensorboard {folder}")) == 0
    found = EventAccumulator(str(folder)).Reload()
    wanted = {f"{c.title}/{name}": line for c in charts(read_run(tmp_path)) for name, line in c.lines.items()}
    finite = {tag: {s: v for s, v in line.items() if math.isfinite(v)} for tag, line in wanted.items()}
    shown = {tag: {e.step: e.value for e in found.Scalars(tag)} for tag in found.Tags()["scalars"]}
    assert shown == {tag: pytest.approx(line) for tag, line in finite.items()}


def test_a_folder_with_events_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "events.out").touch()
    with pytest.raises(UsageError, match=r"tensorboard is '.*events', which holds 'events\.out', but should be a new"):
        run_report.run(command(f"{live_run(tmp_path)} --tensorboard {tmp_path / 'events'}"))
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_run_killed_in_the_middle_of_a_line_is_read_up_to_the_last_whole_step(tmp_path: Path, cut: int) -> None:
    live_run(tmp_path, reached=(3, 2), tail=to_line(record(4, 0))[:cut])
    assert read_run(tmp_path).steps == [0, 1, 2]


def test_a_finished_trace_is_preferred(tmp_path: Path) -> None:
    Trace({"implementation": "minigpt_dist"}, [record(s, 0) for s in range(6)]).write(tmp_path / "trace.jsonl")
    assert read_run(live_run(tmp_path)).steps == list(range(6))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "holds neither trace.jsonl nor metrics-rank"),
        ({"metrics-rank0.jsonl": ""}, "holds no complete record yet"),
        (
            {"metrics-rank0.jsonl": "nonsense\n"},
            "metrics-rank0.jsonl line 1 is 'nonsense', but should be one trace record",
        ),
        ({"trace.jsonl": "{}\n{"}, "trace.jsonl line 1 is '{}', but should be one trace record"),
    ],
)
def test_what_is_no_run_is_refused_in_one_line(tmp_path: Path, files: dict[str, str], said: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=said):
        run_report.run(command(str(tmp_path)))
