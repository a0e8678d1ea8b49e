"""`minigpt-dist plan`: a table or JSON of what fits and why the rest does not; a saved plan trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minigpt_dist.__main__ import main
from minigpt_dist.cli import train
from minigpt_dist.cli.quantities import bandwidth, size, told
from minigpt_dist.cli.settings import read_settings
from minigpt_dist.cli.usage import Parser, UsageError
from minigpt_dist.layout import Layout

TINY = "plan --architecture minigpt --layers 2 --hidden 32 --heads 4 --vocab 64 --seq 16 --gpus 2 --gpu-memory 1MB --global-batch 8"
ONE_AXIS = "--tp 1 --pp 1 --zero 1 --recompute no"
BLOOM = "plan --params 176e9 --layers 70 --hidden 14336 --heads 112 --seq 2048 --gpus 384 --gpu-memory 80GB"


@pytest.fixture
def saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A plan of two data-parallel ranks."""
    assert main([*f"{TINY} {ONE_AXIS} --micro-batch 2".split(), "--out", str(tmp_path / "plan.json")]) == 0
    assert capsys.readouterr().out.endswith(f"the first is kept in {tmp_path / 'plan.json'}\n")
    return tmp_path / "plan.json"


def edited(path: Path, **changes: Any) -> str:
    """The plan with some fields replaced, wherever they stand, as a file beside it."""
    content = json.loads(path.read_text())
    for name, value in changes.items():
        place = next(part for part in (content, content["layout"], content["model"]) if name in part)
        place[name] = value
    (path.parent / "edited.json").write_text(json.dumps(content))
    return str(path.parent / "edited.json")


def test_the_table_shows_what_fits_fastest_first_then_why_the_rest_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BLOOM.split(), "--top", "3"]) == 0
    header, *_, refused = out = capsys.readouterr().out.split("\n\n")
    assert header.startswith(
        "P = 176,000,004,096 (70 blocks, width 14336, 112 heads, vocabulary 231586), 3072 sequences of 2048"
    )
    rows = out[1].splitlines()[3:]
    assert ([row.split()[0] for row in rows], {len(row) for row in rows}) == (["1", "2", "3"], {len(rows[0])})
    counts = [int(line.split()[0].replace(",", "")) for line in refused.splitlines()[1:]]
    assert (counts, sum(counts)) == (
        sorted(counts, reverse=True),
        int(refused.splitlines()[0].split(": ")[1].replace(",", "")),
    )


def test_json_holds_every_layout_with_bytes_by_kind_and_axis(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    first = found["feasible"][0]
    assert set(first["memory_bytes"]) == {"params", "grads", "optimizer", "activations", "buffers", "total"}
    assert set(first["communication_bytes"]) == {"dp", "tp", "pp"}
    assert all(set(failure) == {"reason", "example", "count"} for failure in found["refused"])


def test_nothing_that_fits_exits_one_and_saves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY.replace("1MB", "1KB").split(), "--out", str(tmp_path / "plan.json")]) == 1
    assert "memory of a rank" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_saved_plan_trains(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--plan", str(saved), "--steps", "2", "--checkpoint-step", "0"]) == 0
    out = capsys.readouterr().out
    assert "2 ranks (gloo, cpu), 2 steps, P = 29,824 parameters of float32" in out
    assert "0     119,296  119,296    178,944" in out


def test_a_run_takes_every_number_of_its_plan(saved: Path) -> None:
    parser = Parser()
    train.add_arguments(parser)
    layout = {"precision": "bfloat16", "micro_batches": 3, "zero_stage": 3, "offload": "disk", "recompute": True}
    config = read_settings(parser.parse_args(["--plan", edited(saved, **layout, batch=5, seq_len=8)]), None).config
    assert (config.world_size, config.micro_batches, config.batch, config.dtype) == (2, 3, 5, "bfloat16")
    assert (config.zero_stage, config.offload, config.recompute) == (3, "disk", True)
    assert (config.model.seq_len, config.model.tie_head) == (8, False)
    pipeline = parser.parse_args(["--plan", edited(saved, pp=3, tp=2, schedule="gpipe")])
    assert read_settings(pipeline, None).config.layout == Layout(dp=2, tp=2, pp=3, schedule="gpipe", micro_batches=2)


@pytest.mark.parametrize(
    "changes, line",
    [
        ({"pp": 5}, "number of pipeline stages is 5, but should be at most 4: an embedding, 2 blocks and a head"),
        ({"zero_stage": 0}, "zero_stage is 0, but should be one of 1, 2, 3"),
        ({"precision": "float8"}, "precision is 'float8', but should be one of "),
        ({"architecture": "gpt"}, "architecture is 'gpt', but should be 'minigpt', the one that train has"),
        ({"architecture": "rnn"}, "architecture is 'rnn', but should be one of minigpt, gpt"),
        ({"tp": 3}, "num_heads is 4, but should be a multiple of tp (3)"),
        ({"dp": "2"}, "dp of the plan is '2', but should be of type int"),
        ({"batch": 0}, "batch is 0, but should be a whole number of at least 1"),
        ({"model": {}}, "model of the plan is {}, but should be an object of vocab, embed_dim, "),
        ({"schema": "x"}, "plan is "),
        ({"predicted": 0, "world_size": 3}, "world_size is 3, but should be 2, as in the plan"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_told_in_one_line(
    changes: dict[str, Any], line: str, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = [] if "world_size" not in changes else ["--world-size", str(changes.pop("world_size"))]
    assert main(["train", "--plan", edited(saved, **changes), *ranks]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err.startswith(f"minigpt-dist: {line}")) == ("", 1, True)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b" " * 2_000_000])
def test_a_file_that_is_no_plan_is_told_in_one_line(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    assert main(["train", "--plan", str(tmp_path / "plan.json")]) == 2
    assert capsys.readouterr().err.endswith("but should be a file of schema minigpt-dist-plan/1\n")


WRONG = {
    "--gpus 0": "gpus is 0, but should be a whole number of at least 1",
    "--gpu-memory 80G": "gpu_memory is '80G', but should be a size such as 80GB or 80GiB",
    "--gpu-memory -1": "gpu_memory is '-1', but should be a size such as 80GB or 80GiB",
    "--flops fast": "flops is 'fast', but should be a number above 0, such as 312e12",
    "--inter-node-bandwidth 25Gb/s": "inter_node_bandwidth is '25Gb/s', but should be bytes a second, such as 25GB/s",
    "--reserve 1": "reserve is 1.0, but should be in [0, 1)",
    "--heads 5": "embed_dim is 32, but should be a multiple of num_heads (5)",
    "--layers 0": "num_layers is 0, but should be a whole number of at least 1",
    "--global-batch 0": "global_batch is 0, but should be a whole number of at least 1",
    "--params 1e6": "params is 1e+06, but should be about 29,824, those of the sizes",
    "--params nan": "params is nan, but should be about 29,824, those of the sizes",
    "--architecture rnn": "architecture is 'rnn', but should be one of minigpt, gpt",
    "--tp 3": "tp is 3, but should divide the 2 devices",
    "--zero 4": "zero is '4', but should be one of 0, 1, 2, 3",
    "--zero ,": "zero is '', but should be one of 0, 1, 2, 3",
    "--precision int8": "precision is 'int8', but should be one of float32, float64, bfloat16, float16",
    "--recompute some": "recompute is 'some', but should be one of no, yes",
    "--schedule none": "schedule is 'none', but should be one of gpipe, 1f1b, interleaved",
    "--stack other": "stack is 'other', but should be one of own, megatron-2021",
    "--micro-batch 0": "micro_batch is '0', but should be whole numbers from 1, separated by commas",
    "--top 0": "top is 0, but should be a whole number of at least 1",
    "--out absent/plan.json": "out is 'absent/plan.json', but should be a file in a folder that is there",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_option_is_told_in_one_line(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*TINY.split(), *words.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err.startswith(f"minigpt-dist: {WRONG[words]}")) == ("", 1, True)


def test_a_vocabulary_is_needed_or_a_number_of_parameters_that_leaves_room_for_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = TINY.replace("--vocab 64 ", "").split()
    assert main(words) == main([*words, "--params", "100"]) == main([*words, "--params", "nan"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "minigpt-dist: vocab is not given, but should be, or params"
    assert [line.split(",")[0] for line in lines[1:]] == ["minigpt-dist: params is 100", "minigpt-dist: params is nan"]


def test_quantities_are_read_with_decimal_and_binary_units() -> None:
    assert [size("x")(text) for text in ("80GB", "80 GiB", "1.5e3", "2KB")] == [80e9, 80 * 2**30, 1500.0, 2000.0]
    assert [bandwidth("x")(text) for text in ("25GB/s", "25GB", "1e9")] == [25e9, 25e9, 1e9]
    assert [told(n) for n in (0, 999, 1500, 80e9, 999_600_000)] == ["0 B", "999 B", "1.5 KB", "80 GB", "1000 MB"]
    with pytest.raises(UsageError, match="x is '1 XB', but should be a size"):
        size("x")("1 XB")
