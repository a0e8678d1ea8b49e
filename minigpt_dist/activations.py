"""Activations: the bytes that autograd keeps from forward to backward, counted as they are, and foretold by formula.

Owns the counter and MiniGPT's formula. Leaves parameters, gradients and optimizer state to `memory.py`.

The formula is that of Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", section 4.1, for this
model. Theirs is sbh * (34 + 5as/h) bytes a block, of 2 bytes an element: 16 tensors of s*b*h elements, two dropout masks of 1 byte,
and 5as/h for attention that keeps its s x s matrices. Here dropout is off, attention is fused (it keeps one number a head and token, the
log of its softmax's sum, in place of the matrices), and LayerNorm's mean and 1/deviation, which theirs leaves out, are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from types import TracebackType

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from minigpt_dist.config import ModelConfig


class SavedBytes:
    """Bytes kept for backward: `now`, and `peak`, the most at once. What is saved inside the context counts until autograd frees it.

    Each storage counts once, however many operations keep it. besides: tensors whose storages do not count, such as parameters. Token
    ids (int64) are data and do not count. Changes no bit of a result.
    """

    def __init__(self, besides: Iterable[Tensor] = ()) -> None:
        self.now = self.peak = 0
        self._besides = {t.untyped_storage().data_ptr() for t in besides}
        self._keepers = Counter[int]()
        self._hooks = saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._hooks.__exit__(kind, error, tb)

    def _pack(self, tensor: Tensor) -> Tensor | _Kept:
        tensor = tensor.detach()  # an operation's output, kept by the operation, would never be freed
        storage = tensor.untyped_storage()
        if tensor.dtype == torch.int64 or storage.data_ptr() in self._besides:
            return tensor
        self._keepers[storage.data_ptr()] += 1
        if self._keepers[storage.data_ptr()] == 1:
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
        return _Kept(tensor, self)

    def release(self, tensor: Tensor) -> None:
        """One keeper of `tensor` has let go."""
        storage = tensor.untyped_storage()
        self._keepers[storage.data_ptr()] -= 1
        if not self._keepers[storage.data_ptr()]:
            self.now -= storage.nbytes()


class _Kept:
    """A saved tensor: says so when autograd lets go of it. While it lives, no other storage can have its address."""

    def __init__(self, tensor: Tensor, count: SavedBytes) -> None:
        self.tensor, self._count = tensor, count

    def __del__(self) -> None:
        self._count.release(self.tensor)


def _unpack(kept: Tensor | _Kept) -> Tensor:
    return kept.tensor if isinstance(kept, _Kept) else kept


def layer_activations(model: ModelConfig, batch: int, dtype: torch.dtype) -> list[int]:
    """Bytes kept by each of MiniGPT's layers (embedding, every block, head with loss) for `batch` sequences, layers one after another.

    With B sequences of S tokens, E channels, h heads, V words, and d bytes an element: a block keeps 16 BSE d for the inputs of its two
    LayerNorms, of qkv, attention (q, k, v: 3), the output projection, the MLP's first product, GELU (4) and second product (4), and the
    outputs that are the next one's input only once; 4 BS for mean and 1/deviation of two LayerNorms, and hBS for attention. The head keeps
    2 BSE d for its LayerNorm and product, 2 BS, BSV for the loss, and one number: the sum of the loss's weights. The embedding keeps
    token ids. Attention's number a head and the loss are float32 in half types. ValueError with dropout, whose masks depend on the kernel.
    """
    if model.dropout:
        raise ValueError(f"dropout is {model.dropout}, but should be 0 for the formula of activations")
    tokens, width = batch * model.seq_len, torch.finfo(dtype).bits // 8
    hidden, norm = tokens * model.embed_dim * width, 2 * tokens * width
    single = max(width, 4)
    attention = tokens * model.num_heads * single
    block = (8 + 2 * model.mlp_ratio) * hidden + 2 * norm + attention
    head = 2 * hidden + norm + (tokens * model.vocab + 1) * single
    return [0, *[block] * model.num_layers, head]
