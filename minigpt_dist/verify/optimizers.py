"""Building and handling an implementation's optimizer through whatever options its constructor has.

Owns the mapping of the judge's words (betas, weight_decay, a learning-rate edit) to an implementation's, and what it can be asked at all.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from minigpt_dist.verify.contract import Implementation
from minigpt_dist.verify.keywords import accepts
from minigpt_dist.verify.scenario import Scenario

MADE = "optimizer's class"  # what an implementation's function made, in its extras


class NotSupportedError(Exception):
    """The implementation offers no way to be asked this: not judged, which is neither pass nor fail."""


class UneditableError(LookupError):
    """An optimizer of torch's shape does not show the options that it uses."""


def abilities(impl: Implementation) -> set[str]:
    """Which of the optional abilities a scenario may need (see `Scenario.needs`) the optimizer's signature offers.

    What a function makes is known once it made one, and can do everything until then.
    """
    build = impl.require("ZeroOptimizer")
    kind = build if inspect.isclass(build) else impl.extras.get(MADE)
    found = {name for name in ("eps", "weight_decay", "max_norm") if accepts(build, name)}
    if accepts(build, "betas") or (accepts(build, "beta1") and accepts(build, "beta2")):
        found.add("betas")
    if impl.averages_outside:
        found.update(("betas", "eps", "weight_decay"))  # they go to the inner optimizer's class
    if hasattr(build, "add_param_group") or not inspect.isclass(build):
        found.update(("add_param_group", "groups"))
    if kind is None or own_method(kind, "state_dict") or own_method(kind, "load_state_dict"):
        found.add("state_dict")
    if kind is None or accepts(getattr(kind, "step", kind), "closure"):
        found.add("closure")
    found.add("lr_edit")
    return found


def own_method(build: Any, name: str) -> bool:
    """Does the implementation define the method itself, rather than inherit torch.optim.Optimizer's?"""
    inherited = getattr(torch.optim.Optimizer, name, None)
    return getattr(build, name, None) not in (None, inherited)


def build_optimizer(impl: Implementation, module: Any, world_size: int, rank: int, s: Scenario) -> Any:
    """The optimizer over `module` (a model, or parameter groups) with the scenario's options."""
    optimizer = _build(impl, module, world_size, rank, s)
    impl.extras[MADE] = type(optimizer)
    return optimizer


def _build(impl: Implementation, module: Any, world_size: int, rank: int, s: Scenario) -> Any:
    build = impl.require("ZeroOptimizer")
    if impl.averages_outside:
        params = module.parameters() if isinstance(module, nn.Module) else module
        betas = {} if s.defaults else {"betas": s.betas}
        return build(params, torch.optim.AdamW, lr=s.lr, eps=s.eps, weight_decay=s.weight_decay, **betas)
    options: dict[str, Any] = {"lr": s.lr}
    if accepts(build, "betas") and not s.defaults:
        options["betas"] = s.betas
    elif accepts(build, "beta1") and not s.defaults:
        options["beta1"], options["beta2"] = s.betas
    for name, value in (("eps", s.eps), ("weight_decay", s.weight_decay)):
        if accepts(build, name):
            options[name] = value
    if s.max_norm:
        options["max_norm"] = s.max_norm
    try:
        return build(module, world_size=world_size, rank=rank, **options)
    except (TypeError, AttributeError) as error:
        if isinstance(module, nn.Module):
            raise
        raise NotSupportedError(f"the optimizer takes a module only, no parameter groups ({error})") from error


def grouped(module: nn.Module, s: Scenario) -> Any:
    """The module itself, or parameter groups where the scenario gives tensors options of their own; those that it gives none come first."""
    if not s.groups:
        return module
    own = s.own_options()
    params = list(module.parameters())
    rest = [p for i, p in enumerate(params) if i not in own]
    return [*([{"params": rest}] if rest else []), *({"params": [params[i]], **options} for i, options in own.items())]


def scale_decay(optimizer: Any, factor: float) -> None:
    """Multiply the weight decay of every parameter group. NotSupportedError for an optimizer without groups."""
    groups = getattr(optimizer, "param_groups", None)
    if not groups and not isinstance(optimizer, torch.optim.Optimizer):
        raise NotSupportedError("the optimizer has no param_groups")
    for group in groups or ():
        _multiply(group, "weight_decay", factor)


def _multiply(group: dict[str, Any], option: str, factor: float) -> None:
    if option not in group:
        raise UneditableError(f"param_groups hold no {option!r} that a scheduler, or anyone, could edit")
    group[option] *= factor


def set_lr(optimizer: Any, factor: float) -> None:
    """Multiply the learning rate, in every place where an optimizer keeps one that users edit."""
    groups = getattr(optimizer, "param_groups", None)
    if groups or isinstance(
        optimizer, torch.optim.Optimizer
    ):  # whose groups are what a scheduler edits, if there are any
        for group in groups or ():
            _multiply(group, "lr", factor)
    elif isinstance(getattr(optimizer, "lr", None), (float, torch.Tensor)):
        optimizer.lr *= factor
    else:
        raise NotSupportedError("the optimizer has neither param_groups nor lr")
