"""Bytes that one rank holds, by kind: params, grads, optimizer, activations, buffers.

Owns the formulas, exact for what this package does. Leaves measuring to `minigpt_dist/memory.py`.

Params, grads and optimizer follow Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter models",
section 5; activations follow Korthikanti et al. 2022, section 4, with the bytes of each tensor that backward needs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from minigpt_dist.layout import Layout
from minigpt_dist.planner.shape import ModelShape
from minigpt_dist.planner.stages import Share, extremes
from minigpt_dist.planner.techniques import OWN, Techniques, element_bytes, master_bytes


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank.

    optimizer: master copy and two moments. activations: what backward needs, at the most in one step. buffers: what the exchange and
    the update need beside, at the most. total: at the fullest moment, at which not all of these are there.
    """

    params: int
    grads: int
    optimizer: int
    activations: int
    buffers: int
    total: int

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def memory(shape: ModelShape, layout: Layout, batch: int, techniques: Techniques = OWN) -> Memory:
    """The pipeline rank that holds most; `batch` sequences a micro-batch. ValueError for more stages than layers."""
    found = [memory_of(share, shape, layout, batch, techniques) for share in extremes(shape, layout)]
    return max(found, key=lambda each: each.total)


def memory_of(share: Share, shape: ModelShape, layout: Layout, batch: int, techniques: Techniques) -> Memory:
    """One pipeline rank's."""
    P, N, stage = share.numel(shape, layout), layout.dp, layout.zero_stage
    e, master = element_bytes(layout.precision), master_bytes(layout.precision)
    piece = -(-P // N)
    padded = P if stage == 0 else N * piece
    optimizer = 3 * master * piece if stage else (2 if e == master else 3) * master * P
    whole = _whole_gradients(padded, layout, techniques)
    summed = piece * (master if techniques.sum_in_master else e) if stage >= 2 else 0
    held = {
        "params": e * padded if stage < 3 else e if techniques.master_alone else e * piece,
        "grads": whole + summed,
        "optimizer": optimizer if layout.offload == "none" else 0,
    }
    kept, fullest = (activations(share, shape, layout, batch, techniques, loss) for loss in (False, True))
    under_way = _in_backward(share, shape, layout, techniques)
    after = _after_backward(padded, piece, layout, techniques)
    states = sum(held.values())
    # The sum is made when the first bucket has been sent, and whole gradients have gone into buckets by the end of backward.
    later = summed if techniques.sent_at_once(stage, P) == P else 0
    left = whole if stage >= 2 else 0
    total = max(states - later + fullest + under_way, states - left + after)
    return Memory(**held, activations=kept, buffers=max(under_way, after), total=total)


def _whole_gradients(padded: int, layout: Layout, techniques: Techniques) -> int:
    """A rank's own ones: all of a step's, or in stages 2 and 3 those that wait for the last micro-batch."""
    if layout.zero_stage >= 2 and (techniques.sum_each or layout.micro_batches == 1):
        return 0
    return element_bytes(layout.precision) * padded


def _in_backward(share: Share, shape: ModelShape, layout: Layout, techniques: Techniques) -> int:
    """Stages 2 and 3, when activations are most: the bucket that is filled and the one under way, and of stage 3 the unit that backward
    begins with and the next."""
    if layout.zero_stage < 2:
        return 0
    numel, e = share.numel(shape, layout), element_bytes(layout.precision)
    bucket = techniques.sent_at_once(layout.zero_stage, numel)
    width = master_bytes(layout.precision) if techniques.sum_in_master else e
    filled = bucket * width * (1 if bucket == numel else 2)
    block = shape.block_numel(layout.tp)
    units = block + (shape.head_numel(layout) if share.head else block)
    return filled + (units * e if layout.zero_stage == 3 else 0)


def _after_backward(padded: int, piece: int, layout: Layout, techniques: Techniques) -> int:
    """What is alive beside the state when the activations are gone.

    Sum: a gradient narrower than the master is copied to the master's type and received into memory of its own; at the step, one of the
    master's type is received into the parameters' memory. Update: what was received stays, and Adam's denominator is one more vector.
    Collect: a short message is repeated for each receiver.
    """
    e, master, N, stage = element_bytes(layout.precision), master_bytes(layout.precision), layout.dp, layout.zero_stage
    bucket = techniques.sent_at_once(stage, padded)
    denominator = master * min(piece, bucket)
    repeated = e * padded if 0 < stage < 3 and N > 1 and e * padded <= techniques.one_round_bytes else 0
    if stage >= 2:
        return max(master * (bucket + min(N * bucket, padded if N > 1 else piece)), denominator, repeated)
    copied = master * bucket if e < master else 0
    received = master * bucket if stage and (e < master or N == 1) else 0
    return received + max(copied, denominator, repeated)


def activations(
    share: Share, shape: ModelShape, layout: Layout, batch: int, techniques: Techniques, loss: bool = False
) -> int:
    """What this rank keeps for backward when most micro-batches are under way; with `loss`, and the two gradients it begins with.

    With recomputation it is each block's input, and beside them either what the head keeps or what one block has made again.
    """
    whole = block_bytes(shape, layout, batch, techniques)
    head = head_bytes(shape, layout, batch, techniques) if share.head else 0
    if share.head and loss:  # of the logits, and of the logarithms of the probabilities
        head += 2 * logits_bytes(shape, layout, batch)
    positions = 8 * shape.sizes.seq_len if share.embedding else 0
    if not layout.recompute:
        return live_blocks(share, layout) * whole + head + positions
    kept = boundary_bytes(shape, layout, batch, techniques)
    return live_blocks(share, layout) * kept + max(whole - kept, head) + positions


def live_blocks(share: Share, layout: Layout) -> int:
    """Blocks times micro-batches whose activations are held at once.

    All micro-batches under GPipe; pp - rank of them under 1F1B (Narayanan et al. 2019, "PipeDream"); under the interleaved schedule
    as many chunks as run ahead of the first backward (Narayanan et al. 2021, section 2.2).
    """
    M, pp, chunks = layout.micro_batches, layout.pp, len(share.stages)
    if pp == 1:
        return share.blocks
    if layout.schedule == "gpipe":
        return M * share.blocks
    if chunks == 1:
        return min(pp - share.rank, M) * share.blocks
    return _most_ahead(share, pp, M)


def _most_ahead(share: Share, pp: int, M: int) -> int:
    """Most blocks that an interleaved rank holds: `ahead` forwards, then forward and backward in turns.

    Groups of pp micro-batches pass through one chunk after the other, so that after one period all repeats.
    """
    chunks = len(share.stages)
    period = pp * chunks
    forwards = [share.stages[k % period // pp] for k in range(period)]
    ahead = min(2 * (pp - share.rank - 1) + (chunks - 1) * pp, M * chunks)
    live = most = sum(forwards[k % period] for k in range(ahead))
    for k in range(min(period, M * chunks - ahead)):
        live += forwards[(ahead + k) % period]
        most = max(most, live)
        live -= share.stages[chunks - 1 - k % period // pp]
    return most


def boundary_bytes(shape: ModelShape, layout: Layout, batch: int, techniques: Techniques) -> int:
    """The tensor between two blocks, of one micro-batch: what a rank keeps of it, or sends to the next stage."""
    spread = layout.tp if techniques.sequence_parallel else 1
    return batch * shape.sizes.seq_len * shape.sizes.embed_dim * element_bytes(layout.precision) // spread


def block_bytes(shape: ModelShape, layout: Layout, batch: int, techniques: Techniques) -> int:
    """What one block keeps for backward of one micro-batch, without recomputation.

    34 bytes an element of b s h, and the scores, with dropout, 16 bits and one rank (Korthikanti et al. 2022, section 4.1). Tensor
    parallelism alone does not cut the inputs and outputs of both LayerNorms with their statistics, nor dropout's masks (a byte each, as
    fused kernels keep them; torch's on a CPU are wider). It cuts queries, keys, values, attention's output and scores, and the MLP's
    hidden vectors before and after GELU.
    """
    sizes, e, t = shape.sizes, element_bytes(layout.precision), layout.tp
    tokens = batch * sizes.seq_len
    spread = t if techniques.sequence_parallel else 1
    width = tokens * sizes.embed_dim
    masks = 2 * width if sizes.dropout else 0
    between = (4 * width * e + 4 * tokens * e + masks) // spread
    inside = (4 + 2 * sizes.mlp_ratio) * width * e // t
    return between + inside + _scores(shape, layout, batch, techniques)


def _scores(shape: ModelShape, layout: Layout, batch: int, techniques: Techniques) -> int:
    """Attention's b a s^2 scores, after softmax and after dropout with its mask, or with a fused kernel one float32 a row."""
    sizes, e = shape.sizes, element_bytes(layout.precision)
    rows = batch * sizes.num_heads * sizes.seq_len // layout.tp
    if techniques.fused_attention:
        return rows * max(e, 4)
    return rows * sizes.seq_len * (2 * e + 1 if sizes.dropout else e)


def head_bytes(shape: ModelShape, layout: Layout, batch: int, techniques: Techniques) -> int:
    """The last LayerNorm's input and output with statistics, the logarithms of the probabilities, and the loss's weight."""
    sizes, e = shape.sizes, element_bytes(layout.precision)
    tokens = batch * sizes.seq_len
    spread = layout.tp if techniques.sequence_parallel else 1
    kept = (2 * tokens * sizes.embed_dim + 2 * tokens) * e // spread
    return kept + logits_bytes(shape, layout, batch) + max(e, 4)


def logits_bytes(shape: ModelShape, layout: Layout, batch: int) -> int:
    """One number a token and word of the vocabulary, in the loss's type: float32 for half types."""
    vocab = layout.padded_vocab(shape.sizes.vocab) // layout.tp
    return batch * shape.sizes.seq_len * vocab * max(element_bytes(layout.precision), 4)
