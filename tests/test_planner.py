"""The planner: published formulas, published throughput, and published layouts come out where they should."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest

from minigpt_dist.config import ModelConfig
from minigpt_dist.layout import Layout
from minigpt_dist.parallel.pipeline import SCHEDULES, ideal_bubble
from minigpt_dist.planner import (
    MEGATRON_2021,
    Choices,
    Cluster,
    ModelShape,
    Search,
    Techniques,
    bubble_fraction,
    duration,
    memory,
    search,
)
from minigpt_dist.planner.memory import block_bytes, live_blocks
from minigpt_dist.planner.stages import block_counts, shares


def gpt(layers: int, hidden: int, heads: int, vocab: int = 51_200, dropout: float = 0.1) -> ModelShape:
    """A tied GPT of sequences of 2048 tokens."""
    sizes = ModelConfig(vocab, hidden, heads, layers, 2048, dropout=dropout, tie_head=True)
    return ModelShape.of("gpt", sizes)


GPT3, MT_NLG = gpt(96, 12_288, 96), gpt(105, 20_480, 128)
BLOOM = gpt(70, 14_336, 112, 250_880, dropout=0.0)
OMNI_PATH = 6.25e9  # four links of 100 Gb/s a node of eight (BigScience 2022, "BLOOM", section 3.4)


def test_published_sizes_have_their_published_numbers_of_parameters() -> None:
    assert [round(shape.numel / 1e9, 1) for shape in (GPT3, MT_NLG, BLOOM)] == [174.6, 529.6, 176.3]


def test_operations_are_those_of_narayanan_2021_equation_3() -> None:
    layers, h, V, s, B = 96, 12_288, 51_200, 2048, 1536
    published = 96 * B * s * layers * h**2 * (1 + s / (6 * h) + V / (16 * layers * h))
    assert GPT3.step_flops(B, recompute=True) == pytest.approx(published, rel=1e-12)


@pytest.mark.parametrize(
    "N, stage, a_parameter", [(1, 0, 16), (64, 1, 4 + 12 / 64), (64, 2, 2 + 14 / 64), (64, 3, 16 / 64)]
)
def test_model_states_are_those_of_rajbhandari_2020(N: int, stage: int, a_parameter: float) -> None:
    held = memory(GPT3, Layout(dp=N, zero_stage=stage, precision="bfloat16"), 1, MEGATRON_2021)
    assert (held.params + held.grads + held.optimizer) / GPT3.numel == pytest.approx(a_parameter, rel=1e-6)


@pytest.mark.parametrize(
    "t, sequence_parallel, published",
    [
        (1, False, lambda a, s, h, t: 34 + 5 * a * s / h),
        (8, False, lambda a, s, h, t: 10 + 24 / t + 5 * a * s / (h * t)),
        (8, True, lambda a, s, h, t: (34 + 5 * a * s / h) / t),
    ],
)
def test_activations_of_a_block_are_those_of_korthikanti_2022_table_2(
    t: int, sequence_parallel: bool, published: object
) -> None:
    b, s, h, a = 1, 2048, 12_288, 96
    techniques = Techniques(fused_attention=False, sequence_parallel=sequence_parallel)
    kept = block_bytes(GPT3, Layout(tp=t, precision="bfloat16"), b, techniques)
    statistics = 8 * b * s // (t if sequence_parallel else 1)  # of the two LayerNorms, which the paper leaves out
    assert kept - statistics == pytest.approx(s * b * h * published(a, s, h, t))  # type: ignore[operator]  # a lambda


def simulated_live(schedule: str, layout: Layout, shape: ModelShape, rank: int) -> int:
    """Most blocks held at once, by going through the rank's actions."""
    chunks = [2] if schedule == "interleaved" else []
    blocks = dict(
        enumerate(block_counts(shape.sizes.num_layers, layout.stages, shape.head_flops(1) / shape.block_flops(1)))
    )
    live = most = 0
    for action in SCHEDULES[schedule](layout.pp, layout.micro_batches, *chunks)[rank]:
        live += blocks[action.stage] * (1 if action.kind == "F" else -1)
        most = max(most, live)
    return most


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp, M", [(2, 2), (3, 3), (2, 8), (4, 8), (4, 4)])
def test_blocks_held_at_once_are_those_of_the_schedule(schedule: str, pp: int, M: int) -> None:
    shape = ModelShape(ModelConfig(num_layers=11))
    layout = Layout(pp=pp, micro_batches=M, schedule=schedule)
    predicted = [live_blocks(share, layout) for share in shares(shape, layout)]
    assert predicted == [simulated_live(schedule, layout, shape, r) for r in range(pp)]


def test_the_bubble_is_the_pipelines_own() -> None:
    layout = Layout(pp=4, micro_batches=8, schedule="interleaved")
    over_ideal = bubble_fraction(layout)
    assert over_ideal / (1 + over_ideal) == pytest.approx(ideal_bubble(4, 8, 2))


@pytest.mark.parametrize(
    "blocks, stages, head", [(70, 12, 1.42), (105, 35, 0.2), (2, 2, 5.0), (7, 3, 0.0), (5, 1, 9.0)]
)
def test_no_other_cut_has_a_shorter_longest_stage(blocks: int, stages: int, head: float) -> None:
    counts = block_counts(blocks, stages, head)
    longest = max(*counts[:-1], counts[-1] + head) if stages > 1 else blocks + head
    others = [max(n + head, -(-(blocks - n) // max(stages - 1, 1))) for n in range(1, blocks - stages + 2)]
    assert (sum(counts), len(counts), min(counts) >= 1) == (blocks, stages, True)
    assert stages == 1 or longest == min(others)


class Run(NamedTuple):
    """A published run: TFLOP/s a GPU as reported, `within` which the prediction is."""

    shape: ModelShape
    gpus: int
    global_batch: int
    tp: int
    pp: int
    zero_stage: int
    batch: int
    published: float
    within: float
    inter_node: float = 25e9
    precision: str = "float16"


# Narayanan et al. 2021, table 2: the three constants of `cluster.py` are fitted to these twelve.
FITTED = [
    *(Run(GPT3, n, 1536, 1, 1, 3, b, t, 0.12) for n, b, t in ((384, 4, 144), (768, 2, 88), (1536, 1, 44))),
    *(
        Run(MT_NLG, n, B, 1, 1, 3, b, t, 0.12)
        for n, B, b, t in ((640, 2560, 4, 138), (1120, 2240, 2, 98), (2240, 2240, 1, 48))
    ),
    *(Run(GPT3, n, 1536, 8, 12, 0, 1, t, 0.05) for n, t in ((384, 153), (768, 149), (1536, 141))),
    *(Run(MT_NLG, n, 2240, 8, 35, 0, 1, t, 0.05) for n, t in ((560, 171), (1120, 167), (2240, 159))),
]
# Not fitted: BigScience 2022; Smith et al. 2022, "Using DeepSpeed and Megatron to train Megatron-Turing NLG 530B", table 2.
HELD_OUT = [
    Run(BLOOM, 384, 2048, 4, 12, 1, 2, 150, 0.07, OMNI_PATH, "bfloat16"),
    *(Run(MT_NLG, 8 * n, 1920, 8, 35, 0, 1, t, 0.26) for n, t in ((280, 126), (350, 121), (420, 113))),
]


@pytest.mark.parametrize("run", [*FITTED, *HELD_OUT])
def test_predicted_throughput_is_near_the_published(run: Run) -> None:
    dp = run.gpus // (run.tp * run.pp)
    M = run.global_batch // (dp * run.batch)
    layout = Layout(dp, run.tp, run.pp, run.zero_stage, run.precision, recompute=True, micro_batches=M)
    took = duration(run.shape, layout, run.batch, Cluster(run.gpus, 80e9, inter_node=run.inter_node), MEGATRON_2021)
    predicted = run.shape.step_flops(run.global_batch, recompute=True) / run.gpus / took.total / 1e12
    assert predicted == pytest.approx(run.published, rel=run.within)


BLOOM_CLUSTER, MT_CLUSTER = Cluster(384, 80e9, inter_node=OMNI_PATH), Cluster(2240, 80e9)
PLACES = [
    ("BLOOM-176B", BLOOM, BLOOM_CLUSTER, 2048, "bfloat16", (8, 4, 12), (1, 18), (3, 18)),
    ("Megatron-Turing 530B", MT_NLG, MT_CLUSTER, 1920, "float16", (8, 8, 35), (2, 28), (2, 28)),
    ("GPT-3 175B", GPT3, Cluster(384, 80e9), 1536, "float16", (4, 8, 12), (1, 77), (24, 77)),
    pytest.param(
        "GPT-3 175B",
        GPT3,
        Cluster(1536, 80e9),
        1536,
        "float16",
        (16, 8, 12),
        (3, 97),
        (11, 97),
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize("name, shape, cluster, batch, precision, axes, place, recomputed", PLACES)
def test_a_published_layout_fits_and_reaches_its_place(
    name: str,
    shape: ModelShape,
    cluster: Cluster,
    batch: int,
    precision: str,
    axes: tuple[int, int, int],
    place: tuple[int, int],
    recomputed: tuple[int, int],
) -> None:
    wanted = dict(zip(("dp", "tp", "pp"), axes, strict=True))
    choices = Choices(precision=(precision,))
    found = search(shape, cluster, batch, choices, MEGATRON_2021)
    assert found.rank(**wanted) == place
    with_recompute = Search([plan for plan in found.feasible if plan.layout.recompute])  # as all of them were run
    assert with_recompute.rank(**wanted) == recomputed


def test_what_fits_comes_fastest_first_and_is_within_the_memory() -> None:
    cluster = Cluster(16, 2e9)
    plans = search(gpt(4, 1024, 16), cluster, 64).feasible
    times = [plan.duration.total for plan in plans]
    assert (len(plans) > 10, times) == (True, sorted(times))
    assert max(plan.memory.total for plan in plans) <= cluster.usable == 1.8e9


def test_every_candidate_either_fits_or_is_refused_for_a_reason_with_an_example() -> None:
    choices = Choices(batch=(1, 3), zero_stage=(0, 1, 2))
    found = search(gpt(4, 1024, 16), Cluster(16, 0.5e9), 64, choices)
    refused = {failure.reason: failure.count for failure in found.failures}
    axes = [(t, p) for t in (1, 2, 4, 8, 16) for p in (1, 2, 4, 8, 16) if t * p <= 16]
    assert len(found.feasible) + sum(refused.values()) == sum(3 * 2 * 2 * (1 if p == 1 else 2) for _, p in axes)
    assert set(refused) == {"global_batch", "zero_stage", "memory of a rank", "number of pipeline stages"}
    assert all(": " in failure.example and ", but should be " in failure.example for failure in found.failures)


def test_a_tensor_group_that_straddles_nodes_is_as_slow_as_the_network() -> None:
    cluster = Cluster(24, 80e9)
    speeds = {tp: cluster.bandwidth(Layout(dp=24 // tp, tp=tp), "tp") for tp in (3, 4, 8, 12)}
    assert speeds[4] == speeds[8] > speeds[3] == speeds[12]


def test_recomputation_costs_a_third_of_the_compute_and_spares_most_activations() -> None:
    shape, cluster, plain = gpt(4, 1024, 16), Cluster(1, 80e9), Layout(precision="bfloat16")
    again = replace(plain, recompute=True)
    ratio = duration(shape, again, 4, cluster).compute / duration(shape, plain, 4, cluster).compute
    assert 1.2 < ratio <= 4 / 3
    assert memory(shape, again, 4).activations < memory(shape, plain, 4).activations


@pytest.mark.parametrize("wrong", [{"gpus": 0}, {"memory": 0.0}, {"flops": float("nan")}, {"reserve": 1.0}])
def test_machines_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} is .*, but should be"):
        Cluster(**{"gpus": 8, "memory": 80e9, **wrong})  # type: ignore[arg-type]  # one of them is wrong
