"""What a run is: the model's sizes, the training settings, and the checks on both.

Owns every number a user can set and the one-line errors for wrong ones. Leaves what the numbers do to the pieces.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from minigpt_dist.layout import CHUNKS, Layout
from minigpt_dist.require import require, require_count, require_one_of

DTYPES = ("float32", "float64", "bfloat16", "float16")
REDUCTIONS = ("sum", "exact")
GUARDS = ("off", "replay", "skip")
STAGES = (1, 2, 3)  # of ZeRO


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of MiniGPT. The defaults give 29,824 parameters (GPT-2's block, pre-LayerNorm, untied head)."""

    vocab: int = 64
    embed_dim: int = 32
    num_heads: int = 4
    num_layers: int = 2
    seq_len: int = 16
    mlp_ratio: int = 4
    dropout: float = 0.0
    tie_head: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab", "embed_dim", "num_heads", "num_layers", "seq_len", "mlp_ratio"):
            require_count(name, getattr(self, name))
        require(
            self.embed_dim % self.num_heads == 0,
            "embed_dim",
            self.embed_dim,
            f"a multiple of num_heads ({self.num_heads})",
        )
        require(0.0 <= self.dropout < 1.0, "dropout", self.dropout, "in [0, 1)")

    def numel(self, tp: int = 1) -> int:
        """P: the number of parameters, in elements; of `tp` tensor-parallel ranks, those that each holds, vocabulary padded.

        Projections, the MLP's weights and its first bias are cut; LayerNorms, its second bias and positions are not.
        """
        E, hidden = self.embed_dim, self.mlp_ratio * self.embed_dim
        block = 5 * E + (4 * E * E + (E * hidden + hidden) + hidden * E) // tp
        tokens = -(-self.vocab // tp) * E
        return tokens + self.seq_len * E + self.num_layers * block + 2 * E + (0 if self.tie_head else tokens)


@dataclass(frozen=True)
class TrainConfig:
    """One training run.

    `batch` is sequences a micro-batch; a data-parallel rank reads `micro_batches` of them a step, so the global batch is
    dp * micro_batches * batch sequences. `checkpoint_step` counts completed updates; 0 writes none; more are written
    every `checkpoint_every` updates and every `checkpoint_minutes` of wall clock, where those are not 0.
    guard: what becomes of a step whose loss or gradients are not finite on any rank, or whose loss is above `spike` times the
    last: "off" nothing; "replay" and "skip" go back to the last checkpoint, at most `max_rollbacks` times, and read the same
    batches again or pass over the bad one.
    tp: ranks that share each layer of a replica (tensor parallelism); sequence_parallel: they cut the sequence outside of it too.
    pp: ranks that share the layers of a replica out (pipeline parallelism), and the schedule in which they run a step's micro-batches.
    recompute: blocks compute their activations again in backward. loss_scale: the first, for dtype
    "float16"; it changes by itself.
    zero_stage: what is cut over the ranks: 1 the optimizer's state, 2 gradients too, 3 parameters too. The numbers are the same.
    max_norm: the mean gradient is scaled down to this 2-norm over all parameters; 0 leaves it as it is.
    offload: where the optimizer's shard lives: "none" is with the parameters, "memory" the host's, "disk" a file. The numbers are the same.
    overlap: do ranks exchange while they compute, in ZeRO's stages 2 and 3 and in a pipeline? The numbers are the same.
    """

    world_size: int = 4
    steps: int = 20
    seed: int = 0
    batch: int = 4
    micro_batches: int = 1
    lr: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    checkpoint_step: int = 10
    dtype: str = "float32"
    reduction: str = "sum"
    text: str | None = None
    checkpoint_every: int = 0
    checkpoint_minutes: float = 0.0
    guard: str = "off"
    max_rollbacks: int = 3
    spike: float = 2.0
    tp: int = 1
    pp: int = 1
    schedule: str = "1f1b"
    sequence_parallel: bool = False
    recompute: bool = False
    loss_scale: float = 2.0**16
    zero_stage: int = 1
    max_norm: float = 0.0
    offload: str = "none"
    overlap: bool = True
    model: ModelConfig = field(default_factory=ModelConfig)

    def __post_init__(self) -> None:
        for name in ("world_size", "steps", "batch", "micro_batches", "tp", "pp"):
            require_count(name, getattr(self, name))
        for name in ("seed", "checkpoint_step", "checkpoint_every", "max_rollbacks"):
            require_count(name, getattr(self, name), least=0)
        require(self.loss_scale >= 1, "loss_scale", self.loss_scale, "a finite number of at least 1")
        for name in ("lr", "eps", "weight_decay", "max_norm", "checkpoint_minutes", "loss_scale"):
            value = getattr(self, name)
            require(
                isinstance(value, (int, float)) and math.isfinite(value) and value >= 0,
                name,
                value,
                "a finite number >= 0",
            )
        require(
            len(self.betas) == 2 and all(0.0 <= b < 1.0 for b in self.betas),
            "betas",
            self.betas,
            "two numbers in [0, 1)",
        )
        require_one_of("dtype", self.dtype, DTYPES)
        require_one_of("guard", self.guard, GUARDS)
        require(math.isfinite(self.spike) and self.spike > 1, "spike", self.spike, "a finite number above 1")
        require_one_of("reduction", self.reduction, REDUCTIONS)
        replica, axes = (self.tp * self.pp, "tp * pp") if self.pp > 1 else (self.tp, "tp")
        require(self.world_size % replica == 0, "world_size", self.world_size, f"a multiple of {axes} ({replica})")
        require_one_of("zero_stage", self.zero_stage, STAGES)
        require_one_of("schedule", self.schedule, tuple(CHUNKS))
        self.layout.require_fits(self.model, self.world_size)
        wanted = "'sum' where pp is above 1, as stages run several micro-batches at once"
        require(self.pp == 1 or self.reduction == "sum", "reduction", self.reduction, wanted)
        even = not self.sequence_parallel or self.model.seq_len % self.tp == 0
        require(even, "seq_len", self.model.seq_len, f"a multiple of tp ({self.tp}), where the sequence is cut")

    @property
    def dp(self) -> int:
        """Data-parallel ranks: replicas of the model."""
        return self.world_size // (self.tp * self.pp)

    @property
    def layout(self) -> Layout:
        """How the run is spread over ranks."""
        return Layout(
            self.dp,
            self.tp,
            self.pp,
            zero_stage=self.zero_stage,
            precision=self.dtype,
            recompute=self.recompute,
            offload=self.offload,
            micro_batches=self.micro_batches,
            schedule=self.schedule,
        )

    @property
    def block_tokens(self) -> int:
        """Tokens one micro-batch reads: B*S inputs and, shifted by one, B*S targets."""
        return self.batch * self.model.seq_len + 1

    @property
    def total_tokens(self) -> int:
        """Tokens the whole run reads at most: skipped batches too."""
        spare = self.max_rollbacks if self.guard == "skip" else 0
        return (self.steps + spare) * self.dp * self.micro_batches * self.block_tokens

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for a manifest, a trace header or a rank in another process."""
        return {**asdict(self), "betas": list(self.betas)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TrainConfig:
        """The inverse of `to_dict`; unknown keys raise TypeError."""
        rest = {k: v for k, v in data.items() if k not in ("model", "betas")}
        beta1, beta2 = data["betas"]
        return cls(model=ModelConfig(**data["model"]), betas=(beta1, beta2), **rest)
