"""Faults of the sharded optimizer's step: reduction, update, gather."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from minigpt_dist.verify.faults.base import LessonZero
from minigpt_dist.verify.faults.catalogue import Names, fault


@fault(source="TTrace T4 (arXiv 2506.09280)", needs="gradients near Adam's eps, or moments", check="optimizer.plain", stage="reduce", step=1,
       green=("monotone_loss", "param_norms", "optimizer_bytes", "resume_bytes"), equivalent=((1, "a sum over one rank is the mean"),))
def sum_instead_of_mean() -> Names:
    """Gradients are summed over ranks but never divided by their number; Adam hides it."""

    class Zero(LessonZero):
        def reduce(self) -> Tensor:
            return super().reduce() * self.world_size

    return {"ZeroOptimizer": Zero}


@fault(source="NVIDIA/Megatron-LM#5976", needs="nothing", check="optimizer.plain", stage="optimizer", step=1,
       green=("monotone_loss", "param_norms", "optimizer_bytes", "resume_bytes"))
def dummy_step_counts() -> Names:
    """State is made by a dummy step that already counts, so the first update is corrected as the second."""

    class Zero(LessonZero):
        def update(self, grad: Tensor) -> None:
            self.step_count += 1
            super().update(grad)
            self.step_count -= 1

    return {"ZeroOptimizer": Zero}


@fault(source="Oneflow-Inc/oneflow#5960", needs="nothing", check="optimizer.plain", stage="optimizer", step=1)
def bias_correction_default_off() -> Names:
    """The moments are used without bias correction."""

    class Zero(LessonZero):
        def apply(self, first: Tensor, second: Tensor) -> None:
            super().apply(self.exp_avg, self.exp_avg_sq)

    return {"ZeroOptimizer": Zero}


@fault(source="PyTorch forum, Adam from scratch", needs="gradients near Adam's eps", check="optimizer.plain", stage="optimizer", step=1)
def eps_inside_the_root() -> Names:
    """eps is added to the second moment before the root is taken."""

    class Zero(LessonZero):
        def apply(self, first: Tensor, second: Tensor) -> None:
            self.master.addcdiv_(first, (second + self.eps).sqrt_(), value=-self.lr)

    return {"ZeroOptimizer": Zero}


@fault(source="tenstorrent/tt-blacksmith#711", needs="two steps", check="optimizer.plain", stage="backward", step=2)
def zero_grad_forgotten() -> Names:
    """zero_grad does nothing: each update uses the sum of all gradients so far."""

    class Zero(LessonZero):
        def zero_grad(self) -> None:
            pass

    return {"ZeroOptimizer": Zero}


@fault(source="TrainCheck C18 (arXiv 2506.14813)", needs="more than one rank", check="optimizer.plain", stage="reduce", step=1,
       equivalent=((1, "one rank's gradient is the mean"),))
def nothing_is_reduced() -> Names:
    """Each rank updates its slice with its own gradient."""

    class Zero(LessonZero):
        def reduce(self) -> Tensor:
            return self.cut(self.flat_grads())

    return {"ZeroOptimizer": Zero}


@fault(source="the lesson's own padding, off by one", needs="P not divisible by N", check="optimizer.remainder_one", stage="optimizer", step=1,
       equivalent=((1, "there is no padding"),))
def last_element_gets_the_pad() -> Names:
    """The slice that ends in padding loses its last real element's gradient."""

    class Zero(LessonZero):
        def flat_grads(self) -> Tensor:
            flat = super().flat_grads()
            if flat.numel() > self.total:
                flat[self.total - 1] = 0
            return flat

    return {"ZeroOptimizer": Zero}


@fault(source="DeepSpeed and Megatron issue trackers, precision of the reduction", needs="gradients with more than 8 significant bits", check="optimizer.plain",
       stage="reduce", step=1)
def gradients_travel_in_bfloat16() -> Names:
    """Gradients are reduced in bfloat16 although parameters and state are float32."""

    class Zero(LessonZero):
        def flat_grads(self) -> Tensor:
            return super().flat_grads().bfloat16().float()

    return {"ZeroOptimizer": Zero}


@fault(source="the state is not sharded but said to be", needs="a census of bytes", check="optimizer_bytes", stage="memory",
       equivalent=((1, "one rank holds everything anyway"),), green=("monotone_loss", "param_norms", "resume_bytes", "optimizer.plain"))
def full_state_reported_as_a_share() -> Names:
    """Every rank keeps master copy and moments of all parameters, and reports 12P/N bytes."""

    class Zero(LessonZero):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)  # type: ignore[arg-type]  # passed on as given
            self.hidden = torch.zeros(3 * self.total)

        def shard_bytes(self) -> int:
            return 12 * self.chunk

    return {"ZeroOptimizer": Zero}


@fault(source="huggingface/transformers, schedulers over wrapped optimizers", needs="an edit of the learning rate", check="optimizer.lr_edit", stage="optimizer",
       step=2, green=("optimizer.plain",))
def lr_edits_ignored() -> Names:
    """The learning rate is read once, at construction."""

    class Zero(LessonZero):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)  # type: ignore[arg-type]  # passed on as given
            self._lr = self.lr

        def apply(self, first: Tensor, second: Tensor) -> None:
            self.master.addcdiv_(first, second.sqrt().add_(self.eps), value=-self._lr)

    return {"ZeroOptimizer": Zero}


@fault(source="deepspeedai/DeepSpeed#4396", needs="a resume soon after the start", check="resume_bytes", stage="load", step=10, green=("optimizer.plain",))
def adam_step_lost() -> Names:
    """Moments are restored, the step count is not."""

    class Zero(LessonZero):
        def load_state_dict(self, state: dict[str, object]) -> None:
            super().load_state_dict(state)
            self.step_count = 0

    return {"ZeroOptimizer": Zero}


@fault(source="pytorch/pytorch#128949", needs="a parameter unused on one rank", check="optimizer.unused_on_one", stage="reduce", green=("optimizer.plain",))
def unused_parameter_hangs() -> Names:
    """Gradients are reduced tensor by tensor where there is one: a rank without it leaves the others waiting."""

    class Zero(LessonZero):
        def flat_grads(self) -> Tensor:
            for p in self.params():
                if p.grad is not None and self.world_size > 1:
                    dist.all_reduce(p.grad)
                    p.grad /= self.world_size
            return super().flat_grads()

        def reduce(self) -> Tensor:
            return self.cut(self.flat_grads())

    return {"ZeroOptimizer": Zero}
