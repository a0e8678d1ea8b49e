"""How a stack does its work, where that changes bytes or seconds: facts about an implementation, not about a layout."""

from __future__ import annotations

from dataclasses import dataclass

ELEMENT_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Techniques:
    """The defaults are this package's.

    fused_attention: are scores never stored (Dao et al. 2022, "FlashAttention")? Else they are kept for backward.
    sequence_parallel: are the regions between tensor-parallel ones cut over the sequence (Korthikanti et al. 2022, "Reducing activation
        recomputation in large transformer models", section 4.2.2)?
    bucket, backward_bucket: elements of gradient that are copied and sent at once, at the step by stages 0 and 1, and in backward by
        stages 2 and 3; None: all.
    one_round_bytes: up to how many an all-gather takes one round, for which a rank repeats its slice.
    sum_in_master: are gradients summed over ranks in the master copy's type? Else in their own.
    sum_each: do stages 2 and 3 sum the gradients of each micro-batch over ranks? Else a rank adds up its own, whole, until the last.
    master_alone: is stage 3's share of the parameters the master copy, with none in their own type beside it?
    """

    fused_attention: bool = True
    sequence_parallel: bool = True
    bucket: int | None = None
    backward_bucket: int | None = 2**20  # parallel/zero.py: bucket_mb, of float32
    one_round_bytes: int = 2**20  # parallel/collectives.py: ONE_ROUND_BYTES
    sum_in_master: bool = True
    sum_each: bool = False
    master_alone: bool = True

    def sent_at_once(self, zero_stage: int, numel: int) -> int:
        """Elements of a gradient of `numel` that are copied and sent at once."""
        most = self.backward_bucket if zero_stage >= 2 else self.bucket
        return numel if most is None else min(most, numel)


OWN = Techniques()
# What the large runs of 2021 and 2022 had: DeepSpeed's default bucket, no kernel of the kind that came after them.
MEGATRON_2021 = Techniques(
    fused_attention=False,
    sequence_parallel=False,
    bucket=500_000_000,
    backward_bucket=500_000_000,
    one_round_bytes=0,
    sum_in_master=False,
    sum_each=True,
    master_alone=False,
)


def element_bytes(precision: str) -> int:
    """Bytes of an element of parameters, activations and gradients."""
    return ELEMENT_BYTES[precision]


def master_bytes(precision: str) -> int:
    """Bytes of an element of the master copy and of each moment: float32's, or float64's where all is float64."""
    return max(ELEMENT_BYTES[precision], 4)
