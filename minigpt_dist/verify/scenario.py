"""Scenarios: what the judge asks of an optimizer, one varied condition each.

Owns the list and its reasons. Each is cheap (a few tensors of a few elements, a handful of steps), and each is there because a
reported fault shows only under its condition. Leaves running them to `linear_probe.py` and the right answer to `adam_oracle.py`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

Shape = tuple[int, ...]

SHAPES: tuple[Shape, ...] = ((7, 5), (5,), (3,), (2, 3), (1,), ())


@dataclass(frozen=True)
class Scenario:
    """One condition. Indices name tensors of `shapes`; ranks are taken modulo the world size.

    backwards: backward calls before a step. absent: (tensor, rank) pairs that get no gradient from step `absent_from` until before step
    `present_from`, rank -1 for every rank. tied: tensors that the module also holds under a second name.
    frozen: requires_grad False. lr_at, decay_at: (step, factor) edits of the learning rate and
    of weight decay. groups: (tensor, option, value) overrides; the value of lr is a factor, beta1 stands for the first of betas.
    reload_at: after this step the state goes through state_dict and load_state_dict (`loads` times) into a new optimizer.
    snapshots: state_dict is called, and what it gives dropped, after every step.
    late: the last tensor joins by add_param_group after step 1. closure: step is given a closure. twice: a second
    optimizer over a second module runs in the same process. keep_grads_before: steps before which zero_grad is not called.
    model_zero_grad: the module's own is called. zeroing: what the optimizer's zero_grad leaves stays there; elsewhere it is dropped,
    so that an optimizer of torch's shape that zeroes its own parameters alone is wrong in that, and not in all. transposed: matrices
    are not contiguous.
    mixed: every second tensor is float64. defaults: betas are left to the constructor. census: bytes alive are counted at
    the end. nan_at: step at which the first element of the last rank's gradient is not a number; 0 for never.
    """

    name: str
    why: str
    shapes: tuple[Shape, ...] = SHAPES
    steps: int = 4
    lr: float = 0.0625
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    dtype: str = "float32"
    backwards: int = 1
    absent: tuple[tuple[int, int], ...] = ()
    absent_from: int = 0
    present_from: int = 1_000_000
    frozen: tuple[int, ...] = ()
    tied: tuple[int, ...] = ()
    lr_at: tuple[tuple[int, float], ...] = ()
    decay_at: tuple[tuple[int, float], ...] = ()
    groups: tuple[tuple[int, str, float], ...] = ()
    reload_at: int = 0
    loads: int = 1
    snapshots: bool = False
    late: bool = False
    closure: bool = False
    twice: bool = False
    keep_grads_before: tuple[int, ...] = ()
    model_zero_grad: bool = False
    zeroing: bool = False
    transposed: bool = False
    mixed: bool = False
    max_norm: float = 0.0
    defaults: bool = False
    census: bool = False
    nan_at: int = 0
    seed: int = 0

    def dtype_of(self, tensor: int) -> torch.dtype:
        """The dtype of tensor number `tensor`."""
        return torch.float64 if self.mixed and tensor % 2 else getattr(torch, self.dtype)

    def own_options(self) -> dict[int, dict[str, Any]]:
        """Tensor -> the options of the parameter group it has to itself, in torch's words."""
        own: dict[int, dict[str, Any]] = {}
        for tensor, option, value in self.groups:
            named = {"lr": ("lr", self.lr * value), "beta1": ("betas", (value, self.betas[1]))}.get(
                option, (option, value)
            )
            own.setdefault(tensor, {})[named[0]] = named[1]
        return own

    def needs(self) -> frozenset[str]:
        """Optional abilities without which the scenario cannot be put to an implementation."""
        wants = {
            "betas": self.betas != (0.9, 0.999),
            "eps": self.eps != 1e-8,
            "weight_decay": self.weight_decay != 0.0 or any(option == "weight_decay" for _, option, _ in self.groups),
            "groups": bool(self.groups)
            or any(at <= self.reload_at for at, _ in self.lr_at),  # only torch's shape promises to save options
            "add_param_group": self.late,
            "lr_edit": bool(self.lr_at),
            "state_dict": self.reload_at > 0 or self.snapshots,
            "closure": self.closure,
            "max_norm": self.max_norm > 0,
        }
        return frozenset(name for name, wanted in wants.items() if wanted)

    def without_gradient(self, step: int, rank: int, world_size: int) -> frozenset[int]:
        """Tensors that get no gradient on `rank` at `step`."""
        if not self.absent_from <= step < self.present_from:
            return frozenset()
        return frozenset(i for i, r in self.absent if r == -1 or r % world_size == rank)

    def drawn(self, number: int) -> Scenario:
        """The same condition on other values, gradients and learning rate (0.8 to 1.2 of it), chosen by a secret number; itself for 0."""
        if not number:
            return self
        return replace(self, seed=self.seed + number, lr=self.lr * (0.8 + 0.4 * (number % 1009) / 1008))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Scenario:
        """The inverse of `to_dict` after a trip through JSON, which turns tuples into lists."""
        return cls(**{f.name: _tuples(data[f.name]) for f in fields(cls)})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, (list, tuple)) else value


def _s(name: str, why: str, **options: Any) -> Scenario:
    return Scenario(name=name, why=why, **options)


SCENARIOS: tuple[Scenario, ...] = (
    _s("plain", "mean over ranks, bias correction, eps outside the root, every element"),
    _s("long", "bias correction and moments over more steps", steps=12, seed=1),
    _s("betas", "moments that forget fast show the last gradient alone", betas=(0.5, 0.75), steps=5),
    _s("defaults", "betas that are not given are 0.9 and 0.999", defaults=True),
    _s("no_memory", "betas 0 make the update a function of the reduced gradient alone", betas=(0.0, 0.0), eps=0.5),
    _s("large_eps", "a large eps makes the update proportional to the gradient's scale", eps=0.5),
    _s("weight_decay", "decoupled decay on every element once", weight_decay=0.25),
    _s("one_tensor", "a single parameter straddles every boundary", shapes=((23,),)),
    _s("tiny", "more ranks than elements: some ranks own nothing", shapes=((1,),)),
    _s("two_elements", "fewer elements than ranks", shapes=((), (1,)), steps=3),
    _s("divisible", "no padding at 2, 3, 4, 6, 8 ranks", shapes=((4, 4), (8,))),
    _s("remainder_one", "one element more than a multiple of 2, 3, 4", shapes=((5, 5),)),
    _s("many_tensors", "boundaries fall inside, between and across tensors", shapes=tuple((n,) for n in range(1, 12))),
    _s("large", "a tensor of 70,000 elements beside one of one", shapes=((70_000,), (1,)), steps=2),
    _s(
        "memory",
        "twelve equal tensors and a small one: state can be shared out, in slices or whole",
        shapes=((4000,),) * 12 + ((3,),),
        steps=2,
        census=True,
    ),
    _s("empty_tensor", "a tensor without elements between others", shapes=((3,), (0,), (4,))),
    _s("mixed", "parameters of two dtypes in one model, float32 at both ends", shapes=(*SHAPES, (4,)), mixed=True),
    _s("buckets", "eight tensors of which two or three fill a small bucket", shapes=((1000,),) * 7 + ((5,),), steps=2),
    _s("transposed", "parameters that are not contiguous", transposed=True),
    _s("frozen", "requires_grad False stays as it is, and costs no state", frozen=(1, 4)),
    _s("frozen_decay", "weight decay leaves frozen parameters alone", frozen=(1, 4), weight_decay=0.25),
    _s("closure_tiny", "ranks that own nothing evaluate the closure too", closure=True, shapes=((1,), (2,))),
    _s(
        "reload_groups",
        "a state carries every group",
        groups=((1, "lr", 0.25), (3, "weight_decay", 0.5)),
        reload_at=2,
        steps=4,
    ),
    _s("huge", "a slice of more than 2^20 elements", shapes=((2_200_000,), (3,)), steps=1),
    _s("unused", "a parameter without gradient on every rank is skipped", absent=((1, -1), (4, -1)), weight_decay=0.25),
    _s(
        "unused_once",
        "a parameter idle at first steps starts at its own step 1",
        absent=((2, -1),),
        present_from=3,
        steps=5,
    ),
    _s("unused_on_one", "a parameter idle on one rank counts as zero there", absent=((2, 1),)),
    _s(
        "unused_later",
        "a parameter idle after first steps does not meet its old gradient again",
        absent=((0, -1), (3, -1)),
        absent_from=3,
    ),
    _s(
        "idle_rank",
        "a rank without any gradient counts as zeros",
        absent=tuple((i, 1) for i in range(len(SHAPES))),
        steps=2,
    ),
    _s("tied", "a tensor under two names is one parameter", tied=(0,)),
    _s("backwards", "two backwards before a step add up", backwards=2, zeroing=True),
    _s(
        "keep_grads",
        "without zero_grad gradients add up on every rank, to nothing where there was none",
        keep_grads_before=(2, 3),
        absent=((1, -1), (4, -1)),
        present_from=2,
        zeroing=True,
    ),
    _s("model_zero_grad", "the model's own zero_grad, which drops the tensors", model_zero_grad=True),
    _s("lr_edit", "an edited learning rate holds from the next step", lr_at=((2, 0.5), (4, 4.0)), steps=5),
    _s("groups_lr", "each group has its learning rate", groups=((1, "lr", 0.25), (3, "lr", 0.0))),
    _s(
        "groups_decay",
        "each group has its decay",
        groups=((0, "weight_decay", 0.5), (1, "weight_decay", 0.0)),
        weight_decay=0.25,
    ),
    _s(
        "groups_all",
        "the first group keeps its own options too",
        groups=tuple((i, "weight_decay", 0.125 * i) for i in range(len(SHAPES))),
        weight_decay=1.0,
    ),
    _s("groups_eps", "each group has its eps", groups=((0, "eps", 0.25), (3, "eps", 1e-3))),
    _s("groups_betas", "each group has its betas", groups=((0, "beta1", 0.5), (2, "beta1", 0.0)), steps=5),
    _s("decay_edit", "an edited weight decay holds from the next step", decay_at=((2, 4.0),), weight_decay=0.25),
    _s(
        "late_group_lr", "a group added late keeps its own learning rate", late=True, groups=((5, "lr", 0.25),), steps=5
    ),
    _s("reload_edit", "a learning rate edited after a reload holds", reload_at=2, lr_at=((4, 0.25),), steps=5),
    _s("late_group", "a group added after the first step is optimized", late=True, steps=5),
    _s("reload", "state_dict into a new optimizer changes nothing", reload_at=2, steps=5, betas=(0.9, 0.999)),
    _s("reload_now", "the state after the first step", reload_at=1, steps=3),
    _s("reload_twice", "loading the same state again changes nothing", reload_at=2, loads=2),
    _s("reload_tiny", "the state of a rank that owns nothing", shapes=((1,),), reload_at=1, steps=3),
    _s("reload_lr", "an edited learning rate is part of the state", lr_at=((2, 0.25),), reload_at=2),
    _s("snapshots", "taking the state changes nothing", snapshots=True),
    _s("closure", "step(closure) evaluates it once with gradients on and returns its loss", closure=True),
    _s("two_optimizers", "two optimizers in one process share nothing", twice=True),
    _s("float64", "double precision parameters", dtype="float64"),
    _s("clip", "clipping by the norm over all ranks' slices", max_norm=1.0),
    _s("clip_idle", "a norm below the limit changes nothing", max_norm=1e9),
)

BY_NAME = {s.name: s for s in SCENARIOS}
