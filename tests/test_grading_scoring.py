"""Points from answers: partial credit, what requires what, and what leaves the maximum."""

from __future__ import annotations

from typing import Any

import pytest

from minigpt_dist.grading.answers import Answer, Unit, clipped, evidence_of
from minigpt_dist.grading.rubric import SCHEMA, Rubric, parse
from minigpt_dist.grading.scoring import Offer, Result, Scorer, total
from minigpt_dist.verify.checks import CHECKS, Verdict
from minigpt_dist.verify.contract import SLOTS
from minigpt_dist.verify.violation import Violation

ALL = frozenset(n for names in SLOTS.values() for n in names)
ASKED = ("optimizer.plain", "optimizer.long", "optimizer.tied", "ddp.plain")
OPTIMIZER_ONLY = Offer("torch", frozenset({"ZeroOptimizer"}))


def rubric(**contract: Any) -> Rubric:
    """update (4 points, sizes 1, 2, 3, two checks), tied (1 point, requires update), ddp (1 point), a contract item."""

    def row(id: str, points: int, checks: list[str], sizes: list[int], **more: Any) -> dict[str, Any]:
        return {"id": id, "title": id, "group": "g", "points": points, "checks": checks, "world_sizes": sizes, **more}

    rows = [
        row("contract", 0, ["contract.optimizer"], [1]),
        row("update", 4, ["optimizer.plain", "optimizer.long"], [1, 2, 3]),
        row("tied", 1, ["optimizer.tied"], [2], requires=["update"], unjudged="excused"),
        row("ddp", 1, ["ddp.plain"], [2]),
    ]
    ignored = [c for c in CHECKS if c not in ASKED]
    contract = {"lesson": ["optimizer"], **contract}
    return parse({"schema": SCHEMA, "title": "t", "total": 6, "ignored": ignored, "contract": contract, "item": rows})


def answered(**spoiled: str) -> dict[Unit, Answer]:
    """All passed, but those named CHECK_N (dots as underscores), with their outcome."""
    units = [Unit(c, N) for c in ASKED for N in (1, 2, 3)]
    return {u: Answer(*u, spoiled.get(f"{u.check.replace('.', '_')}_{u.world_size}", "passed"), "why") for u in units}


def scored(offer: Offer, answers: dict[Unit, Answer], **contract: Any) -> dict[str, Result]:
    return Scorer(rubric(**contract), offer).results(answers)


def outcomes(results: dict[str, Result]) -> dict[str, tuple[str, float]]:
    return {id: (r.outcome, r.points) for id, r in results.items()}


def test_all_that_holds_earns_all() -> None:
    assert total(scored(Offer("lesson", ALL), answered())) == (6, 6)


def test_a_world_size_that_fails_costs_its_part() -> None:
    results = scored(Offer("lesson", ALL), answered(optimizer_long_3="failed"))
    assert outcomes(results)["update"] == ("partial", 2.6667)
    assert results["update"].message == "optimizer.long, world size 3: why; it holds at world size 1, 2"


def test_one_process_alone_earns_nothing() -> None:
    results = scored(Offer("lesson", ALL), answered(optimizer_plain_2="failed", optimizer_plain_3="failed"))
    assert outcomes(results)["update"] == ("failed", 0)


@pytest.mark.parametrize("outcome", ["timeout", "crashed", "failed"])
def test_an_item_takes_the_outcome_of_its_first_loss(outcome: str) -> None:
    spoiled = {f"optimizer_plain_{N}": outcome for N in (1, 2, 3)}
    assert outcomes(scored(Offer("lesson", ALL), answered(**spoiled)))["update"] == (outcome, 0)


def test_what_requires_an_item_that_earned_nothing_is_skipped_with_the_reason() -> None:
    results = scored(Offer("lesson", ALL), answered(**{f"optimizer_plain_{N}": "failed" for N in (1, 2, 3)}))
    assert outcomes(results)["tied"] == ("skipped", 0)
    assert results["tied"].message == "skipped: it requires update (update), which earned nothing"


def test_a_part_is_enough_for_what_requires_it() -> None:
    assert outcomes(scored(Offer("lesson", ALL), answered(optimizer_long_3="failed")))["tied"] == ("passed", 1)


def test_a_missing_piece_fails_the_contract_and_skips_its_dependents_once() -> None:
    results = scored(Offer("lesson", ALL - {"ZeroOptimizer"}), {})
    assert outcomes(results)["contract"] == ("failed", 0)
    assert {id: r.message for id, r in results.items() if r.outcome == "skipped"} == {
        "update": "skipped: ZeroOptimizer is missing",
        "tied": "skipped: ZeroOptimizer is missing",
    }


def test_a_piece_that_the_shape_does_not_have_leaves_the_maximum() -> None:
    results = scored(OPTIMIZER_ONLY, answered())
    assert results["ddp"].outcome == "excused"
    assert total(results) == (5, 5)


def test_a_shape_that_is_not_accepted_is_graded_as_the_lessons() -> None:
    results = scored(OPTIMIZER_ONLY, answered(), accepts=["lesson"], lesson=["optimizer", "ddp"])
    assert outcomes(results)["ddp"] == ("skipped", 0)
    assert total(results) == (5, 6)


def test_what_could_not_be_asked_is_lost_or_excused_as_the_item_says() -> None:
    spoiled = {f"{c}_{N}": "not_judged" for c in ("optimizer_long", "optimizer_tied") for N in (1, 2, 3)}
    results = scored(Offer("lesson", ALL), answered(**spoiled))
    assert outcomes(results)["update"] == ("failed", 0)
    assert results["tied"].outcome == "skipped"


def test_an_excused_item_says_why_and_costs_nothing() -> None:
    results = scored(Offer("lesson", ALL), answered(optimizer_tied_2="not_judged"))
    assert (results["tied"].outcome, results["tied"].message) == ("excused", "not judged: why")
    assert total(results) == (5, 5)


def test_in_torchs_shape_what_could_not_be_asked_is_excused() -> None:
    spoiled = {f"optimizer_long_{N}": "not_judged" for N in (1, 2, 3)}
    assert outcomes(scored(OPTIMIZER_ONLY, answered(**spoiled)))["update"] == ("passed", 4)


def test_slots_restrict_what_is_asked() -> None:
    offer = Offer("lesson", ALL, asked=("ddp",))
    assert {id for id, r in scored(offer, answered()).items() if r.outcome != "excused"} == {"ddp"}


def test_borrowed_work_earns_nothing_unless_the_rubric_allows_it() -> None:
    offer = Offer("lesson", ALL, {"ZeroOptimizer": "torch's ZeroRedundancyOptimizer"})
    refused = scored(offer, answered())
    assert refused["update"].message.endswith("torch's ZeroRedundancyOptimizer, not the submission's own work")
    assert total(refused)[0] == 1
    assert total(scored(offer, answered(), borrowed="report"))[0] == 6


def test_what_has_not_been_asked_is_not_run_and_earns_nothing() -> None:
    results = scored(Offer("lesson", ALL), {})
    assert {r.outcome for r in results.values() if not r.item.is_contract} == {"not_run"}
    assert total(results) == (0, 6)


def test_a_rank_may_claim_nonsense_without_effect() -> None:
    claim = {"shape": ["torch"], "names": [1, [], "MiniGPT", "x"], "borrowed": [3], "stood_in": 7}
    assert Offer.of(claim, ()) == Offer("lesson", frozenset({"MiniGPT"}))


def test_evidence_holds_the_bits_of_both_floats() -> None:
    violation = Violation("p0", "1", "0.5 (AdamW)", "optimizer", step=0, rank=1, tensor="p0", element=0)
    found = evidence_of(Verdict("optimizer.plain", 2, (violation,)), violation)
    assert (found["observed_hex"], found["expected_hex"]) == ("0x3f800000", "0x3f000000")
    assert (found["rank"], found["step"], found["tensor"], found["element"]) == (1, 0, "p0", 0)


def test_what_a_rank_calls_its_place_is_evidence_only_as_a_number() -> None:
    odd: Any = float("nan")
    violation = Violation("p0", "1", "0.5", "optimizer", step=odd, rank=-1, tensor=odd, element=1 << 99)
    found = evidence_of(Verdict("optimizer.plain", 2, (violation,)), violation)
    assert {"rank", "step", "element"} & set(found) == set()
    assert found["tensor"] == "nan"


def test_words_of_a_submission_are_one_short_clean_line() -> None:
    text = clipped("a\x1b[31m\nb\u202e" + "x" * 10_000)
    assert text.startswith("a [31m b x")
    assert len(text) < 2100
