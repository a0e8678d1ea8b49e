"""AdamW on any slice of a flat vector.

Owns the formula: elementwise, so the bits of an element do not depend on where its slice begins or ends.
Leaves sharding to `zero.py`.
"""

from __future__ import annotations

from torch import Tensor


def adamw_(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One update in place, all tensors 1-D of equal length and dtype; `step` counts from 1.

    Adam with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2), in torch.optim.AdamW's order of operations,
    so that the result is bit-equal to torch's: m = m + (g - m)(1-b1); v = b2 v + (1-b2) g^2;
    p = (1 - lr wd) p - lr/(1-b1^t) * m / (sqrt(v)/sqrt(1-b2^t) + eps).
    """
    beta1, beta2 = betas
    if weight_decay:
        master.mul_(1 - lr * weight_decay)
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    step_size = lr / (1 - beta1**step)
    denominator = exp_avg_sq.sqrt().div_((1 - beta2**step) ** 0.5).add_(eps)
    master.addcdiv_(exp_avg, denominator, value=-step_size)
