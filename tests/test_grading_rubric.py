"""A rubric that could not be trusted is refused: every way of being wrong, in one line each."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from minigpt_dist.__main__ import main
from minigpt_dist.grading import rubric as rubrics
from minigpt_dist.grading.plan import merged, plan
from minigpt_dist.grading.values import RubricError
from minigpt_dist.verify.checks import CHECKS

FIRST, SECOND, *REST = CHECKS


def small() -> dict[str, Any]:
    """Two items, the second of which requires the first; every other check is ignored."""
    item = {"title": "t", "group": "g", "points": 1, "world_sizes": [2]}
    rows = [{"id": "a", "checks": [FIRST], **item}, {"id": "b", "checks": [SECOND], "requires": ["a"], **item}]
    return {"schema": rubrics.SCHEMA, "title": "small", "total": 2, "ignored": REST, "item": rows}


WRONG = [
    ("schema is 'x'", lambda t: t.update(schema="x")),
    ("total is 2, but should be 3", lambda t: t["item"][0].update(points=2)),
    ("is there 2 times", lambda t: t["item"][1].update(id="a", requires=[])),
    ("belongs to no item", lambda t: t["ignored"].remove("ddp.plain")),
    ("'nosuch' among its checks", lambda t: t["item"][0].update(checks=["nosuch"])),
    ("checks of item 'a' is \\[\\]", lambda t: t["item"][0].update(checks=[])),
    ("checks of item 'a' is None", lambda t: t["item"][0].pop("checks")),
    ("requires 'z', which is no item", lambda t: t["item"][0].update(requires=["z"])),
    ("requires itself", lambda t: t["item"][0].update(requires=["b"])),
    ("requires itself", lambda t: t["item"][0].update(requires=["a"])),
    ("points of item 'a' is -1", lambda t: t["item"][0].update(points=-1)),
    ("points of item 'a' is nan", lambda t: t["item"][0].update(points=float("nan"))),
    ("points of item 'a' is True", lambda t: t["item"][0].update(points=True)),
    ("world_sizes of item 'a' is \\[2, 1\\]", lambda t: t["item"][0].update(world_sizes=[2, 1])),
    ("world_sizes of item 'a' is \\[0\\]", lambda t: t["item"][0].update(world_sizes=[0])),
    ("visibility of item 'a' is 'no'", lambda t: t["item"][0].update(visibility="no")),
    ("unjudged of item 'a' is 'no'", lambda t: t["item"][0].update(unjudged="no")),
    ("item 'a' has 'pionts'", lambda t: t["item"][0].update(pionts=3)),
    ("item is no array", lambda t: t.update(item=[])),
    ("lesson", lambda t: t.update(contract={"lesson": ["nosuch"]})),
    ("lesson", lambda t: t.update(contract={"lesson": ["guard"]})),  # asked by name only
    ("mixes the contract", lambda t: t["item"][0].update(checks=[FIRST, "contract.model"])),
]


def test_a_small_rubric_is_read_as_it_stands() -> None:
    found = rubrics.parse(small())
    assert [(i.id, i.points, i.checks, i.requires) for i in found.items] == [
        ("a", 1.0, (FIRST,), ()),
        ("b", 1.0, (SECOND,), ("a",)),
    ]


@pytest.mark.parametrize("words, spoil", WRONG, ids=[f"{i}" for i in range(len(WRONG))])
def test_a_wrong_rubric_is_refused_by_its_first_mistake(words: str, spoil: Any) -> None:
    table = copy.deepcopy(small())
    spoil(table)
    with pytest.raises(RubricError, match=words):
        rubrics.parse(table)


@pytest.mark.parametrize("text", [b"a = ", b"\xff\xfe", b"[" * 10000])
def test_a_file_that_is_no_toml_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "r.toml").write_bytes(text)
    with pytest.raises(RubricError, match="is no TOML"):
        rubrics.load(tmp_path / "r.toml")


def test_the_default_rubric_asks_every_check_of_the_suite() -> None:
    found = rubrics.load()
    assert {c for i in found.items for c in i.checks} == {*CHECKS, *rubrics.CONTRACT_CHECKS}
    assert found.total == 100


def test_every_item_of_the_default_rubric_teaches() -> None:
    assert [i.id for i in rubrics.load().items if not (i.hint and i.lesson and i.title)] == []


def test_items_bring_what_they_require() -> None:
    found = rubrics.load()
    assert [i.id for i in found.chosen(["optimizer.closure"])] == [
        "contract.optimizer",
        "optimizer.update",
        "optimizer.closure",
    ]


def test_an_unknown_item_is_refused_by_name() -> None:
    with pytest.raises(RubricError, match="item is 'nosuch'"):
        rubrics.load().chosen(["nosuch"])


def test_the_plan_asks_each_check_once_a_world_size() -> None:
    items = rubrics.load().items
    wanted = {(c, N) for i in items if not i.is_contract for c in i.checks for N in i.world_sizes}
    groups = plan(items)
    assert set(merged(groups)) == wanted
    assert sum(len(g.units) for g in groups) == len(wanted)


def test_the_rubric_command_writes_a_copy_that_loads_and_never_over_a_file(tmp_path: Path) -> None:
    copied = tmp_path / "mine.toml"
    assert main(["rubric", "--out", str(copied)]) == 0
    assert rubrics.load(copied) == rubrics.load()
    assert main(["rubric", "--out", str(copied)]) == 2
