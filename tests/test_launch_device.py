"""Devices and back ends are chosen by what the machine shows; a launcher's world is joined and left in order."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minigpt_dist.launch import attach_elastic, choose_backend, choose_device, ledger, run_world, under_torchrun

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # port 0: any free one


def join_and_leave(fails: bool) -> tuple[Any, ...]:
    """Leave this world for one that the environment describes, and that one too."""
    dist.destroy_process_group()
    os.environ.update(LAUNCHED)
    torch.set_num_threads(2)
    inside: list[Any] = []
    try:
        with attach_elastic(timeout_s=60.0) as (rank, world_size):
            inside = [rank, world_size, dist.get_backend(), torch.get_num_threads()]
            dist.all_reduce(torch.ones(2))
            if fails:
                raise RuntimeError("inside")
    except RuntimeError as error:
        inside.append(str(error))
    return (*inside, [entry["op"] for entry in ledger.entries()][1:], dist.is_initialized())


def test_a_launchers_world_is_joined_and_left() -> None:
    assert run_world(join_and_leave, 1, False) == [(0, 1, "gloo", 1, ["all_reduce", "barrier"], False)]


def test_a_launchers_world_is_left_at_once_on_an_error() -> None:
    assert run_world(join_and_leave, 1, True) == [(0, 1, "gloo", 1, "inside", ["all_reduce"], False)]


def test_without_a_launcher_there_is_nothing_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    assert not under_torchrun()
    with (
        pytest.raises(ValueError, match="the environment lacks RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        attach_elastic(),
    ):
        pass


def test_a_launcher_is_known_by_the_place_it_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    assert under_torchrun()
    with pytest.raises(ValueError, match="timeout_s is 0, expected a positive"), attach_elastic(timeout_s=0):
        pass


@pytest.mark.parametrize("device, backend", [("cpu", "gloo"), ("cuda", "nccl"), ("cuda:1", "nccl")])
def test_the_back_end_suits_the_device(device: str, backend: str) -> None:
    assert choose_backend(device) == backend


def test_a_device_without_a_back_end_is_refused() -> None:
    with pytest.raises(ValueError, match="device is 'meta', expected cpu or cuda"):
        choose_backend("meta")


@pytest.mark.parametrize(
    "requested, devices, ranks_here, chosen",
    [
        ("cpu", 4, 4, "cpu"),
        ("auto", 0, 4, "cpu"),
        ("auto", 2, 4, "cpu"),
        ("auto", 4, 4, "cuda:1"),
        ("cuda", 2, 4, "cuda:1"),
    ],
)
def test_the_device_is_a_ranks_own_or_the_cpu_for_all(
    monkeypatch: pytest.MonkeyPatch, requested: str, devices: int, ranks_here: int, chosen: str
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_here))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    assert choose_device(requested, 5) == chosen


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="rank 1 needs CUDA device 1, but this machine shows 1"):
        choose_device("cuda", 1)
    with pytest.raises(ValueError, match="device is 'tpu', expected auto, cpu or cuda"):
        choose_device("tpu", 0)
