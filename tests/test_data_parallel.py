"""Our DistributedDataParallel: the mean gradient on every rank, exchanged during backward, whatever takes part in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from minigpt_dist.launch import RankError, World, ledger, run_world
from minigpt_dist.parallel.buckets import assign
from minigpt_dist.parallel.data_parallel import DistributedDataParallel


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(request.param, deadline_s=60) as live:
        yield live


class Net(nn.Module):
    """Three layers, a tied weight, a frozen one, one that is used only if asked for, and a buffer that counts forwards."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.extra = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.extra.bias.requires_grad_(False)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor, *, extra: bool = False) -> Tensor:
        self.get_buffer("count").add_(1)
        y = self.second(torch.tanh(self.first(x)))
        return self.extra(y) if extra else y


def data(rank: int, part: int = 0) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(rank * 10 + part), dtype=torch.float64)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def one_process(world_size: int, parts: int = 1, extra: tuple[int, ...] = ()) -> dict[str, Tensor | None]:
    """The gradient of the mean over ranks of the sum over parts; `extra` lists the ranks that use the extra layer."""
    model = Net(0).double()
    for rank in range(world_size):
        for part in range(parts):
            (model(data(rank, part), extra=rank in extra).square().mean() / world_size).backward()
    return gradients(model)


def backward_body(parts: int, extra: tuple[int, ...], bucket_mb: float) -> dict[str, Tensor | None]:
    rank = dist.get_rank()
    wrapped = DistributedDataParallel(Net(rank).double(), bucket_mb=bucket_mb)
    with wrapped.no_sync():
        for part in range(parts - 1):
            wrapped(data(rank, part), extra=rank in extra).square().mean().backward()
    wrapped(data(rank, parts - 1), extra=rank in extra).square().mean().backward()
    return gradients(wrapped.module)


def close(seen: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> bool:
    """Present and absent alike, and within float64's rounding of the sums (1e-16 seen for gradients of order 0.1)."""
    return seen.keys() == wanted.keys() and all(
        (a is None) == (b is None) and (a is None or b is None or bool((a - b).abs().max() < 1e-14))
        for a, b in ((seen[n], wanted[n]) for n in wanted)
    )


@pytest.mark.parametrize("bucket_mb", [25.0, 1e-4])
@pytest.mark.parametrize("parts", [1, 3])
def test_gradients_are_those_of_one_process(ranks: World, parts: int, bucket_mb: float) -> None:
    wanted = one_process(ranks.world_size, parts)
    assert all(close(seen, wanted) for seen in ranks.run(backward_body, parts, (), bucket_mb))


@pytest.mark.parametrize("extra", [(0,), (0, 1, 2, 3)])
def test_a_parameter_used_on_some_ranks_gets_the_mean_and_an_unused_one_none(
    ranks: World, extra: tuple[int, ...]
) -> None:
    wanted = one_process(ranks.world_size, 2, extra)
    assert all(close(seen, wanted) for seen in ranks.run(backward_body, 2, extra, 1e-4))


def beside_torch_body() -> list[bool]:
    """Five SGD steps of ours and of torch's wrapper from the same start; equal bits need one bucket in one order."""
    rank, results = dist.get_rank(), []
    ours = DistributedDataParallel(Net(0))
    theirs = nn.parallel.DistributedDataParallel(Net(0))
    for step in range(5):
        for model in (ours, theirs):
            model.zero_grad()
            model(data(rank, step).float(), extra=True).square().mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p -= 0.1 * p.grad
        pairs = zip(ours.module.parameters(), theirs.module.parameters(), strict=True)
        results.append(all(bool((a - b).abs().max() < 1e-6) for a, b in pairs))
    return results


def test_training_stays_beside_torchs_own_wrapper() -> None:
    assert run_world(beside_torch_body, 2) == [[True] * 5] * 2


def kept_gradient_body() -> list[bool]:
    """A gradient from an earlier step, of a layer that no rank uses in this one."""
    wrapped = DistributedDataParallel(Net(0))
    wrapped(torch.ones(2, 4), extra=True).sum().backward()
    before = wrapped.module.extra.weight.grad.clone()
    wrapped(torch.ones(2, 4)).sum().backward()
    return [torch.equal(wrapped.module.extra.weight.grad, before)]


def test_a_gradient_that_no_rank_adds_to_keeps_its_bits(ranks: World) -> None:
    assert ranks.run(kept_gradient_body) == [[True]] * ranks.world_size


def thrown_away_body() -> list[bool]:
    """Gradients of a backward under no_sync are thrown away before the one that counts."""
    wrapped = DistributedDataParallel(Net(0))
    with wrapped.no_sync():
        wrapped(torch.ones(2, 4), extra=True).sum().backward()
    wrapped.zero_grad(set_to_none=True)
    wrapped(torch.ones(2, 4)).sum().backward()
    seen = gradients(wrapped.module)
    fresh = DistributedDataParallel(Net(0))
    fresh(torch.ones(2, 4)).sum().backward()
    return [close({n: g}, {n: h}) for (n, g), h in zip(seen.items(), gradients(fresh.module).values(), strict=True)]


def test_a_gradient_that_was_thrown_away_does_not_come_back(ranks: World) -> None:
    assert all(all(seen) for seen in ranks.run(thrown_away_body))


def order_body() -> list[str]:
    """What happens in one backward, in order: gradients that arrive, and exchanges that start."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    wrapped = DistributedDataParallel(model, bucket_mb=64 / 2**20)
    events: list[str] = []
    for i, p in enumerate(model.parameters()):
        p.register_post_accumulate_grad_hook(
            lambda _, i=i: events.append(f"{i}:{sum(e['op'] == 'all_reduce' for e in ledger.entries())}")
        )
    ledger.clear()
    wrapped(torch.ones(1, 4)).sum().backward()
    return events


def test_exchanges_start_while_backward_goes_on() -> None:
    assert run_world(order_body, 2) == [["3:1", "2:2", "1:3", "0:4"]] * 2


def buffers_body() -> list[float]:
    """The buffer of every rank after construction over different ones, and after each of two forwards."""
    model = Net(0)
    model.count.fill_(float(dist.get_rank()))
    wrapped = DistributedDataParallel(model)
    seen = [float(model.count)]
    for _ in range(2):
        wrapped(torch.ones(1, 4))
        seen.append(float(model.count))
        model.count.add_(dist.get_rank())
    return seen


def test_buffers_are_rank_0s_at_construction_and_before_each_forward(ranks: World) -> None:
    assert ranks.run(buffers_body) == [[0.0, 1.0, 2.0]] * ranks.world_size


def meta_body() -> dict[str, Any]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    torch.manual_seed(dist.get_rank())
    wrapped = DistributedDataParallel(model)
    return {"values": [p.detach().clone() for p in wrapped.parameters()], "std": float(model[0].weight.std())}


def test_a_module_on_meta_is_made_and_equal_on_all_ranks(ranks: World) -> None:
    results = ranks.run(meta_body)
    assert all(torch.equal(a, b) for r in results for a, b in zip(r["values"], results[0]["values"], strict=True))
    assert results[0]["std"] > 0


class Unfillable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(2, device="meta"))


def refused_body(name: str) -> str:
    wrapped = DistributedDataParallel(Net(0))
    calls: dict[str, Callable[[], object]] = {
        "meta": lambda: DistributedDataParallel(nn.Sequential(Unfillable())),
        "bucket": lambda: DistributedDataParallel(Net(0), bucket_mb=0),
        "sizes": lambda: DistributedDataParallel(nn.Linear(2, 2 + dist.get_rank())),
        "thawed": lambda: (wrapped.module.extra.bias.requires_grad_(True), wrapped(torch.ones(1, 4))),
    }
    try:
        calls[name]()
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("meta", "0 is on the meta device, but should have a reset_parameters to be filled by"),
        ("bucket", "bucket_mb is 0, but should be above 0"),
        (
            "sizes",
            "a tensor of rank 1 is weight (3, 2) torch.float32, but should be weight (2, 2) torch.float32, as on rank 0",
        ),
        ("thawed", "requires_grad of extra.bias changed, but should be as when the module was wrapped"),
    ],
)
def test_a_wrong_use_is_refused_on_all_ranks(name: str, said: str) -> None:
    assert run_world(refused_body, 2, name) == [said] * 2


def dying_backward_body() -> None:
    wrapped = DistributedDataParallel(Net(0))
    if dist.get_rank() == 1:
        raise RuntimeError("out of memory, say")
    wrapped(torch.ones(1, 4)).sum().backward()


def test_a_rank_that_fails_in_its_step_ends_the_others_and_is_named() -> None:
    with pytest.raises(RankError, match="rank 1 raised RuntimeError: out of memory, say"):
        run_world(dying_backward_body, 2, deadline_s=30)


def test_buckets_follow_backward_and_keep_dtypes_apart() -> None:
    params = [
        nn.Parameter(torch.zeros(n, dtype=d)) for n, d in ((4, torch.float32), (4, torch.float64), (2, torch.float32))
    ]
    assert assign(params, 24) == [[2, 0], [1]]
    assert assign(params, 16) == [[2], [1], [0]]
