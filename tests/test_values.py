"""Layer 0: configuration, corpus, text, trace. Wrong values are one clear line; right ones are deterministic."""

from __future__ import annotations

import hashlib
import math
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from minigpt_dist import MiniGPT, ModelConfig, TrainConfig, make_corpus
from minigpt_dist.batches import read_batch
from minigpt_dist.corpus import read_text
from minigpt_dist.launch import run_world
from minigpt_dist.loss import next_token_loss
from minigpt_dist.trace import Record, Trace, digest, leaves, merge, read_trace, state_digests, tensor_bytes


def test_default_model_has_29824_parameters() -> None:
    assert sum(p.numel() for p in MiniGPT().parameters()) == ModelConfig().numel() == 29_824


@pytest.mark.parametrize(
    "sizes", [{"tie_head": True}, {"num_layers": 3}, {"vocab": 100, "embed_dim": 48}, {"mlp_ratio": 2, "seq_len": 8}]
)
def test_numel_of_a_configuration_is_the_models(sizes: dict[str, Any]) -> None:
    assert sum(p.numel() for p in MiniGPT(**sizes).parameters()) == ModelConfig(**sizes).numel()


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: ModelConfig(embed_dim=30), r"embed_dim is 30, but should be a multiple of num_heads \(4\)"),
        (lambda: ModelConfig(vocab=0), "vocab is 0, but should be a whole number of at least 1"),
        (lambda: ModelConfig(dropout=1.0), r"dropout is 1.0, but should be in \[0, 1\)"),
        (lambda: TrainConfig(world_size=0), "world_size is 0, but should be a whole number of at least 1"),
        (lambda: TrainConfig(steps=True), "steps is True, but should be a whole number"),
        (lambda: TrainConfig(lr=float("nan")), "lr is nan, but should be a finite number"),
        (lambda: TrainConfig(dtype="int8"), "dtype is 'int8', but should be one of float32, float64, bfloat16"),
        (lambda: make_corpus(0, -1), "total_tokens is -1, but should be a whole number of at least 0"),
    ],
)
def test_wrong_values_are_refused_in_one_line(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_configuration_survives_a_trip_through_plain_data() -> None:
    config = TrainConfig(seed=3, betas=(0.8, 0.9), model=ModelConfig(num_layers=1))
    assert TrainConfig.from_dict(config.to_dict()) == config


def test_every_token_of_the_corpus_has_one_successor() -> None:
    tokens = make_corpus(5, 1000).tolist()
    assert len(set(pairwise(tokens))) == 64


def test_a_batch_holds_every_transition_once() -> None:
    config = TrainConfig()
    x, y = read_batch(make_corpus(0, config.total_tokens), config, step=3, rank=2)
    assert len(set(zip(x.flatten().tolist(), y.flatten().tolist(), strict=True))) == 64


def test_ranks_of_the_same_step_read_different_windows() -> None:
    config = TrainConfig(world_size=8)
    corpus = make_corpus(0, config.total_tokens)
    assert len({tuple(read_batch(corpus, config, 0, rank)[0].flatten().tolist()) for rank in range(8)}) == 8


def test_a_corpus_that_is_too_short_is_refused() -> None:
    config = TrainConfig()
    with pytest.raises(ValueError, match="corpus has 10 tokens, but step 0 reads up to 65"):
        read_batch(make_corpus(0, 10), config, 0, 0)


def test_every_token_is_read_once_step_by_step_rank_by_rank_and_micro_batch_by_micro_batch() -> None:
    """Targets lie one token later than inputs; each block of batch * seq_len + 1 tokens begins where the last one ended."""
    config = TrainConfig(world_size=2, steps=2, micro_batches=3, batch=2, model=ModelConfig(seq_len=4))
    corpus = torch.arange(config.total_tokens)
    order = [(step, rank, micro) for step in range(2) for rank in range(2) for micro in range(3)]
    for i, (step, rank, micro) in enumerate(order):
        x, y = read_batch(corpus, config, step, rank, micro)
        assert x.tolist() == torch.arange(9 * i, 9 * i + 8).view(2, 4).tolist()
        assert y.tolist() == (x + 1).tolist()
    assert read_batch(corpus, config, 1, 1)[0][0, 0] == 9 * 9  # the first micro-batch, where none is named
    with pytest.raises(ValueError, match="corpus has 17 tokens, but step 0 reads up to 18"):
        read_batch(corpus[:17], config, 0, 0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_loss_is_the_mean_over_tokens_of_minus_log_probability(dtype: torch.dtype) -> None:
    """16-bit logits in float32, float64 in its own."""
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    targets = torch.arange(12).view(3, 4).t()[:2, :3].contiguous().t().t() % 5  # not contiguous in memory
    logs = logits.double().log_softmax(-1)
    wanted = -sum(float(logs[i, j, targets[i, j]]) for i in range(2) for j in range(3)) / 6
    loss = next_token_loss(logits, targets)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert float(loss) == pytest.approx(wanted, rel=1e-12 if dtype == torch.float64 else 1e-6)


def test_text_is_read_as_bytes(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(256)))
    assert read_text(path, 256).tolist() == list(range(256))


@pytest.mark.parametrize("name, message", [("absent", "cannot be read"), ("short", "has 2 bytes, but the run reads 3")])
def test_an_unusable_text_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "short").write_bytes(b"ab")
    with pytest.raises(ValueError, match=message):
        read_text(tmp_path / name, 3)


def test_a_sequence_longer_than_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence length is 17, but should be at most 16"):
        MiniGPT()(torch.zeros(1, 17, dtype=torch.int64))


def test_a_trace_survives_its_file(tmp_path: Path) -> None:
    trace = Trace({"impl": "x"}, [Record(step=1, rank=1, loss=2.5), Record(step=0, rank=0, loss=1.0, param_norm=3.0)])
    trace.write(tmp_path / "trace.jsonl")
    again = read_trace(tmp_path / "trace.jsonl")
    assert (again.header, [(r.step, r.rank, r.loss) for r in again.records]) == (
        {"impl": "x"},
        [(0, 0, 1.0), (1, 1, 2.5)],
    )


def test_a_trace_of_two_ranks_sums_up_by_step() -> None:
    """The mean of losses, the norm of disjoint slices, the steps left out; step 0 is before training."""
    records = [
        Record(
            step,
            rank,
            loss=step + 2.0 * rank,
            grad_sq=4.5 * step,
            skipped=(0, 0, 1, 1)[step],
            bytes={"p": 1} if step == 2 else {},
        )
        for rank in (1, 0)
        for step in (3, 2, 1, 0)
    ]
    trace = merge({"impl": "x"}, [records[:4], records[4:]])
    assert (trace.header, trace.world_size, trace.steps) == ({"impl": "x"}, 2, [0, 1, 2, 3])
    assert [(r.step, r.rank) for r in trace.records] == [(s, r) for s in range(4) for r in range(2)]
    assert [r.rank for r in trace.at(2)] == [0, 1]
    assert {r.step for r in trace.counted()} == {2}
    assert trace.mean_losses() == {1: 2.0, 2: 3.0, 3: 4.0}
    assert trace.grad_norms() == {1: 3.0, 2: pytest.approx(18**0.5), 3: pytest.approx(27**0.5)}
    assert trace.skips() == [2]
    assert (Trace({}, []).world_size, Trace({}, []).steps) == (0, [])
    assert Trace({}, [Record(step, 0, skipped=step) for step in range(3)]).skips() == [1, 2]


def test_a_record_that_says_nothing_holds_no_numbers() -> None:
    """Not zeros, which would be read as measured."""
    record = Record(step=1, rank=0)
    unknown = (record.loss, record.grad_norm, record.grad_sq, record.param_norm, record.loss_scale, record.update_ratio)
    assert all(math.isnan(x) for x in unknown)
    assert record.skipped == 0


def test_equal_traces_are_equal_files_with_sorted_names(tmp_path: Path) -> None:
    Trace({"b": 1, "a": 2}, [Record(step=1, rank=0, params={"w": "1", "b": "2"})]).write(tmp_path / "trace.jsonl")
    head, line, end = (tmp_path / "trace.jsonl").read_text().split("\n")
    assert (head, end) == ('{"header": {"a": 2, "b": 1}}', "")
    assert '"params": {"b": "2", "w": "1"}, "rank": 0' in line


def test_a_state_is_digests_of_tensors_and_words_of_the_rest() -> None:
    """Keys that are no words are listed by what they read as; what holds nothing is not listed."""
    tensor = torch.ones(2)
    state = {"t": tensor, "n": {2: (1.5,), 10: None}, "empty": []}
    assert state_digests(state) == {"t": digest(tensor), "n.2.0": "1.5", "n.10": "None"}
    assert [path for path, _ in leaves(state)] == ["n.10", "n.2.0", "t"]
    assert list(leaves([[5]])) == [("0.0", 5)]


def test_a_digest_is_sha256_of_dtype_shape_and_bytes() -> None:
    tensor = torch.tensor([[1.0, 2.0]], requires_grad=True)
    raw = b"torch.float32 (1, 2) " + struct.pack("<2f", 1.0, 2.0)
    assert digest(tensor) == hashlib.sha256(raw).hexdigest()
    assert (tensor_bytes(tensor), tensor_bytes(torch.zeros(0, 3))) == (raw[-8:], b"")


def own_digest() -> str:
    """On a rank: the digest of its part of a tensor that torch spreads over the ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return digest(distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]))


def test_of_a_tensor_spread_over_ranks_its_own_part_counts() -> None:
    assert run_world(own_digest, 2) == [digest(torch.tensor([0.0, 1.0])), digest(torch.tensor([2.0, 3.0]))]


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"header": {}}\n{"step": 1}\n')
    with pytest.raises(ValueError, match=r"line 2 is .*, but should be one trace record"):
        read_trace(path)


def test_digest_tells_dtype_shape_and_sign_of_zero_apart() -> None:
    tensors = [torch.zeros(2), torch.zeros(2, 1), torch.zeros(2, dtype=torch.float64), torch.tensor([0.0, -0.0])]
    assert len({digest(t) for t in tensors}) == 4


def test_bytes_of_a_transposed_tensor_are_in_row_major_order() -> None:
    assert tensor_bytes(torch.arange(6.0).view(2, 3).t()) == tensor_bytes(torch.arange(6.0).view(2, 3).t().contiguous())


def test_leaves_of_a_nested_state_have_paths() -> None:
    assert dict(leaves({"b": [1, {"c": 2}], "a": 3})) == {"a": 3, "b.0": 1, "b.1.c": 2}
