"""The ledger records what a rank asks of `torch.distributed`, once, from where, and changes nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from minigpt_dist.launch import RankError, World, ledger
from minigpt_dist.launch.mirror import SLOTS, Mirror, create_mirror, read_mirror

A, B = torch.ones(3), torch.ones(6)


def empties() -> list[torch.Tensor]:
    return [torch.empty(3), torch.empty(3)]


def only_first(values: list[torch.Tensor]) -> list[torch.Tensor] | None:
    return values if dist.get_rank() == 0 else None


def exchange(peer: int) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, A, peer), dist.P2POp(dist.irecv, torch.empty(3), peer)]):
        work.wait()


# op -> a call of it, with the other rank of two as its argument, and the dtype, numel and peer to be recorded.
CALLS: dict[str, tuple[Callable[[int], object], tuple[str | None, int, int | None]]] = {
    "all_reduce": (lambda _: dist.all_reduce(A.bfloat16()), ("bfloat16", 3, None)),
    "all_gather": (lambda _: dist.all_gather(empties(), A), ("float32", 3, None)),
    "all_gather_into_tensor": (lambda _: dist.all_gather_into_tensor(torch.empty(6), A), ("float32", 3, None)),
    "reduce_scatter": (lambda _: dist.reduce_scatter(torch.empty(3), [A, A]), ("float32", 6, None)),
    "reduce_scatter_tensor": (lambda _: dist.reduce_scatter_tensor(torch.empty(3), B), ("float32", 6, None)),
    "all_to_all": (lambda _: dist.all_to_all(empties(), [A, A]), ("float32", 6, None)),
    "all_to_all_single": (lambda _: dist.all_to_all_single(torch.empty(6), input=B), ("float32", 6, None)),
    "broadcast": (lambda _: dist.broadcast(A.clone(), src=0), ("float32", 3, 0)),
    "reduce": (lambda _: dist.reduce(A.clone(), dst=1), ("float32", 3, 1)),
    "gather": (lambda _: dist.gather(A, only_first(empties()), dst=0), ("float32", 3, 0)),
    "scatter": (lambda _: dist.scatter(torch.empty(3), only_first([A, A]), src=0), ("float32", 3, 0)),
    "batch_isend_irecv": (exchange, ("float32", 3, None)),
    "barrier": (lambda _: dist.barrier(), (None, 0, None)),
    "monitored_barrier": (lambda _: dist.monitored_barrier(), (None, 0, None)),
    "all_gather_object": (lambda peer: dist.all_gather_object([None, None], peer), (None, 0, None)),
    "broadcast_object_list": (lambda peer: dist.broadcast_object_list([peer], src=0), (None, 0, 0)),
    "new_group": (lambda _: dist.new_group([0, 1]), (None, 0, None)),
}


LATER_IN_GLOO = ("reduce_scatter", "all_to_all")  # gloo of torch 2.6, the oldest release supported, lacks these two


def recorded(op: str) -> list[dict[str, Any]]:
    ledger.clear()
    CALLS[op][0](1 - dist.get_rank())
    return ledger.entries()


def recorded_pair() -> list[dict[str, Any]]:
    """Rank 0 sends, rank 1 receives."""
    if dist.get_rank() == 0:
        dist.send(A, 1)
    else:
        dist.recv(torch.empty(3), 0)
    return ledger.entries()


def asynchronous() -> list[bool]:
    done = []
    work = dist.all_reduce(torch.ones(1 << 16), async_op=True)
    dist.barrier()
    work.wait()
    done.append(ledger.entries()[0]["done"])
    partner = 1 - dist.get_rank()
    work = dist.irecv(torch.empty(3), partner)
    done.append(ledger.entries()[-1]["done"])
    dist.send(A, partner)
    work.wait()
    return [*done, all(entry["done"] for entry in ledger.entries())]


def on_a_subgroup() -> list[list[int]]:
    group = dist.new_group([1])
    dist.all_reduce(A.clone(), group=group)
    return [entry["group"] for entry in ledger.entries()]


def refused() -> tuple[str, bool]:
    try:
        dist.all_reduce("no tensor")
    except TypeError as error:
        return type(error).__name__, ledger.entries()[0]["done"]
    return "accepted", True


def installed_twice() -> tuple[int, bool, bool]:
    before = dist.all_reduce
    ledger.install()
    dist.all_reduce(A.clone())
    return len(ledger.entries()), dist.all_reduce is before, dist.all_reduce is c10d.all_reduce


def same_as_unrecorded() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the recorded functions and the originals beneath them make of the same input."""
    raw = inspect.unwrap(dist.all_reduce, stop=lambda f: not hasattr(f, "_ledger"))
    results = []
    for function in (dist.all_reduce, raw):
        tensor = torch.arange(5.0) * (dist.get_rank() + 1)
        assert function(tensor, op=dist.ReduceOp.MAX) is None
        results.append(tensor)
    return [(results[0], results[1])]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(2) as world:
        yield world


@pytest.mark.parametrize("op", CALLS)
def test_a_call_is_recorded_once_with_its_payload_and_site(op: str, world: World) -> None:
    function, (dtype, numel, peer) = CALLS[op]
    line = function.__code__.co_firstlineno + (op == "batch_isend_irecv")
    size = getattr(torch, dtype).itemsize * numel if dtype else 0
    expected = {"op": op, "group": [0, 1], "dtype": dtype, "numel": numel, "bytes": size, "peer": peer, "done": True}
    try:
        seen = world.run(recorded, op)
    except RankError as error:
        if op not in LATER_IN_GLOO or "does not support" not in error.message:
            raise
        pytest.skip(f"gloo of torch {torch.__version__} has no {op}")
    assert seen == [[{**expected, "site": f"{__file__}:{line}"}]] * 2


def test_sends_and_receives_name_their_partner(world: World) -> None:
    [sent], [received] = world.run(recorded_pair)
    assert (sent["op"], sent["peer"], sent["numel"]) == ("send", 1, 3)
    assert (received["op"], received["peer"], received["numel"]) == ("recv", 0, 3)


def test_an_asynchronous_call_is_done_when_its_work_is(world: World) -> None:
    results = world.run(asynchronous)
    assert [(after_wait, at_the_end) for after_wait, _, at_the_end in results] == [(True, True)] * 2
    assert not all(before for _, before, _ in results)  # the rank that looked first, looked before the other had sent


def test_the_group_is_recorded_by_its_global_ranks(world: World) -> None:
    assert world.run(on_a_subgroup) == [[[1], []], [[1], [1]]]


def test_a_refused_call_raises_as_before_and_is_not_done(world: World) -> None:
    assert world.run(refused) == [("TypeError", False)] * 2


def test_installing_again_changes_nothing(world: World) -> None:
    assert world.run(installed_twice) == [(1, True, True)] * 2


def test_results_are_those_of_the_functions_beneath(world: World) -> None:
    for [(seen, expected)] in world.run(same_as_unrecorded):
        assert torch.equal(seen, expected)


def test_a_run_starts_with_an_empty_ledger(world: World) -> None:
    assert world.run(ledger.entries) == [[], []]


@pytest.fixture
def mirror(tmp_path: Path) -> tuple[int, Mirror]:
    fd = create_mirror(tmp_path / "ledger")
    return fd, Mirror(tmp_path / "ledger")


def test_the_mirror_keeps_the_last_calls_and_counts_all(mirror: tuple[int, Mirror]) -> None:
    fd, writer = mirror
    for index in range(SLOTS + 3):
        writer.write(index, f"op{index}", "file.py:1", "on ranks [0]")
    total, calls = read_mirror(fd)
    assert total == SLOTS + 3
    assert [call.op for call in calls] == [f"op{index}" for index in range(3, SLOTS + 3)]


def test_the_mirror_does_not_mark_a_call_that_has_left_it(mirror: tuple[int, Mirror]) -> None:
    fd, writer = mirror
    for index in range(SLOTS + 1):
        writer.write(index, "op", "file.py:1", "")
    writer.mark(0, b"D")
    assert all(call.blocks for call in read_mirror(fd)[1])


def test_the_mirror_shortens_long_paths_from_the_left(mirror: tuple[int, Mirror]) -> None:
    fd, writer = mirror
    writer.write(0, "op", "x" * 1000 + "/file.py:17", "detail")
    [call] = read_mirror(fd)[1]
    assert (call.op, call.site[-11:], call.detail) == ("op", "/file.py:17", "detail")


def test_a_mirror_that_its_rank_has_spoilt_is_read_as_nothing(tmp_path: Path) -> None:
    fd = create_mirror(tmp_path / "ledger")
    (tmp_path / "ledger").write_bytes(b"\x00\xff" * 20)
    assert read_mirror(fd)[1] == []
