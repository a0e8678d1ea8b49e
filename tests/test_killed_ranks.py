"""A rank that is killed in the middle of a piece's work ends the others in time, and is named."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from minigpt_dist.guard import Guard
from minigpt_dist.launch import RankDied, run_world
from minigpt_dist.parallel.data_parallel import DistributedDataParallel
from minigpt_dist.parallel.p2p import Peers, direct, ring, tree
from minigpt_dist.parallel.p2p.peers import Posted
from minigpt_dist.parallel.pipeline import Pipeline, one_f_one_b

pytestmark = pytest.mark.slow
N = 3
VALUES = [torch.ones(2) for _ in range(N)]
WORK: dict[str, Callable[[Peers], object]] = {
    "ring all-reduce": lambda peers: ring.all_reduce(torch.ones(1000), peers),
    "reduce-scatter": lambda peers: ring.reduce_scatter(torch.ones(6), [0, 2, 4, 6], peers),
    "all-gather": lambda peers: ring.all_gather(torch.ones(6), [0, 2, 4, 6], peers),
    "tree broadcast": lambda peers: tree.broadcast(torch.ones(6), 0, peers),
    "tree all-reduce": lambda peers: tree.all_reduce(torch.ones(6), peers),
    "all-to-all": lambda peers: direct.all_to_all(VALUES, [v.clone() for v in VALUES], peers),
    "pipeline": lambda peers: pipeline(peers),
}


class Killed(Peers):
    """On rank 1, the first exchange after `alive` ones is its end."""

    alive = 0

    def post(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> Posted:
        if self.rank == 1 and self.alive == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.alive -= 1
        return super().post(sends, receives)


def pipeline(peers: Peers) -> None:
    stages = {peers.rank: nn.Linear(2, 2)}
    pipe = Pipeline(stages, one_f_one_b(N, 4), nn.functional.mse_loss, (1, 2), torch.float32, peers)
    pipe.step([torch.ones(1, 2)] * 4, [torch.ones(1, 2)] * 4)


def killed_body(name: str, alive: int) -> None:
    peers = Killed(timeout_s=20)
    peers.alive = alive
    WORK[name](peers)
    dist.barrier()


# A leaf of the tree makes one exchange: it has no second one to be killed in.
@pytest.mark.parametrize(("name", "alive"), [(n, k) for n in WORK for k in (0, 1) if (n, k) != ("tree broadcast", 1)])
def test_a_rank_killed_in_an_exchange_is_named(name: str, alive: int) -> None:
    with pytest.raises(RankDied, match="rank 1"):
        run_world(killed_body, N, name, alive, deadline_s=15)


def backward_body() -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), bucket_mb=1e-5)
    if dist.get_rank() == 1:
        first = next(model.parameters())
        first.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    model(torch.ones(1, 4)).sum().backward()


def guard_body() -> None:
    guard = Guard()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    guard.ask(1.0, [torch.ones(3)])
    guard.answer(1)


@pytest.mark.parametrize("body", [backward_body, guard_body])
def test_a_rank_killed_in_backward_or_before_the_guards_question_is_named(body: Callable[[], None]) -> None:
    with pytest.raises(RankDied, match="rank 1"):
        run_world(body, N, deadline_s=15)
