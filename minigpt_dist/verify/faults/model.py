"""Faults of the model and of the corpus."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minigpt_dist.model import Block, CausalSelfAttention, MiniGPT
from minigpt_dist.verify.faults.catalogue import Names, fault

_WRONG = {"check": "model", "stage": "model", "world_size": 1}


def _with_attention(kind: type[CausalSelfAttention]) -> Names:
    """MiniGPT with another attention in every block."""

    class Model(MiniGPT):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            for block in self.blocks:
                block.attn.__class__ = kind

    return {"MiniGPT": Model}


def _attend(self: CausalSelfAttention, x: Tensor, **how: Any) -> Tensor:
    B, S, E = x.shape
    q, k, v = self.qkv(x).view(B, S, 3, self.num_heads, E // self.num_heads).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(q, k, v, **how)
    return self.proj(out.transpose(1, 2).reshape(B, S, E))  # type: ignore[no-any-return]  # nn.Module call is Any


@fault(source="is_causal forgotten", needs="a later token that changes", **_WRONG)
def no_causal_mask() -> Names:
    """Attention sees later positions."""

    class Attention(CausalSelfAttention):
        def forward(self, x: Tensor) -> Tensor:
            return _attend(self, x)

    return _with_attention(Attention)


@fault(source="triu(diagonal=2)", needs="a later token that changes", **_WRONG)
def causal_mask_off_by_one() -> Names:
    """The mask lets each position see the next one."""

    class Attention(CausalSelfAttention):
        def forward(self, x: Tensor) -> Tensor:
            S = x.shape[1]
            return _attend(self, x, attn_mask=torch.ones(S, S, dtype=torch.bool, device=x.device).tril(1))

    return _with_attention(Attention)


@fault(source="TrainCheck C17, batch dimensions merged", needs="a batch of more than one", **_WRONG)
def batch_is_one_long_sequence() -> Names:
    """Sequences of a batch are attended to as one: a sequence sees those before it."""

    class Attention(CausalSelfAttention):
        def forward(self, x: Tensor) -> Tensor:
            return _attend(self, x.reshape(1, -1, x.shape[2]), is_causal=True).view(x.shape)

    return _with_attention(Attention)


@fault(source="the score's scale left out", needs="the same parameters in a written-out model", **_WRONG)
def attention_without_scale() -> Names:
    """Scores are not divided by the root of the head's width."""

    class Attention(CausalSelfAttention):
        def forward(self, x: Tensor) -> Tensor:
            return _attend(self, x, is_causal=True, scale=1.0)

    return _with_attention(Attention)


@fault(source="heads never split", needs="the same parameters in a written-out model", **_WRONG)
def one_head_instead_of_four() -> Names:
    """Attention has one head of the full width."""

    class Attention(CausalSelfAttention):
        def forward(self, x: Tensor) -> Tensor:
            self.num_heads = 1
            return _attend(self, x, is_causal=True)

    return _with_attention(Attention)


@fault(source="Vaswani et al. 2017 in place of Xiong et al. 2020", needs="LayerNorm before the sublayers", **_WRONG)
def post_norm() -> Names:
    """LayerNorm comes after the residual, not before the sublayer."""

    class After(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = self.ln1(x + self.attn(x))
            return self.ln2(x + self.mlp(x))  # type: ignore[no-any-return]  # nn.Module call is Any

    return _with_block(After)


def _with_block(kind: type[Block]) -> Names:
    class Model(MiniGPT):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            for block in self.blocks:
                block.__class__ = kind

    return {"MiniGPT": Model}


@fault(source="the skip connection forgotten", needs="the same parameters in a written-out model", **_WRONG)
def no_residual_around_the_mlp() -> Names:
    """The MLP's output replaces its input."""

    class Bare(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attn(self.ln1(x))
            return self.mlp(self.ln2(x))  # type: ignore[no-any-return]  # nn.Module call is Any

    return _with_block(Bare)


@fault(source="[block] * num_layers", needs="a count of parameters", **_WRONG)
def blocks_share_their_weights() -> Names:
    """All blocks are one object."""

    class Model(MiniGPT):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.blocks = nn.ModuleList([self.blocks[0]] * len(self.blocks))

    return {"MiniGPT": Model}


@fault(source="weight tying by habit", needs="a count of parameters", **_WRONG)
def head_tied_by_mistake() -> Names:
    """The head shares the token embedding's weight."""

    class Model(MiniGPT):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "tie_head": True})

    return {"MiniGPT": Model}


@fault(source="positions forgotten", needs="a constant sequence", **_WRONG)
def positions_not_embedded() -> Names:
    """The position embedding is there and never added."""

    class Model(MiniGPT):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.tok_embed(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(self.ln_f(x))  # type: ignore[no-any-return]  # nn.Module call is Any

    return {"MiniGPT": Model}


@fault(source="TrainCheck C16, huggingface/transformers#33844", needs="two passes in eval mode", **_WRONG)
def dropout_in_eval() -> Names:
    """Dropout of 0.1 acts whatever mode the model is in."""

    class Model(MiniGPT):
        def forward(self, ids: Tensor) -> Tensor:
            return F.dropout(super().forward(ids), 0.1, training=True)

    return {"MiniGPT": Model}


@fault(source="a softmax before cross_entropy, which takes logits", needs="logits below zero", **_WRONG)
def probabilities_instead_of_logits() -> Names:
    """The output went through a softmax."""

    class Model(MiniGPT):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids).softmax(-1)

    return {"MiniGPT": Model}


@fault(source="TrainCheck C14, huggingface/transformers#17877", needs="two passes over one model", **_WRONG)
def weights_drawn_anew_in_forward() -> Names:
    """The head is initialised again at each forward pass."""

    class Model(MiniGPT):
        def forward(self, ids: Tensor) -> Tensor:
            self.head.reset_parameters()
            return super().forward(ids)

    return {"MiniGPT": Model}
