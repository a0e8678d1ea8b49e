"""Tensor parallelism: the unsharded model's loss, gradients, start and training, from parts of it; and what looks like that but is not."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt_dist.activations import SavedBytes
from minigpt_dist.cut import Cut
from minigpt_dist.launch import World, ledger, run_world
from minigpt_dist.loss import next_token_loss
from minigpt_dist.model import MiniGPT
from minigpt_dist.parallel.pipeline import layers_of
from minigpt_dist.parallel.recompute import recompute_blocks
from minigpt_dist.parallel.tensor import TensorAxis, attention, operators, tensor_parallel, token_loss, whole
from minigpt_dist.parallel.tensor import whole_gradients as gradients_of
from minigpt_dist.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from minigpt_dist.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from minigpt_dist.parallel.tensor.streams import RankDropout, rank_stream
from minigpt_dist.parallel.tensor.vocabulary import VocabParallelHead, VocabSlice

SIZES = {"embed_dim": 16, "num_heads": 4, "num_layers": 2, "seq_len": 8}
VOCAB, ODD = 18, 17  # rows of 18: 9, 9; 5, 5, 5, 3 and two of padding. Of 17: 9, 8 and one of padding
LOSS, GRADIENT = 1e-13, 1e-11  # of float64, between reduction orders
Answer = tuple[float, dict[str, Tensor]]


@pytest.fixture(scope="module", params=[1, 2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(request.param, deadline_s=60) as live:
        yield live


@pytest.fixture(scope="module")
def two() -> Iterator[World]:
    with World(2, deadline_s=60) as live:
        yield live


@pytest.fixture(scope="module")
def four() -> Iterator[World]:
    with World(4, deadline_s=60) as live:
        yield live


def plain_model(seed: int, vocab: int, tied: bool, **sizes: Any) -> MiniGPT:
    torch.manual_seed(seed)
    model = MiniGPT(vocab=vocab, tie_head=tied, **{**SIZES, **sizes}).double()
    for name, p in model.named_parameters():  # LayerNorms and biases start as ones and zeros, which hide a factor
        if p.dim() == 1:
            nn.init.normal_(p, mean=float(name.endswith("weight")), std=0.3)
    return model


def batch(vocab: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(B, S) ids and targets in which every token occurs: the first and the last of every shard too."""
    generator = torch.Generator().manual_seed(seed)
    ids, targets = (torch.randperm(24, generator=generator).view(3, 8) % vocab for _ in range(2))
    return ids, targets


@functools.cache
def one_process(vocab: int, tied: bool, heads: int = 4) -> Answer:
    model = plain_model(0, vocab, tied, num_heads=heads)
    ids, targets = batch(vocab)
    loss = next_token_loss(model(ids), targets)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def answer_body(vocab: int, tied: bool, sequence: bool, wrong: str = "", heads: int = 4) -> Answer:
    """Loss and whole gradients of the cut model; the ranks' models differ before it is cut."""
    with WRONG[wrong]() if wrong else contextlib.nullcontext():
        model = plain_model(dist.get_rank(), vocab, tied, num_heads=heads)
        model = tensor_parallel(model, sequence_parallel=sequence)
        ids, targets = batch(vocab, seed=dist.get_rank() if wrong == "every rank reads its own batch" else 0)
        loss = token_loss(model, model(ids), targets)
        loss.backward()
        return loss.item(), gradients_of(model)


def agrees(seen: Answer, wanted: Answer) -> bool:
    """Equal names, and equal numbers within float64's bounds."""
    near = all(bool((seen[1][n] - g).abs().max() <= GRADIENT) for n, g in wanted[1].items() if n in seen[1])
    return seen[1].keys() == wanted[1].keys() and near and abs(seen[0] - wanted[0]) <= LOSS


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("vocab, tied", [(VOCAB, False), (VOCAB, True), (5, True)])
def test_loss_and_gradients_are_the_unsharded_models(ranks: World, vocab: int, tied: bool, sequence: bool) -> None:
    answers = ranks.run(answer_body, vocab, tied, sequence)
    assert all(agrees(answer, one_process(vocab, tied)) for answer in answers)
    assert all(torch.equal(g, answers[0][1][n]) for answer in answers for n, g in answer[1].items())


@pytest.mark.slow  # eight ranks of a few heads each
@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_eight_ranks_hold_a_head_each(sequence: bool) -> None:
    answers = run_world(answer_body, 8, VOCAB, True, sequence, "", 8, deadline_s=60)
    assert all(agrees(answer, one_process(VOCAB, True, heads=8)) for answer in answers)


def bias_in_every_addend() -> Any:
    def forward(self: RowParallelLinear, x: Tensor) -> Tensor:
        return self.axis.leave(F.linear(x, self.weight, self.bias))

    return mock.patch.object(RowParallelLinear, "forward", forward)


def mask_with(low: int, high: int) -> Callable[[], Any]:
    def owns(self: VocabSlice, ids: Tensor) -> Tensor:
        return (ids >= self.lo + low) & (ids < self.hi + high)

    return lambda: mock.patch.object(VocabSlice, "owns", owns)


def replicated_as(summed: int) -> Callable[[], Any]:
    """LayerNorms' gradients, with the sequence cut, summed over ranks that many times."""

    def replicated(self: TensorAxis, *params: Tensor) -> tuple[Tensor, ...]:
        for _ in range(summed if self.sequence_parallel else 0):
            params = tuple(operators.copy_to_region(p, self.group) for p in params)
        return params

    return lambda: mock.patch.object(TensorAxis, "replicated", replicated)


def padding_takes_part() -> Any:
    """Logits of the padding, which are 0, are in the sum of exponentials."""
    init = VocabSlice.__init__

    def padded(self: VocabSlice, vocab: int, axis: TensorAxis) -> None:
        init(self, vocab, axis)
        self.hi = self.lo + self.rows

    return mock.patch.object(VocabSlice, "__init__", padded)


def fused_weight_cut_in_one_piece() -> Any:
    part = Cut.part
    return mock.patch.object(Cut, "part", lambda self, whole, *place: part(Cut(self.dim, self.length), whole, *place))


def every_rank_starts_with_the_first_part() -> Any:
    part = Cut.part
    return mock.patch.object(Cut, "part", lambda self, whole, parts, index: part(self, whole, parts, 0))


def enter_without_sum() -> Any:
    """The input's gradient is this rank's share alone."""
    return mock.patch.object(TensorAxis, "enter", lambda self, x: x)


def leave_twice_summed() -> Any:
    """The sum's gradient is summed once more on its way back, as a plain all-reduce's is."""
    return mock.patch.object(
        TensorAxis,
        "leave",
        lambda self, part: operators.copy_to_region(operators.reduce_from_region(part, self.group), self.group),
    )


def gradient_of_the_sequence_not_summed() -> Any:
    """Entering, the sequence is gathered, but its gradient is cut rather than summed and cut."""
    return mock.patch.object(TensorAxis, "enter", lambda self, x: operators.gather_from_region(x, 1, self.group))


WRONG: dict[str, Callable[[], Any]] = {
    "the bias is added by every rank": bias_in_every_addend,
    "the mask lacks a shard's first token": mask_with(1, 0),
    "the mask lacks a shard's last token": mask_with(0, -1),
    "padding gets probability": padding_takes_part,
    "query, key and value are cut in one piece": fused_weight_cut_in_one_piece,
    "every rank starts with the same part": every_rank_starts_with_the_first_part,
    "the input's gradient is not summed": enter_without_sum,
    "the sum's gradient is summed again": leave_twice_summed,
    "every rank reads its own batch": contextlib.nullcontext,
    "LayerNorm's gradient is not summed": replicated_as(0),
    "LayerNorm's gradient is summed twice": replicated_as(2),
    "the gathered sequence's gradient is not summed": gradient_of_the_sequence_not_summed,
}
NEEDS_SEQUENCE = {name for name in WRONG if "LayerNorm" in name or "sequence" in name}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_version_is_told_from_the_unsharded_model(two: World, wrong: str) -> None:
    answers = two.run(answer_body, ODD, False, wrong in NEEDS_SEQUENCE, wrong)
    assert not all(agrees(answer, one_process(ODD, False)) for answer in answers)


def start_body() -> tuple[list[str], dict[str, Tensor]]:
    model = tensor_parallel(plain_model(dist.get_rank(), VOCAB, False))
    return [name for name, _ in model.named_parameters()], dict(whole(model))


def test_the_start_is_the_first_ranks_whole_model_under_its_names(ranks: World) -> None:
    wanted = dict(plain_model(0, VOCAB, False).named_parameters())
    for names, held in ranks.run(start_body):
        assert names == list(wanted)
        assert all(torch.equal(held[name], p) for name, p in wanted.items())


OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "copy": operators.copy_to_region,
    "reduce": operators.reduce_from_region,
    "scatter": lambda x: operators.scatter_to_region(x, 1),
    "gather": lambda x: operators.gather_from_region(x, 1),
    "gather sequence": lambda x: operators.gather_sequence(x, 1),
    "scatter sequence": lambda x: operators.scatter_sequence(x, 1),
}


def operator_body(name: str) -> tuple[Tensor, ...]:
    """(2, 4) numbers of this rank there, and a gradient of its own back; then what was given, which is to stay as it was."""
    rank = dist.get_rank()
    x = (torch.arange(8.0).view(2, 4) + 10 * rank).requires_grad_()
    out = OPERATORS[name](x)
    given = torch.arange(float(out.numel())).view(out.shape) + 100 * rank
    out.backward(given)
    assert x.grad is not None
    return out.detach(), x.grad, x.detach(), given


def by_hand(name: str, N: int) -> list[tuple[Tensor, ...]]:
    """The table in the operators' docstring, on all ranks' tensors at once."""
    xs = [torch.arange(8.0).view(2, 4) + 10 * r for r in range(N)]

    def apply(kind: str, each: list[Tensor]) -> list[Tensor]:
        total = torch.stack(each).sum(0)
        return {
            "same": lambda: each,
            "sum": lambda: [total] * N,
            "slice": lambda: [t.chunk(N, 1)[r] for r, t in enumerate(each)],
            "join": lambda: [torch.cat(each, 1)] * N,
            "summed slice": lambda: list(total.chunk(N, 1)),
        }[kind]()

    pairs = {
        "copy": ("same", "sum"),
        "reduce": ("sum", "same"),
        "scatter": ("slice", "join"),
        "gather": ("join", "slice"),
    }
    pairs |= {"gather sequence": ("join", "summed slice"), "scatter sequence": ("summed slice", "join")}
    outs = apply(pairs[name][0], xs)
    grads = [torch.arange(float(o.numel())).view(o.shape) + 100 * r for r, o in enumerate(outs)]
    return list(zip(outs, apply(pairs[name][1], grads), xs, grads, strict=True))


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_does_forward_and_backward_what_the_table_says(ranks: World, name: str) -> None:
    seen, wanted = ranks.run(operator_body, name), by_hand(name, ranks.world_size)
    assert all(
        torch.equal(a, b) for one, other in zip(seen, wanted, strict=True) for a, b in zip(one, other, strict=True)
    )


def linear_body(kind: str) -> tuple[float, float]:
    """The largest difference from the unsharded layer, of outputs and of the input's gradient."""
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 12).double(), torch.randn(2, 3, 8).double()
    cut = (
        ColumnParallelLinear(layer, TensorAxis(), gather_output=True)
        if kind == "column"
        else RowParallelLinear(layer, TensorAxis(), input_is_parallel=False)
    )
    outs, grads = [], []
    for each in (layer, cut):
        inputs = x.clone().requires_grad_()
        outs.append(each(inputs))
        outs[-1].square().sum().backward()
        grads.append(inputs.grad)
    return float((outs[0] - outs[1]).abs().max()), float((grads[0] - grads[1]).abs().max())


@pytest.mark.parametrize("kind", ["column", "row"])
def test_a_layer_alone_takes_and_gives_whole_activations_on_request(ranks: World, kind: str) -> None:
    assert all(out < 1e-13 and grad < 1e-12 for out, grad in ranks.run(linear_body, kind))


def loss_body(scale: float) -> tuple[float, float, int]:
    """Ours and torch's loss of large logits; the largest number of elements in one message."""
    axis = TensorAxis()
    owned = VocabSlice(64, axis)
    logits = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0)).double() * scale
    targets = torch.arange(16).view(2, 8) * 4
    ledger.clear()
    ours = vocab_parallel_cross_entropy(logits[..., owned.lo : owned.hi], targets, owned, axis)
    return ours.item(), next_token_loss(logits, targets).item(), max((e["numel"] for e in ledger.entries()), default=0)


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_no_message_of_the_loss_is_larger_than_two_numbers_a_token(ranks: World, scale: float) -> None:
    for ours, wanted, largest in ranks.run(loss_body, scale):
        assert ours == pytest.approx(wanted, rel=1e-13)
        assert largest <= 2 * 16


def dropout_body(sequence: bool, train: bool = True) -> dict[str, Tensor]:
    """What dropout does in each place, and the shared stream's next number."""
    torch.manual_seed(5)
    model = tensor_parallel(MiniGPT(vocab=16, dropout=0.5, **SIZES), sequence_parallel=sequence).train(train)
    block = model.blocks[0]
    with torch.no_grad():
        for name in ("qkv", "proj"):
            block.attn.get_submodule(name).weight.fill_(0.1)  # heads alike, so that only masks tell them apart
    seen: list[Tensor] = []
    block.attn.proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach().clone()))
    torch.manual_seed(7)
    x = torch.ones(1, 8 // (dist.get_world_size() if sequence else 1), 16)
    block.attn(x)
    return {"heads": seen[0], "outside": block.drop(torch.ones(64)), "next": torch.rand(1)}


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_dropout_differs_inside_regions_and_agrees_outside_unless_the_sequence_is_cut(
    two: World, sequence: bool
) -> None:
    first, second = two.run(dropout_body, sequence)
    assert not torch.equal(first["heads"], second["heads"])
    assert torch.equal(first["outside"], second["outside"]) != sequence
    assert torch.equal(first["next"], second["next"])


def test_nothing_is_dropped_or_drawn_in_evaluation(two: World) -> None:
    first, second = two.run(dropout_body, True, False)
    assert torch.equal(first["heads"], second["heads"])
    torch.manual_seed(7)
    assert torch.equal(first["next"], torch.rand(1))


def one_stream_body(wrong: str) -> bool:
    """Are the two ranks' masks alike, though their streams should not be?"""
    shared = contextlib.nullcontext()
    with (
        mock.patch.object(attention, "rank_stream", mock.Mock(return_value=shared))
        if wrong
        else contextlib.nullcontext()
    ):
        heads = dropout_body(False)["heads"]
    both = [torch.empty_like(heads) for _ in range(2)]
    dist.all_gather(both, heads)
    return torch.equal(*both)


def test_heads_that_share_one_stream_would_be_seen(two: World) -> None:
    assert two.run(one_stream_body, "") == [False] * 2
    assert two.run(one_stream_body, "shared") == [True] * 2


def test_a_ranks_own_stream_leaves_no_state_behind() -> None:
    torch.manual_seed(3)
    with rank_stream(TensorAxis(), torch.device("cpu")):
        first = torch.rand(2)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    with rank_stream(TensorAxis(), torch.device("cpu")):
        torch.rand(100)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(3)
    kept = RankDropout(0.5, TensorAxis())(torch.ones(50))
    torch.manual_seed(3)
    assert torch.equal(RankDropout(0.5, TensorAxis())(torch.ones(50)), kept)
    assert not torch.equal(first, torch.rand(2))


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("parts", [1, 2, 4, 5])
def test_parts_join_to_the_whole_they_were_cut_from(blocks: int, dim: int, parts: int) -> None:
    whole_tensor = torch.arange(12.0 * 12).view(12, 12)
    cut = Cut(dim, 12, blocks)
    pieces = [cut.part(whole_tensor, parts, i) for i in range(parts)]
    assert len({p.shape for p in pieces}) == 1
    assert torch.equal(cut.join(pieces), whole_tensor)


def layers_body(sequence: bool) -> bool:
    """Does the cut model, run layer by layer as a pipeline does, give what it gives as one?"""
    model = tensor_parallel(plain_model(0, VOCAB, True), sequence_parallel=sequence)
    ids, _ = batch(VOCAB)
    return torch.equal(nn.Sequential(*layers_of(model))(ids), model(ids))


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_a_pipeline_can_cut_the_cut_model_into_its_layers(two: World, sequence: bool) -> None:
    assert two.run(layers_body, sequence) == [True, True]


def kept_body(sequence: bool, again: bool) -> int:
    """Bytes that one rank keeps for backward at most, of a model of 3.7M parameters."""
    model = MiniGPT(vocab=1024, embed_dim=256, num_heads=4, num_layers=4, seq_len=128)
    model = tensor_parallel(model, sequence_parallel=sequence)
    if again:
        recompute_blocks(model)
    ids = torch.zeros(4, 128, dtype=torch.int64)
    with SavedBytes(model.parameters()) as kept:
        token_loss(model, model(ids), ids).backward()
    return kept.peak


@pytest.mark.slow  # a model of more than a few elements
def test_fewer_bytes_are_kept_for_backward_with_the_sequence_cut_and_fewest_with_recomputation(four: World) -> None:
    megabytes = [max(four.run(kept_body, *how)) / 1e6 for how in ((False, False), (True, False), (True, True))]
    assert megabytes == pytest.approx([16.3, 12.8, 3.3], abs=0.1)  # 36.8 in one process


def refused_body(name: str) -> str:
    model, axis = MiniGPT(vocab=9, **SIZES), TensorAxis()
    ids = torch.zeros(1, 8, dtype=torch.int64)
    calls: dict[str, Callable[[], object]] = {
        "heads": lambda: tensor_parallel(MiniGPT(vocab=9, embed_dim=15, num_heads=3, seq_len=8)),
        "twice": lambda: tensor_parallel(tensor_parallel(model)),
        "ids": lambda: tensor_parallel(model)(ids + 9),
        "targets": lambda: token_loss(tensor_parallel(model), model(ids), ids - 1),
        "gathered logits": lambda: token_loss(tensor_parallel(model), torch.zeros(1, 8, 9), ids),
        "sequence": lambda: tensor_parallel(model, sequence_parallel=True)(ids[:, :7]),
        "features": lambda: ColumnParallelLinear(nn.Linear(2, 3), axis),
        "blocks": lambda: Cut(0, 4, 3),
    }
    try:
        calls[name]()
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("heads", "num_heads is 3, but should be a multiple of 2, the tensor-parallel ranks"),
        ("twice", "the model is cut over ranks already, but should be unsharded"),
        ("ids", "token ids are 9 to 9, but should be 0 to 8"),
        ("targets", "token ids are -1 to -1, but should be 0 to 8"),
        ("gathered logits", "logits are (1, 8, 9), but should be (1, 8, "),
        ("sequence", "size of dimension 1 is 7, but should be a multiple of 2, the tensor-parallel ranks"),
        ("features", "out_features is 3, but should be a multiple of 2, the tensor-parallel ranks"),
        ("blocks", "length is 4, but should be a multiple of the 3 blocks"),
    ],
)
def test_what_cannot_be_cut_is_refused_on_all_ranks(two: World, name: str, said: str) -> None:
    assert all(seen.startswith(said) for seen in two.run(refused_body, name))


def head_body() -> list[int]:
    model = tensor_parallel(MiniGPT(vocab=5, **SIZES))
    head = model.head
    assert isinstance(head, VocabParallelHead)
    return [head.weight.shape[0], head.slice.lo, head.slice.hi, model(torch.zeros(1, 8, dtype=torch.int64)).shape[-1]]


def test_a_vocabulary_of_five_on_four_ranks_leaves_the_last_one_nothing_but_padding(four: World) -> None:
    assert four.run(head_body) == [[2, 0, 2, 2], [2, 2, 4, 2], [2, 4, 5, 1], [2, 5, 5, 0]]
