"""A layout: how one training run is spread over ranks, as a value.

Owns the numbers and the refusal of those that cannot be, with the reason. Leaves which rank sits where, and the groups, to
`parallel/mesh.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from minigpt_dist.require import require, require_count, require_one_of

if TYPE_CHECKING:
    from minigpt_dist.config import ModelConfig

ZERO_STAGES = (0, 1, 2, 3)
PRECISIONS = ("float32", "float64", "bfloat16", "float16")
OFFLOADS = ("none", "memory", "disk")
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2}  # stages a rank, by schedule


@dataclass(frozen=True)
class Layout:
    """One run's spread over dp * tp * pp ranks.

    dp, tp, pp: ranks along the data, tensor and pipeline axis.
    zero_stage: what is cut over the data axis: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too
        (Rajbhandari et al. 2020, section 5).
    precision: dtype of parameters, activations and gradients; the 16-bit ones train a float32 master copy.
    recompute: are a block's activations computed again in backward, rather than kept?
    offload: where the optimizer's shard lives: "none" is with the parameters, "memory" the host's, "disk" a mapped file.
    micro_batches: a step's micro-batches on each data rank. schedule: in which order a pipeline runs them.

    ValueError for numbers that no model could be trained with; `require_fits` for those that one model cannot.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero_stage: int = 1
    precision: str = "float32"
    recompute: bool = False
    offload: str = "none"
    micro_batches: int = 1
    schedule: str = "1f1b"

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "micro_batches"):
            require_count(name, getattr(self, name))
        require_one_of("zero_stage", self.zero_stage, ZERO_STAGES)
        require_one_of("precision", self.precision, PRECISIONS)
        require_one_of("offload", self.offload, OFFLOADS)
        require_one_of("schedule", self.schedule, tuple(CHUNKS))
        require(isinstance(self.recompute, bool), "recompute", self.recompute, "True or False")
        gathering = self.zero_stage >= 2 and self.pp > 1
        reason = "as a stage runs several micro-batches at once, and stages 2 and 3 would exchange at each of them"
        require(not gathering, "zero_stage", self.zero_stage, f"0 or 1 where pp is above 1 ({self.pp}), {reason}")
        require(self.offload == "none" or self.zero_stage > 0, "offload", self.offload, "'none' where zero_stage is 0")
        whole = self.schedule != "interleaved" or self.micro_batches % self.pp == 0
        require(whole, "micro_batches", self.micro_batches, f"a multiple of pp ({self.pp}) for an interleaved schedule")

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def stages(self) -> int:
        """Pipeline stages in all: an interleaved schedule has several a rank."""
        return self.pp * CHUNKS[self.schedule] if self.pp > 1 else 1

    def padded_vocab(self, vocab: int) -> int:
        """The least multiple of tp that holds `vocab` rows: an embedding is cut into equal parts, the last ones padded."""
        return -(-vocab // self.tp) * self.tp

    def require_fits(self, model: ModelConfig, world_size: int) -> None:
        """ValueError unless `model` can be trained with this layout on `world_size` ranks.

        Attention is cut by heads, the MLP by its hidden units, a pipeline by layers: embedding, blocks, head.
        """
        axes = f"dp * tp * pp = {self.dp} * {self.tp} * {self.pp}"
        require(self.world_size == world_size, axes, self.world_size, f"{world_size}, the number of ranks")
        for name, count in (("num_heads", model.num_heads), ("mlp hidden units", model.mlp_ratio * model.embed_dim)):
            require(count % self.tp == 0, name, count, f"a multiple of tp ({self.tp})")
        layers = model.num_layers + 2
        at_most = f"at most {layers}: an embedding, {model.num_layers} blocks and a head"
        require(self.stages <= layers, "number of pipeline stages", self.stages, at_most)
