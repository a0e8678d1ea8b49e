"""A model's shape: how many parameters and floating-point operations it has, in all and on one rank.

Owns the counts. Leaves what they cost in bytes to `memory.py`, and in seconds to `duration.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from minigpt_dist.config import ModelConfig
from minigpt_dist.layout import Layout

ARCHITECTURES = ("minigpt", "gpt")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only transformer.

    sizes: vocabulary, width and so on. attention_bias: have the attention's projections biases? This package's have none, GPT-2's and
    GPT-3's do. All count in elements; h is sizes.embed_dim.
    """

    sizes: ModelConfig
    attention_bias: bool = False

    @classmethod
    def of(cls, architecture: str, sizes: ModelConfig) -> ModelShape:
        """ "minigpt": the model of this package. "gpt": with biases throughout. ValueError for another name."""
        if architecture not in ARCHITECTURES:
            raise ValueError(f"architecture is {architecture!r}, but should be one of {', '.join(ARCHITECTURES)}")
        return cls(sizes, attention_bias=architecture == "gpt")

    @property
    def architecture(self) -> str:
        return "gpt" if self.attention_bias else "minigpt"

    def block_numel(self, tp: int = 1) -> int:
        """Parameters of one block on one of `tp` ranks (Shoeybi et al. 2019, "Megatron-LM", section 3): the query, key, value and first
        MLP matrices are cut by columns, biases included, the other two by rows; their biases and LayerNorms are on all ranks.

        12 h^2 + 13 h with one rank, an MLP of 4 h and biases.
        """
        h, r = self.sizes.embed_dim, self.sizes.mlp_ratio
        cut = 4 * h * h + 2 * r * h * h + r * h + (3 * h if self.attention_bias else 0)
        return cut // tp + 5 * h + (h if self.attention_bias else 0)

    def vocab_numel(self, layout: Layout) -> int:
        """A rank's part of the matrix from tokens to vectors, or back: cut by rows of the padded vocabulary."""
        return layout.padded_vocab(self.sizes.vocab) // layout.tp * self.sizes.embed_dim

    def embedding_numel(self, layout: Layout) -> int:
        """A rank's part of the embedding, learned positions included, which are on all ranks."""
        return self.vocab_numel(layout) + self.sizes.seq_len * self.sizes.embed_dim

    def head_numel(self, layout: Layout) -> int:
        """A rank's part of the head: a LayerNorm, and the matrix, of which a tied one needs a copy of its own where stages are many."""
        shared = self.sizes.tie_head and layout.pp == 1
        return 2 * self.sizes.embed_dim + (0 if shared else self.vocab_numel(layout))

    @property
    def numel(self) -> int:
        """P: all parameters."""
        one = Layout()
        return self.sizes.num_layers * self.block_numel() + self.embedding_numel(one) + self.head_numel(one)

    def block_flops(self, batch: int) -> int:
        """Forward of one block over `batch` sequences: 24 b s h^2 + 4 b s^2 h for an MLP of 4 h (Narayanan et al. 2021, appendix).

        Only matrix products count, two operations a multiply-add. Backward takes twice as many.
        """
        h, s, r = self.sizes.embed_dim, self.sizes.seq_len, self.sizes.mlp_ratio
        return batch * s * (8 + 4 * r) * h * h + 4 * batch * s * s * h

    def head_flops(self, batch: int) -> int:
        """Forward of the head over `batch` sequences: 2 b s h V."""
        return 2 * batch * self.sizes.seq_len * self.sizes.embed_dim * self.sizes.vocab

    def step_flops(self, batch: int, recompute: bool) -> int:
        """One step over a global batch of `batch` sequences; with recomputation, blocks run forward twice (Narayanan et al. 2021,
        equation 3: 96 B s l h^2 (1 + s/6h + V/16lh))."""
        blocks = self.sizes.num_layers * self.block_flops(batch)
        return (4 if recompute else 3) * blocks + 3 * self.head_flops(batch)
