"""`minigpt-dist memory`: every kind of every rank is what the sizes foretell, to the byte, and a difference is said."""

from __future__ import annotations

import re

import pytest

from minigpt_dist.__main__ import main
from minigpt_dist.bench import memory
from minigpt_dist.config import ModelConfig


def command(line: str) -> int:
    return main(["memory", *line.split()])


def table(out: str) -> dict[str, list[int]]:
    rows = re.findall(r"^(\d+|max|mean|foretold) +((?:[\d,]+ *)+)$", out, re.MULTILINE)
    return {name: [int(n.replace(",", "")) for n in numbers.split()] for name, numbers in rows}


def test_every_rank_holds_what_was_foretold(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--world-size 3 --micro-batches 2 --batch 1 --num-layers 1") == 0
    rows = table(capsys.readouterr().out)
    padded = 3 * -(-ModelConfig(num_layers=1).numel() // 3)
    assert rows["0"] == rows["1"] == rows["2"] == rows["max"] == rows["mean"] == rows["foretold"]
    assert rows["0"][:3] == [4 * padded, 4 * padded, 4 * padded]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("sizes", ["--world-size 1", "--world-size 4 --tie-head --seq-len 9 --embed-dim 20 --vocab 31"])
def test_so_it_is_for_other_sizes_and_types(sizes: str, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(f"{sizes} --dtype {dtype}") == 0


def test_a_rank_that_holds_more_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    held = [memory.predicted(ModelConfig(), 2, 4, "float32") for _ in range(2)]
    held[1]["grads"] += 4
    monkeypatch.setattr(memory, "measured", lambda *_: held)
    assert command("--world-size 2") == 1
    out = capsys.readouterr().out
    assert "rank 1 holds 119,300 bytes of grads, but should hold 119,296" in out
    assert table(out)["max"][1] == 119_300
    assert table(out)["mean"][1] == 119_298


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--world-size 0", "world_size is 0, but should be a whole number of at least 1"),
        ("--dtype float8", "dtype is 'float8', but should be one of float32, float64, bfloat16, float16"),
        ("--embed-dim 30", "embed_dim is 30, but should be a multiple of num_heads (4)"),
        ("--deadline nan", "deadline is nan, but should be a positive, finite number of seconds"),
    ],
)
def test_a_wrong_command_line_is_told_before_a_rank_starts(
    line: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "run_world", None)
    assert command(line) == 2
    assert capsys.readouterr().err == f"minigpt-dist: {said}\n"
