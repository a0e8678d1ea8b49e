"""`minigpt-dist agree`: what the table says of each stack is so, and a stack that is not right is told."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from minigpt_dist.__main__ import main
from minigpt_dist.bench import stacks
from minigpt_dist.bench.stacks import DDP, FSDP2, ONE, ZERO1, ZERO2, ZERO3, ZRO, Row, compare_stacks
from minigpt_dist.config import ModelConfig
from minigpt_dist.model import MiniGPT
from minigpt_dist.verify.peers import PEERS, unavailable
from minigpt_dist.verify.peers.traits import optimizer_bytes

P = ModelConfig().numel()
SHAPES = {name: tuple(p.shape) for name, p in MiniGPT().named_parameters()}
NOTHING = {"float32": 0.0, "float64": 0.0}
RIGHT = Row(ZERO1, [4.0, 3.0], {"params": 4, "grads": 4, "optimizer": 4}, NOTHING, NOTHING, ("ranks",))
WORLD_SIZES = [3, 4]

slow = pytest.mark.slow


def command(line: str) -> int:
    return main(["agree", *line.split()])


@functools.lru_cache
def table(world_size: int) -> dict[str, Row]:
    chosen = tuple(stack for stack in stacks.TIMED if not unavailable(f"peer:{stacks.PEER_OF.get(stack, 'torch-ddp')}"))
    return {row.stack: row for row in compare_stacks("tiny", world_size, 6, 120.0, chosen)}


@slow
def test_our_zero_3_has_the_losses_and_bits_of_one_process_in_both_types() -> None:
    one, ours = compare_stacks("tiny", 3, 2, 60.0, (ZERO3,))
    assert (ours.losses, ours.loss_apart, ours.param_apart) == (one.losses, NOTHING, NOTHING)
    assert ours.same_bits == ("ranks",)


@slow
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("stack", [ZERO1, ZERO2, ZERO3])
def test_each_stage_of_ours_is_one_process_bit_for_bit(stack: str, world_size: int) -> None:
    row = table(world_size)[stack]
    assert (row.losses, row.loss_apart, row.param_apart) == (table(world_size)[ONE].losses, NOTHING, NOTHING)
    assert row.same_bits == ("ranks",)


@slow
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("stack", [DDP, ZRO, FSDP2])
def test_each_of_torchs_stacks_has_the_bits_of_its_own_order_and_no_other(stack: str, world_size: int) -> None:
    if stack not in table(world_size):
        # FSDP2's module is not in every torch that is supported; the reason names what is absent.
        pytest.skip(unavailable(f"peer:{stacks.PEER_OF[stack]}"))
    row = table(world_size)[stack]
    assert row.same_bits == (PEERS[stacks.PEER_OF[stack]].traits.order,)
    assert 0 < row.param_apart["float64"] <= 1e-13
    assert 0 < row.param_apart["float32"] <= 1e-5


@slow
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_bytes_are_those_of_each_stacks_own_rule(world_size: int) -> None:
    share = 12 * -(-P // world_size)
    padded = 4 * world_size * -(-P // world_size)
    found = {stack: tuple(row.bytes.values()) for stack, row in table(world_size).items() if row.bytes}
    assert found[ZERO1] == (padded, padded, share)
    assert found[ZERO2] == (padded, 0, share)
    assert (found[ZERO3][1], found[ZERO3][2]) == (0, share)
    assert found[ZERO3][0] < 100  # the empty parameters' own
    for stack in (DDP, ZRO):
        state = max(optimizer_bytes(PEERS[stacks.PEER_OF[stack]].traits, SHAPES, world_size))
        assert found[stack] == (4 * P, 4 * P, state)


@slow
def test_the_command_prints_a_row_a_stack_and_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--world-size 2 --steps 2 --rounds 1") == 0
    said = capsys.readouterr().out
    assert [said.count(f"\n{stack} ") for stack in (ONE, *stacks.TIMED)] == [1, *[2] * len(stacks.TIMED)]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            replace(RIGHT, same_bits=()),
            "ours, ZeRO-1: the bits are those of no order, but should be those of rank order",
        ),
        (
            replace(RIGHT, param_apart={**NOTHING, "float64": 1e-3}),
            "parameters are 1.0e-03 apart in float64, but should be at most 1e-11",
        ),
        (
            replace(RIGHT, loss_apart={**NOTHING, "float32": float("nan")}),
            "losses are nan apart in float32, but should be at most 0.001",
        ),
    ],
)
def test_a_stack_that_is_not_right_is_told(
    wrong: Row, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "compare_stacks", lambda *_: [RIGHT, wrong])
    assert command("--rounds 0") == 1
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--world-size 0", "world_size is 0, but should be a whole number of at least 1"),
        ("--size huge", "size is 'huge', but should be one of tiny, medium"),
        ("--rounds -1", "rounds is -1, but should be a whole number of at least 0"),
    ],
)
def test_a_wrong_command_line_is_told_before_a_rank_starts(
    line: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "run_world", None)
    assert command(line) == 2
    assert capsys.readouterr().err == f"minigpt-dist: {said}\n"
