"""Layer 0: configuration, corpus, text, trace. Wrong values are one clear line; right ones are deterministic."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from minigpt_dist import MiniGPT, ModelConfig, TrainConfig, make_corpus
from minigpt_dist.batches import read_batch
from minigpt_dist.corpus import read_text
from minigpt_dist.trace import Record, Trace, digest, leaves, read_trace, tensor_bytes


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
