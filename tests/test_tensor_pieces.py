"""The pieces of tensor parallelism alone: operators, layers, the loss, cuts, layers of a pipeline, and what cannot be cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from tensor_cases import SIZES, VOCAB, batch, plain_model
from torch import Tensor, nn

from minigpt_dist.activations import SavedBytes
from minigpt_dist.cut import Cut
from minigpt_dist.launch import World, ledger
from minigpt_dist.loss import next_token_loss
from minigpt_dist.model import MiniGPT
from minigpt_dist.parallel.pipeline import layers_of
from minigpt_dist.parallel.recompute import recompute_blocks
from minigpt_dist.parallel.tensor import TensorAxis, operators, tensor_parallel, token_loss
from minigpt_dist.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from minigpt_dist.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from minigpt_dist.parallel.tensor.vocabulary import VocabParallelHead, VocabSlice


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
