"""Each submission of the corpus loses the rubric items that its mistake costs, and only those; right ones lose none, however hostile."""

from __future__ import annotations

from pathlib import Path

import pytest
from submission_corpus import Case, cases, graded, judged, lost, replaced, skipped

from minigpt_dist.checkpoint.state import flatten, unflatten
from minigpt_dist.grading.rubric import load
from minigpt_dist.verify.portable import pack, unpack

CORPUS = cases()
QUICK = {
    "right_adapters": ("corpus.seeded",),
    "right_noise": ("corpus.seeded", "broadcast.first", "optimizer.tied"),
    "wrapper_sum_for_mean": ("ddp.mean", "ddp.start"),
    "copy_broadcast": ("broadcast.first", "broadcast.src", "corpus.seeded"),
}


def test_the_corpus_holds_many_wrong_and_right_submissions_of_every_shape() -> None:
    wrong, right = [c for c in CORPUS if not c.right], [c for c in CORPUS if c.right]
    assert (len(wrong) >= 40, len(right) >= 12) == (True, True)
    for some in (wrong, right):
        assert {c.base for c in some} >= {"lesson", "torch_shape", "wrapper", "fsdp_rows", "fsdp_flat", "fsdp_function"}


def test_every_submission_differs_from_the_others_and_names_items_that_there_are() -> None:
    assert len({c.name for c in CORPUS}) == len(CORPUS)
    assert len({(c.source(), str(c.files)) for c in CORPUS}) == len(CORPUS)
    assert {id for c in CORPUS for id in c.loses} <= {item.id for item in load().items}


def test_a_replacement_must_name_a_part_of_the_base() -> None:
    assert replaced("class A:\n    def f(self):\n        pass\n", "A.f", "def f(self):\n    return 1") == (
        "class A:\n    def f(self):\n        return 1\n"
    )
    with pytest.raises(KeyError, match="has no A\\.g"):
        replaced("class A:\n    pass\n", "A.g", "")


def test_a_state_of_torch_is_packed_for_our_checkpoint_and_comes_back_as_it_was() -> None:
    state = {"state": {0: {"step": 1.0}, 1: {}}, "param_groups": [{"betas": (0.9, 0.999), "params": [0, 1]}]}
    assert unpack(unflatten(flatten(pack(state)))) == state


@pytest.mark.parametrize("name", QUICK)
def test_a_few_submissions_lose_what_they_must(name: str, tmp_path: Path) -> None:
    (case,) = [c for c in CORPUS if c.name == name]
    assert judged(case.write(tmp_path / "in"), QUICK[name]) == set(case.loses) & set(QUICK[name])


@pytest.mark.corpus
@pytest.mark.parametrize("case", CORPUS, ids=lambda c: c.name)
def test_a_submission_loses_the_items_that_its_mistake_costs_and_no_others(case: Case, tmp_path: Path) -> None:
    report = graded(case.write(tmp_path / "in"), tmp_path)
    assert report["verdict"] in ("pass", "fail"), report["message"]
    assert lost(report) == set(case.loses)
    contract = {id for id in lost(report) if id.startswith("contract.")}
    assert all(contract or needed & lost(report) for needed in skipped(report).values())
