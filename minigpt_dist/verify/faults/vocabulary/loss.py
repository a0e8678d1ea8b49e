"""Faults of the cross-entropy of logits that are cut over ranks: maximum, target, gradient, padding and traffic."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from minigpt_dist.verify.faults.catalogue import Names, fault
from minigpt_dist.verify.faults.layers import ALONE, CrossEntropy, entropy_of, pair, same, total


def _entropy(kind: type[CrossEntropy]) -> Names:
    return {"vocab_parallel_cross_entropy": entropy_of(kind)}


@fault(
    source="NVIDIA/Megatron-LM, vocab_parallel_cross_entropy: the maximum is all-reduced before anything is subtracted",
    needs="logits whose maximum is elsewhere",
    check="tensor.cross_entropy",
    stage="forward",
    tensor="losses",
    green=("tensor.embedding", "tensor.column"),
    equivalent=ALONE,
)
def maximum_is_each_ranks_own() -> Names:
    """Every rank subtracts the maximum of its own logits, and adds up exponentials of different scales."""

    class Wrong(CrossEntropy):
        def top(self, logits: Tensor) -> Tensor:
            return logits.detach().amax(1)

    return _entropy(Wrong)


@fault(
    source="softmax without its maximum",
    needs="logits above 710",
    check="tensor.large_logits",
    stage="forward",
    tensor="losses",
    green=("tensor.cross_entropy", "tensor.tied"),
)
def maximum_is_not_subtracted() -> Names:
    """Exponentials are taken of the logits as they are, and overflow."""

    class Wrong(CrossEntropy):
        def top(self, logits: Tensor) -> Tensor:
            return torch.zeros_like(logits[:, 0])

    return _entropy(Wrong)


@fault(
    source="NVIDIA/Megatron-LM, vocab_parallel_cross_entropy: what its target mask is for",
    needs="a target on another rank",
    check="tensor.cross_entropy",
    stage="forward",
    tensor="losses",
    equivalent=ALONE,
)
def targets_elsewhere_are_not_masked() -> Names:
    """A rank without the target adds the logit at its own edge."""

    class Wrong(CrossEntropy):
        def here(self, targets: Tensor) -> Tensor:
            return torch.ones_like(targets, dtype=torch.bool)

    return _entropy(Wrong)


@fault(
    source="TTrace (arXiv 2506.09280), bug 1, on the other side of the model",
    needs="the last token of a shard",
    check="tensor.cross_entropy",
    stage="forward",
    tensor="losses",
    green=("tensor.column",),
)
def target_at_the_shards_last_token_is_nobodys() -> Names:
    """A target that is the last token of a shard counts as another rank's: no rank adds its logit."""

    class Wrong(CrossEntropy):
        def here(self, targets: Tensor) -> Tensor:
            return (targets >= self.lo) & (targets < self.hi - 1)

    return _entropy(Wrong)


@fault(
    source="torch.distributed.nn.functional.all_reduce: its backward is a sum over ranks too",
    needs="a gradient",
    check="tensor.cross_entropy",
    stage="backward",
    tensor="gradient of logits",
    equivalent=ALONE,
)
def loss_gradient_counts_once_a_rank() -> Names:
    """Sums over ranks are differentiated as sums over ranks: losses are right, and their gradients N times too large."""

    class Wrong(CrossEntropy):
        def summed(self, part: Tensor) -> Tensor:
            return pair(part, total, total)

    return _entropy(Wrong)


@fault(
    source="a softmax whose denominator is summed outside of autograd",
    needs="a gradient",
    check="tensor.cross_entropy",
    stage="backward",
    tensor="gradient of logits",
)
def loss_gradient_forgets_the_softmax() -> Names:
    """The sum of exponentials is exchanged on detached tensors: the gradient is that of the target's logit alone."""

    class Wrong(CrossEntropy):
        def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
            shifted = logits - self.top(logits)[:, None]
            return total(shifted.exp().sum(1)).log() - self.summed(self.target(shifted, targets))

    return _entropy(Wrong)


@fault(
    source="unslothai/unsloth#10616",
    needs="a vocabulary that N does not divide",
    check="tensor.cross_entropy",
    stage="forward",
    tensor="losses",
    green=("tensor.large_logits", "tensor.tied"),
    equivalent=ALONE,
)
def padded_logits_get_probability() -> Names:
    """Logits are padded with zeros to ceil(V/N) a rank, and the padding takes part in the sum of exponentials."""

    class Wrong(CrossEntropy):
        def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
            return super().__call__(F.pad(logits, (0, -(-self.vocab // self.world_size) - logits.shape[1])), targets)

    return _entropy(Wrong)


@fault(
    source="NVIDIA/Megatron-LM#7452",
    needs="two ranks",
    check="tensor.cross_entropy",
    stage="forward",
    tensor="losses",
    equivalent=ALONE,
)
def gathered_logits_into_the_parallel_loss() -> Names:
    """Logits of all ranks are added up on every rank, and then over ranks once more: losses are log(N) too large."""

    class Wrong(CrossEntropy):
        def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
            shifted = logits - self.top(logits)[:, None]
            whole = self.summed(self.summed(shifted.exp().sum(1)))
            return whole.log() - self.summed(self.target(shifted, targets))

    return _entropy(Wrong)


@fault(
    source="Shoeybi et al. 2019, section 3: logits of a batch are b x s x v numbers, their losses b x s",
    needs="a count of bytes",
    check="tensor.traffic",
    stage="forward",
    green=("tensor.cross_entropy", "tensor.large_logits"),
)
def logits_are_gathered_for_the_loss() -> Names:
    """Every rank collects all logits, and computes the whole loss: right, and what is sent grows with the vocabulary."""

    class Wrong(CrossEntropy):
        def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
            size = -(-self.vocab // self.world_size)
            mine = logits.new_zeros(len(logits), size * self.world_size)
            mine = torch.cat([mine[:, : self.lo], logits, mine[:, self.hi :]], 1)
            return F.cross_entropy(pair(mine, total, same)[:, : self.vocab], targets, reduction="none")

    return _entropy(Wrong)


@fault(
    source="max(1, rows) where a shard may be empty",
    needs="a rank without tokens",
    check="tensor.empty_shard",
    stage="forward",
    world_size=3,
    rank=0,
    tensor="losses",
    green=("tensor.cross_entropy", "tensor.large_logits"),
    equivalent=ALONE,
)
def rank_without_tokens_brings_a_logit() -> Names:
    """A shard has at least one row: where a rank has no token, a logit of zero takes part in the sum of exponentials."""

    class Wrong(CrossEntropy):
        def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
            return super().__call__(logits if logits.shape[1] else F.pad(logits, (0, 1)), targets)

    return _entropy(Wrong)
