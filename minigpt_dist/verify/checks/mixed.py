"""Does an implementation train 16-bit parameters as a float32 master copy would, and skip steps that overflow, on all ranks together?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from minigpt_dist.verify.checks.registry import Check, register
from minigpt_dist.verify.mixed_probe import Half, mixed_body, weights_of
from minigpt_dist.verify.subject import NotJudged, Subject
from minigpt_dist.verify.violation import Violation

SLOT, SIZES = ("precision",), (1, 2)
SPACING = {"float16": 2.0**-10, "bfloat16": 2.0**-7}  # between parameters from 1 to 2
Case = dict[str, Any]


def case(subject: Subject, what: str, **changes: Any) -> Case:
    """One run: float16, three steps of gradients about 4, a scale that nothing overflows under."""
    options = {"lr": 0.125, "betas": (0.5, 0.75), "eps": 1.0, "weight_decay": 0.0, "init_scale": 2.0**8}
    options |= {"growth_interval": 100} | changes.pop("options", {})
    plain = {"dtype": "float16", "steps": 3, "exponent": 0, "bad": [], "resumes": False}
    return {"seed": 300_000 + subject.draw(f"precision.{what}") % 10_000, **plain, **changes, "options": options}


@dataclass
class Oracle:
    """One process in float64: AdamW on whole vectors, the loss scale's rule, and float16's largest number."""

    c: Case
    N: int

    def steps(self) -> list[tuple[bool, float, torch.Tensor]]:
        """Per step: was there an update, the scale after it, the parameters as the master copy has them."""
        options = self.c["options"]
        master = torch.cat([p.detach().double().flatten() for p in Half(self.c["seed"], self.c["dtype"]).params])
        master.requires_grad_()
        adam = torch.optim.AdamW([master], **{k: options[k] for k in ("lr", "betas", "eps", "weight_decay")})
        scale, clean, seen = options["init_scale"], 0, []
        for step in range(1, self.c["steps"] + 1):
            grads = [self._gradient(step, rank, scale) for rank in range(self.N)]
            finite = all(bool(torch.isfinite(g).all()) for g in grads)
            if finite:
                master.grad = torch.stack(grads).mean(0) / scale
                if options.get("max_norm"):
                    torch.nn.utils.clip_grad_norm_([master], options["max_norm"])
                adam.step()
                clean += 1
            else:
                scale, clean = scale / 2, 0
            if clean == options["growth_interval"]:
                scale, clean = scale * 2, 0
            seen.append((finite, scale, master.detach().clone()))
        return seen

    def _gradient(self, step: int, rank: int, scale: float) -> torch.Tensor:
        """As backward leaves it, in the parameters' 16 bits."""
        whole = torch.cat([w.flatten() for w in weights_of(self.c, step, rank, self.N)]) * scale
        return whole.to(getattr(torch, self.c["dtype"])).double()


def trains(subject: Subject, N: int, c: Case, stage: str) -> list[Violation]:
    """Every step's verdict and scale on every rank, and every parameter to one spacing of its dtype."""
    results = subject.ask(mixed_body, N, c)
    if "not_judged" in results[0]:
        raise NotJudged(results[0]["not_judged"])
    for step, (stepped, scale, right) in enumerate(Oracle(c, N).steps(), start=1):
        for rank, r in enumerate(results):
            found = _differing(r["steps"][step - 1], stepped, scale, right, c)
            if found is not None:
                what, seen, wanted, place = found
                return [Violation(what, seen, wanted, stage, step=step, rank=rank, **place)]
    return []


def _differing(
    seen: dict[str, Any], stepped: bool, scale: float, right: torch.Tensor, c: Case
) -> tuple[str, str, str, dict[str, Any]] | None:
    if bool(seen["stepped"]) is not stepped:
        return "whether step made an update", str(bool(seen["stepped"])), str(stepped), {}
    if seen["scale"] != scale:
        return "the loss scale after the step", f"{seen['scale']:g}", f"{scale:g}", {}
    value = torch.frombuffer(bytearray(seen["values"]), dtype=torch.float32).double()
    off = (~((value - right).abs() <= 1.01 * SPACING[c["dtype"]])).nonzero()
    if not len(off):
        return None
    at = int(off[0])
    start = torch.cat([p.detach().double().flatten() for p in Half(c["seed"], c["dtype"]).params])
    hint = "it is what it was at the start" if torch.equal(value, start) else ""
    hint = "an overflow has reached it" if not math.isfinite(float(value[at])) else hint
    return "a parameter", f"{float(value[at]):.7g}", f"{float(right[at]):.7g}", {"element": at, "hint": hint}


def plain(subject: Subject, N: int) -> list[Violation]:
    """Nothing vanishes, nothing overflows."""
    return trains(subject, N, case(subject, "plain"), "optimizer")


def vanishing(subject: Subject, N: int) -> list[Violation]:
    """Gradients below float16's smallest number, 6e-8, under a scale of 65,536."""
    options = {"init_scale": 2.0**16, "eps": 2.0**-26}
    return trains(subject, N, case(subject, "vanishing", exponent=-28, options=options), "optimizer")


def small_updates(subject: Subject, N: int) -> list[Violation]:
    """Updates below half the spacing of parameters, which only a master copy adds up."""
    found: list[Violation] = []
    for dtype, spacing in SPACING.items():
        options = {"lr": spacing / 4, "eps": 2.0**-10, "betas": (0.0, 0.0)}
        c = case(subject, "small_updates", dtype=dtype, steps=12, options=options)
        c["seed"] += 7
        found = found or trains(subject, N, c, "optimizer")
    return found


def overflow(subject: Subject, N: int) -> list[Violation]:
    """One element of the last rank's gradient is inf, at another step NaN: nobody steps, and the next step is as if nothing had been."""
    c = case(subject, "overflow", steps=5, bad=[[2, "inf"], [4, "nan"]])
    return trains(subject, N, c, "optimizer")


def scale(subject: Subject, N: int) -> list[Violation]:
    """Two clean steps in a row double the scale, also beyond what gradients allow; an overflow halves it, and counting begins anew."""
    options = {"init_scale": 2.0**15, "growth_interval": 2}
    c = case(subject, "scale", steps=9, bad=[[6, "inf"]], exponent=-4, options=options)
    return trains(subject, N, c, "optimizer")


def clip(subject: Subject, N: int) -> list[Violation]:
    """The norm is that of the gradient without the scale."""
    return trains(subject, N, case(subject, "clip", options={"max_norm": 2.0}), "clip")


def resume(subject: Subject, N: int) -> list[Violation]:
    """A restart after every step, one of them skipped, with updates that only the master copy holds: it and the scale are in the state."""
    options = {"lr": SPACING["float16"] / 4, "eps": 2.0**-10, "betas": (0.0, 0.0)}
    c = case(subject, "resume", steps=10, resumes=True, bad=[[3, "inf"]], options=options)
    return trains(subject, N, c, "load")


for _name, _claim, _find, _stage in (
    ("plain", "16-bit parameters follow a float32 master copy", plain, "optimizer"),
    ("vanishing", "gradients that 16 bits cannot hold arrive", vanishing, "optimizer"),
    ("small_updates", "updates below the parameters' spacing add up", small_updates, "optimizer"),
    ("overflow", "an overflow on one rank is a step that none makes", overflow, "optimizer"),
    ("scale", "the scale falls at an overflow, and grows after a clean while", scale, "optimizer"),
    ("clip", "clipping is of unscaled gradients", clip, "clip"),
    ("resume", "master copy and scale are saved, not derived", resume, "load"),
):
    register(Check(f"precision.{_name}", _claim, _find, SLOT, _stage, SIZES))
