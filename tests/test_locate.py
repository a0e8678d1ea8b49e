"""Localisation: the first difference of a run, named at its step, rank, stage, tensor and cause."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.adamw import adamw

from minigpt_dist.config import ModelConfig, TrainConfig
from minigpt_dist.launch import World
from minigpt_dist.verify.capture import Shot, leaves_of, read_shots, write_shots
from minigpt_dist.verify.difference import Difference, bits_differ, difference, max_ulp
from minigpt_dist.verify.locate import locate
from minigpt_dist.verify.locate_cause import shape_of
from minigpt_dist.verify.locate_oracle import Names, Teacher, even_owner
from minigpt_dist.verify.locate_run import Recomputed, Run, indexed, observed_body, recompute_body

pytestmark = pytest.mark.slow

# 1,485 parameters, which 2 ranks do not divide; a block of 17 tokens out of 19, so that ranks read different ones.
SMALL = ModelConfig(vocab=19, embed_dim=9, num_heads=3, num_layers=1, seq_len=8)
CONFIG = TrainConfig(world_size=2, steps=3, checkpoint_step=0, batch=2, model=SMALL)


class Bench:
    """Worlds kept alive between runs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.worlds = folder, dict[int, World]()

    def ranks(self, N: int) -> World:
        return self.worlds.setdefault(N, World(N))

    def observe(self, spec: str, config: TrainConfig) -> Run:
        plain, N = config.to_dict(), config.world_size
        run = Run(config, indexed(self.ranks(N).run(observed_body, spec, [], plain, str(self.folder), False)))
        if config.checkpoint_step:
            run.resumed = indexed(self.ranks(N).run(observed_body, spec, [], plain, str(self.folder), True))
        return run

    def oracle(self, spec: str, run: Run) -> Recomputed:
        asked = [(step, rank) for step in run.steps[1:] for rank in run.ranks]
        rows = [(step, rank, run.shots[step - 1, rank].get("params")) for step, rank in asked]
        first, *found = self.ranks(1).run(recompute_body, spec, [], run.config.to_dict(), rows)[0]
        return Recomputed(first["initial"], dict(zip(asked, found, strict=True)))

    def judge(self, spec: str, config: TrainConfig) -> Difference | None:
        run = self.observe(spec, config)
        return locate(run, self.oracle(spec, run))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("runs"))
    yield made
    for world in made.worlds.values():
        world.close()


CORRECT: dict[str, tuple[str, dict[str, Any]]] = {
    "ours": ("minigpt_dist", {}),
    "ours, micro-batches, decay": ("minigpt_dist", {"micro_batches": 2, "weight_decay": 0.1}),
    "ours, exact": ("minigpt_dist", {"reduction": "exact", "micro_batches": 2}),
    "ours, float64": ("minigpt_dist", {"dtype": "float64"}),
    "ours, alone, dropout": ("minigpt_dist", {"world_size": 1, "model": replace(SMALL, dropout=0.1)}),
    "plain": ("fault:none", {"world_size": 3}),
    "plain, other options": ("fault:none", {"betas": (0.5, 0.9), "eps": 1e-6, "weight_decay": 0.1}),
}


@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_run_has_no_difference(name: str, bench: Bench) -> None:
    spec, options = CORRECT[name]
    assert bench.judge(spec, replace(CONFIG, checkpoint_step=2, **options)) is None


FAULTS = {
    "replicas-start-different": (0, 1, "broadcast", "tok_embed.weight", "not the one that rank 0 started with"),
    "zero-grad-forgotten": (2, 0, "backward", "tok_embed.weight", "zero_grad is missing"),
    "zero-grad-clears-owned-parameters-only": (2, 0, "backward", "tok_embed.weight", "zero_grad clears only some"),
    "sum-instead-of-mean": (1, 0, "reduce", "tok_embed.weight", "a factor N = 2: summed, but not divided"),
    "averaged-twice": (1, 0, "reduce", "tok_embed.weight", "a factor 1/N = 1/2"),
    "nothing-is-reduced": (1, 0, "reduce", "tok_embed.weight", "the owner of each slice uses its own gradient"),
    "only-rank-0-counts": (1, 0, "reduce", "tok_embed.weight", "only rank 0's gradient counts"),
    "gradients-shifted-by-one": (1, 0, "reduce", "tok_embed.weight", "shifted by 1 element back"),
    "last-element-gets-the-pad": (1, 0, "reduce", "head.weight", "only the last element (1): padding"),
    "dummy-step-counts": (1, 0, "optimizer", "tok_embed.weight", "bias is corrected as at step 2"),
    "eps-inside-the-root": (1, 0, "optimizer", "tok_embed.weight", "eps is added inside the root"),
    "betas-exchanged": (2, 0, "optimizer", "tok_embed.weight", "betas are exchanged"),
    "moments-forgotten-each-step": (
        2,
        0,
        "optimizer",
        "tok_embed.weight",
        "the moments of earlier steps are forgotten",
    ),
    "sign-of-the-update": (1, 0, "optimizer", "tok_embed.weight", "the wrong sign"),
    "gathered-before-the-update": (1, 0, "gather", "tok_embed.weight", "equal to the value before the step (stale)"),
    "nothing-is-gathered": (1, 0, "gather", "blocks.0.mlp.0.weight", "only in the slice that rank 1 owns"),
    "save-consumes-the-moments": (1, 0, "save", "exp_avg", "asking changes the state"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_at_its_step_rank_stage_and_tensor(name: str, bench: Bench) -> None:
    found = bench.judge(f"fault:{name}", CONFIG)
    assert found is not None
    assert (found.step, found.rank, found.stage, found.tensor) == FAULTS[name][:4]
    assert FAULTS[name][4] in found.cause


def test_a_fault_of_loading_is_named_where_the_run_goes_on(bench: Bench) -> None:
    found = bench.judge("fault:adam-step-lost", replace(CONFIG, checkpoint_step=2))
    assert found is not None
    assert (found.step, found.stage, found.tensor) == (2, "load", "optimizer.step_count")
    assert (found.observed, found.expected) == ("0", "2")


def test_two_runs_of_the_same_code_are_identical_bit_for_bit(bench: Bench) -> None:
    config = replace(CONFIG, checkpoint_step=2)
    assert locate(bench.observe("fault:none", config), bench.observe("fault:none", config)) is None


def test_two_runs_differ_first_where_the_code_does(bench: Bench) -> None:
    found = locate(bench.observe("fault:sum-instead-of-mean", CONFIG), bench.observe("fault:none", CONFIG))
    assert found is not None
    assert (found.step, found.rank, found.stage, found.tensor, found.element) == (1, 0, "reduce", "exp_avg", 0)
    assert found.cause == "a factor N = 2: summed, but not divided"
    assert float(found.observed) == 2 * float(found.expected)


def test_the_wrong_one_of_two_runs_is_told(bench: Bench) -> None:
    found = locate(bench.observe("fault:none", CONFIG), bench.observe("fault:eps-inside-the-root", CONFIG))
    assert found is not None
    assert (found.step, found.stage) == (1, "optimizer")
    assert found.cause == "in the expected run: eps is added inside the root"


def test_other_weights_are_a_difference_of_the_model(bench: Bench) -> None:
    found = locate(bench.observe("fault:none", CONFIG), _edited(bench.observe("fault:none", CONFIG)))
    assert found is not None
    assert (found.step, found.stage, found.tensor, found.element) == (0, "model", "ln_f.bias", 3)
    assert (found.count, found.max_ulp, found.expected_bits) == (1, 1, "0x00000001")


def _edited(run: Run) -> Run:
    """The same run, with one bit of one weight set on every rank at the start."""
    for rank in run.ranks:
        run.shots[0, rank].get("params")["ln_f.bias"].view(torch.int32)[3] = 1
    return run


def test_runs_of_different_configurations_are_refused(bench: Bench) -> None:
    run = Run(CONFIG, {})
    with pytest.raises(ValueError, match=r"the observed run's configuration is .* but should be"):
        locate(run, Run(replace(CONFIG, seed=1), {}))


def test_the_oracle_refuses_a_type_whose_master_copy_is_not_shown() -> None:
    with pytest.raises(ValueError, match="dtype is 'bfloat16', but should be one of float32, float64"):
        Teacher(replace(CONFIG, dtype="bfloat16"), 3)


def test_the_oracle_is_adamw() -> None:
    def zeros() -> Tensor:
        return torch.zeros(3, dtype=torch.float64)

    p, first, second, count = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64), zeros(), zeros(), torch.tensor(0.0)
    teacher = Teacher(replace(CONFIG, weight_decay=0.1, dtype="float64"), 3)
    options: dict[str, Any] = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
    for step in range(5):
        grad = torch.tensor([1e-9, 0.5, -step], dtype=torch.float64)
        target = teacher.expect([2 * grad, zeros()], p.clone())
        adamw([p], [grad], [first], [second], [], [count], foreach=False, amsgrad=False, maximize=False, **options)
        assert bool(((p - target.params).abs() <= target.bound).all())
        assert float(target.bound.max()) < 1e-14


def test_shots_survive_the_file_with_order_and_bits(tmp_path: Path) -> None:
    shot = Shot(3, 1)
    shot.put("params", {"z/1": torch.tensor([float("nan"), -0.0]), "a": torch.tensor(7)})
    write_shots(tmp_path / "shots", [shot])
    (back,) = read_shots(tmp_path / "shots")
    assert (back.step, back.rank, list(back.get("params"))) == (3, 1, ["z/1", "a"])
    assert not bits_differ(back.get("params")["z/1"], shot.get("params")["z/1"]).any()  # type: ignore[union-attr]  # same shape


def test_a_state_is_read_as_tensors_and_numbers() -> None:
    state = {"b": [1, 2.5], "a": {"t": torch.ones(2)}, "name": "adam", "none": None}
    assert [(path, t.tolist()) for path, t in leaves_of(state)] == [("a.t", [1.0, 1.0]), ("b.0", 1), ("b.1", 2.5)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_ulps_are_counted_across_zero_in_every_type(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert max_ulp(torch.tensor([tiny], dtype=dtype), torch.tensor([-tiny], dtype=dtype)) == 3
    assert max_ulp(torch.tensor([1.0], dtype=dtype), torch.tensor([1.0 + torch.finfo(dtype).eps], dtype=dtype)) == 1


def test_a_difference_says_where_what_and_how_many() -> None:
    found = difference(2, 1, "reduce", "w", torch.tensor([1.0, 2.0, 5.0]), torch.tensor([1.0, 3.0, 4.0])).because("why")
    assert found.render().splitlines() == [
        "first difference: step 2, rank 1, stage reduce, tensor w, element 1",
        "observed 2.0 (0x40000000), expected 3.0 (0x40400000); 2 of 3 elements differ, at most 4194304 ulp apart",
        "cause: why",
    ]


def test_another_shape_is_a_difference() -> None:
    assert difference(1, 0, "gather", "w", torch.ones(2), torch.ones(3)).cause == "another shape or type"


SHAPES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "zeros": (lambda v: v * 0, "zeros"),
    "factor": (lambda v: v * 3, "a factor 3"),
    "late by one": (lambda v: v.roll(1), "shifted by 1 element forward"),
    "padding": (lambda v: torch.cat([v[:-1], v[-1:] + 1]), "only the last element (1): padding"),
    "one slice": (lambda v: torch.cat([v[:50], v[50:] + torch.arange(50)]), "only in the slice that rank 1 owns"),
    "not a number": (lambda v: v * float("nan"), "not a number"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_known_shapes_are_recognised(name: str) -> None:
    make, words = SHAPES[name]
    wanted = torch.randn(100, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 5
    seen = make(wanted)
    assert words in shape_of(seen, wanted, seen != wanted, None, even_owner(100, 2), alone=True)


def test_an_element_of_the_flat_vector_is_found_in_its_tensor() -> None:
    names = Names({"a": torch.zeros(2, 3), "none": torch.zeros(0), "b": torch.zeros(())})
    assert [names.place(i) for i in (0, 5, 6)] == [("a", 0), ("a", 5), ("b", 0)]
