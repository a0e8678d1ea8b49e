"""Communication overlapped with computation: the same bits with and without it, what happens under what, and the timeline that shows it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from minigpt_dist.config import ModelConfig, TrainConfig
from minigpt_dist.launch import World
from minigpt_dist.loss import next_token_loss
from minigpt_dist.model import MiniGPT
from minigpt_dist.overlap import chart, common, length, merged, overlap_of
from minigpt_dist.parallel.pipeline import executor as pipeline
from minigpt_dist.parallel.pipeline.mail import Mail
from minigpt_dist.parallel.stages import reducer
from minigpt_dist.parallel.stages.stage3 import Segment
from minigpt_dist.parallel.zero import ZeroOptimizer
from minigpt_dist.trace import Record
from minigpt_dist.worker import rank_body

MODEL = ModelConfig(vocab=17, embed_dim=8, num_heads=2, num_layers=3, seq_len=6)
CONFIG = TrainConfig(world_size=2, steps=2, checkpoint_step=0, micro_batches=2, model=MODEL)


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    with World(2, deadline_s=60) as live:
        yield live


def records(ranks: World, watch: list[str], **changes: Any) -> list[list[Record]]:
    config = replace(CONFIG, **changes)
    with tempfile.TemporaryDirectory() as folder:
        found = ranks.run(rank_body, config.to_dict(), folder, False, watch, "cpu")
    return [[Record(**record) for record in rank["records"]] for rank in found]


@pytest.mark.parametrize("changes", [{"zero_stage": 2}, {"zero_stage": 3}, {"pp": 2}], ids=str)
def test_overlap_changes_no_bit(ranks: World, changes: dict[str, Any]) -> None:
    on, off = (records(ranks, ["digests"], overlap=overlap, **changes) for overlap in (True, False))
    assert [[r.params for r in rank] for rank in on] == [[r.params for r in rank] for rank in off]


def backward_body(overlap: bool) -> list[str]:
    """What a rank does in one backward of stage 2, in order."""
    model, optimizer = built(2, overlap)
    seen, start, adopt = list[str](), reducer.reduce_scatter_start, reducer.Bucket.adopt

    def started(*args: Any) -> Any:
        seen.append("sent")
        end = start(*args)
        return lambda: (seen.append("ended"), end())[1]

    def adopted(bucket: reducer.Bucket, i: int) -> None:
        seen.append("computed")
        adopt(bucket, i)

    with (
        mock.patch.object(reducer, "reduce_scatter_start", started),
        mock.patch.object(reducer.Bucket, "adopt", adopted),
    ):
        next_token_loss(model(IDS), IDS).backward()
    optimizer.step()
    return seen


def forward_body(overlap: bool) -> list[str]:
    """What a rank does in one forward of stage 3, in order."""
    model, _ = built(3, overlap)
    seen, start = list[str](), Segment.start

    def started(segment: Segment, group: Any) -> None:
        idle = not segment.whole and segment._coming is None
        start(segment, group)
        seen.extend(["asked"] if idle else [])

    for block in model.blocks:
        block.register_forward_hook(lambda *_: seen.append("computed"))
    with mock.patch.object(Segment, "start", started):
        model(IDS)
    return seen


def pipeline_body(config: dict[str, Any], folder: str) -> list[str]:
    """What the last rank of a pipeline does in one step, in order."""
    seen, post, forward = list[str](), Mail.expect, pipeline.Pipeline._forward

    def expected(mail: Mail, wanted: Any) -> None:
        if wanted not in mail._under_way and mail._source(wanted) not in (None, mail._peers.rank):
            seen.append(f"asked {wanted}")
        post(mail, wanted)

    def computed(*args: Any) -> Any:
        seen.append(f"computed {args[1]}")
        return forward(*args)

    with mock.patch.object(Mail, "expect", expected), mock.patch.object(pipeline.Pipeline, "_forward", computed):
        rank_body(config, folder, False, [], "cpu")
    return seen


IDS = torch.arange(6).view(1, 6)


def built(stage: int, overlap: bool) -> tuple[MiniGPT, ZeroOptimizer]:
    torch.manual_seed(0)
    model = MiniGPT(vocab=17, embed_dim=8, num_heads=2, num_layers=3, seq_len=6)
    rank = torch.distributed.get_rank()
    return model, ZeroOptimizer(model, 2, rank, stage=stage, bucket_mb=1e-3, overlap=overlap)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_bucket_is_under_way_while_backward_computes_others(ranks: World, overlap: bool) -> None:
    seen = ranks.run(backward_body, overlap)[0]
    assert seen[seen.index("sent") + 1] == ("computed" if overlap else "ended")


@pytest.mark.parametrize("overlap", [True, False])
def test_the_next_unit_is_asked_for_before_one_computes(ranks: World, overlap: bool) -> None:
    seen = ranks.run(forward_body, overlap)[0]
    assert seen[: seen.index("computed")] == ["asked"] * (
        3 if overlap else 2
    )  # the embeddings' unit, the block, the next block


@pytest.mark.parametrize("overlap", [True, False])
def test_a_stage_computes_while_its_next_input_is_on_its_way(ranks: World, overlap: bool) -> None:
    config = replace(CONFIG, pp=2, steps=1, schedule="gpipe", overlap=overlap)
    with tempfile.TemporaryDirectory() as folder:
        seen = ranks.run(pipeline_body, config.to_dict(), folder)[1]
    assert (seen.index("asked F1.1") < seen.index("computed F1.0")) == overlap


def test_a_timeline_has_every_stretch_of_computing_and_every_exchange(ranks: World) -> None:
    last = records(ranks, ["collectives", "timeline"], zero_stage=3)[0][-1]
    assert [what for what, _, _ in last.spans] == ["F", "B", "F", "B", "U"]
    assert all(c["start"] <= c["end"] and c["waits"] for c in last.collectives)
    assert 0 < overlap_of(last).waited <= overlap_of(last).under_way <= overlap_of(last).length


def test_a_pipelines_timeline_names_each_action(ranks: World) -> None:
    last = records(ranks, ["collectives", "timeline"], pp=2)[1][-1]
    assert [what for what, _, _ in last.spans] == ["F1.0", "B1.0", "F1.1", "B1.1", "U"]


def test_no_timeline_is_kept_unless_asked_for(ranks: World) -> None:
    last = records(ranks, ["collectives"], zero_stage=2)[0][-1]
    assert last.spans == []
    assert not {"start", "end", "waits", "told"} & set(last.collectives[0])


def test_intervals_are_united_and_shared() -> None:
    assert merged([(3, 4), (0, 2), (1, 2.5)]) == [(0, 2.5), (3, 4)]
    assert length([(0, 2), (1, 3), (5, 6)]) == 4
    assert common([(0, 2), (4, 6)], [(1, 5)]) == [(1, 2), (4, 5)]


def made(rank: int = 0, shift: float = 0.0) -> Record:
    calls = [
        {"start": shift + 1.0, "end": shift + 3.0, "waits": [[shift + 1.0, shift + 1.5], [shift + 2.5, shift + 4.0]]}
    ]
    spans = [["F", shift, shift + 2.0], ["B", shift + 2.0, shift + 8.0], ["U", shift + 8.0, shift + 10.0]]
    return Record(1, rank, collectives=calls, spans=spans)


def test_what_is_not_waited_for_is_hidden() -> None:
    found = overlap_of(made())
    assert (found.under_way, found.waited, found.hidden, found.length, found.calls) == (2.0, 1.0, 1.0, 10.0, 1)
    with pytest.raises(ValueError, match="step 1 of rank 0 has no timeline"):
        overlap_of(Record(1, 0))


def test_the_chart_has_three_lines_a_rank_on_one_clock() -> None:
    lines = chart([made(), made(1, shift=10.0)], width=40).splitlines()
    rows = [line.partition("|")[2].rstrip("|") for line in lines]
    assert [row[:20] for row in rows[:3]] == ["FFFFBBBBBBBBBBBBUUUU", "..====..............", "..w..www............"]
    assert rows[3:] == [row[20:] + row[:20] for row in rows[:3]]
    assert [line[:17] for line in lines[2:4]] == ["       waits     ", "rank 1 computes  "]
