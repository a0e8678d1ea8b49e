"""Is MiniGPT a causal decoder of the stated size?"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch

from minigpt_dist.model import MiniGPT
from minigpt_dist.verify.checks.registry import Check, register
from minigpt_dist.verify.gpt_oracle import reference_logits
from minigpt_dist.verify.model_probe import SIZES, model_body
from minigpt_dist.verify.subject import Subject
from minigpt_dist.verify.violation import Violation

# Sizes that differ only in which layers have a bias: qkv, proj, head may have one; the MLP and the LayerNorms may lack theirs.
BIASES = (2 * 96, 2 * 32, 64, -2 * (128 + 32), -5 * 32)
NUMELS = {SIZES.numel() + sum(chosen) for k in range(len(BIASES) + 1) for chosen in combinations(BIASES, k)}
# Float32 logits of order one after two blocks: changes that come from rounding alone stay below 1e-5.
LOGIT_ABS = 1e-4
# The functional reference in float64 differs from a correct module by rounding: 1.3e-15 seen.
REFERENCE_ABS = 1e-12


def _our_names() -> list[str]:
    """The parameters' names that the functional reference knows."""
    return [name for name, _ in MiniGPT().named_parameters()]


def _off_reference(double: dict[str, Any]) -> float:
    """The largest difference of float64 logits from those of the functional reference with the same parameters."""
    right = reference_logits(double["parameters"], double["ids"], SIZES.num_heads, SIZES.num_layers)
    return float((double["logits"] - right).abs().max())


def model_is_a_causal_decoder(subject: Subject, world_size: int) -> list[Violation]:
    """Logits (B, S, vocab) that see the past, not the future, and tell positions apart; P = 29,824."""
    r = subject.ask(model_body, world_size, subject.draw("model"), _our_names())[0]
    plain, changed, early, same = (r["logits"][k] for k in ("plain", "changed", "early", "same"))
    shape = (2, SIZES.seq_len, SIZES.vocab)
    if tuple(plain.shape) != shape:
        return [Violation("shape of the logits", str(tuple(plain.shape)), str(shape), "model")]
    if not bool(torch.isfinite(plain).all()):
        return [Violation("logits", "not finite", "finite", "model")]
    again, row, prefix = (r["logits"][k] for k in ("again", "row", "prefix"))
    facts = (
        (
            "change of the logits when the same input is given again, in eval mode",
            again - plain,
            "dropout is active in eval mode",
        ),
        ("change of a row's logits when it is given alone", row - plain[1:], "rows of a batch are mixed"),
        (
            "change of the first logits when only the first 5 tokens are given",
            prefix - plain[:, :5],
            "positions depend on the length",
        ),
    )
    for what, change, hint in facts:
        if float(change.abs().max()) > LOGIT_ABS:
            return [Violation(what, f"{float(change.abs().max()):.3g}", "0", "model", hint=hint)]
    if bool((plain >= 0).all()):
        return [
            Violation(
                "the least logit",
                f"{float(plain.min()):.3g}",
                "below 0 somewhere",
                "model",
                hint="these are probabilities",
            )
        ]
    leak = (plain[:, :-1] - changed[:, :-1]).abs().max()
    if float(leak) > LOGIT_ABS:
        return [
            Violation(
                "change of earlier logits when the last token changes",
                f"{float(leak):.3g}",
                "0: a position must not see later ones",
                "model",
                hint="the causal mask is missing or shifted",
            )
        ]
    if float((plain[:, -1] - early[:, -1]).abs().max()) <= LOGIT_ABS:
        return [
            Violation(
                "change of the last logits when the first token changes",
                "0",
                "above 0: attention reaches back",
                "model",
            )
        ]
    if float((same[:, 0] - same[:, -1]).abs().max()) <= LOGIT_ABS:
        return [
            Violation(
                "difference between positions of a constant sequence", "0", "above 0: positions are embedded", "model"
            )
        ]
    if r["idle"]:
        return [
            Violation(
                "the gradient",
                "absent or zero",
                "some, for every parameter",
                "model",
                tensor=r["idle"][0],
                hint="the forward pass does not use it",
            )
        ]
    if r["numel"] not in (NUMELS if not subject.ours else {SIZES.numel()}):
        return [
            Violation(
                "number of parameters",
                f"{r['numel']:,}",
                f"{SIZES.numel():,} (2 blocks, embedding 32, untied head), give or take biases",
                "model",
            )
        ]
    if "double" in r:
        off = _off_reference(r["double"])
        if not off <= REFERENCE_ABS:
            return [
                Violation(
                    "difference from the functional reference, float64",
                    f"{off:.3g}",
                    f"at most {REFERENCE_ABS:g}",
                    "model",
                )
            ]
    return []


register(
    Check(
        "model",
        "MiniGPT is a causal decoder of 29,824 parameters",
        model_is_a_causal_decoder,
        ("model",),
        "model",
        world_sizes=(1,),
    )
)
