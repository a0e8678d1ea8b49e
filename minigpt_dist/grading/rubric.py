"""The rubric: what a submission is asked, what each answer is worth, and which answers need which others.

Owns reading a rubric from TOML and refusing one that cannot be trusted. Leaves putting the checks to `engine`, and points to `scoring`.
"""

from __future__ import annotations

import functools
import hashlib
import math
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from minigpt_dist.grading import values
from minigpt_dist.grading.values import RubricError
from minigpt_dist.verify.checks import CHECKS
from minigpt_dist.verify.contract import BY_SHAPE, OPTIONAL, SLOTS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCHEMA = "minigpt-dist-rubric/1"
DEFAULT = Path(__file__).with_name("rubric.toml")
REQUIRED = tuple(slot for slot in SLOTS if slot not in OPTIONAL)
CONTRACT_CHECKS = tuple(f"contract.{slot}" for slot in SLOTS)  # answered by the list of pieces found, at world size 1
VISIBILITIES = ("visible", "hidden", "after_due_date", "after_published")
UNJUDGED = ("lost", "excused")
BORROWED = ("refuse", "report", "allow")
SHAPES = ("lesson", "torch")
MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Item:
    """One line of the rubric. `checks` are put at each of `world_sizes`; `requires` names items that must have earned something.

    about: pieces of which a submission must have one to be asked this at all; by default all that the checks are about.
    """

    id: str
    title: str
    points: float
    group: str
    checks: tuple[str, ...]
    world_sizes: tuple[int, ...]
    requires: tuple[str, ...] = ()
    about: frozenset[str] = frozenset()
    visibility: str = "visible"
    unjudged: str = "lost"
    hint: str = ""
    lesson: str = ""

    @property
    def slots(self) -> frozenset[str]:
        """Pieces of the contract that its checks are about."""
        contract = {c.partition(".")[2] for c in self.checks if c in CONTRACT_CHECKS}
        return frozenset(contract.union(*(CHECKS[c].slots for c in self.checks if c in CHECKS)))

    @property
    def optional(self) -> bool:
        """Is it only about pieces that are no part of the total: asked by name, or where they are found?"""
        return self.slots <= set(OPTIONAL)

    @property
    def by_name(self) -> bool:
        """Is it only about pieces that are asked by name?"""
        return self.optional and not self.slots & set(BY_SHAPE)

    @property
    def is_contract(self) -> bool:
        return all(c in CONTRACT_CHECKS for c in self.checks)


@dataclass(frozen=True)
class Rubric:
    """Items in the order of the file; `sha256` is of the file's bytes."""

    title: str
    total: float
    items: tuple[Item, ...]
    accepts: tuple[str, ...]
    lesson: tuple[str, ...]
    borrowed: str
    sha256: str

    def item(self, id: str) -> Item:
        return next(i for i in self.items if i.id == id)

    def number(self, id: str) -> str:
        """`3.2`: the second item of the third group."""
        groups = list(dict.fromkeys(i.group for i in self.items))
        own = self.item(id).group
        return f"{groups.index(own) + 1}.{[i.id for i in self.items if i.group == own].index(id) + 1}"

    def chosen(self, only: Sequence[str]) -> tuple[Item, ...]:
        """The items that `only` names by id or group, with those that they require; all for none. RubricError for an unknown name."""
        for name in only:
            if not any(name in (i.id, i.group) for i in self.items):
                raise RubricError(f"item is {name!r}, but should be one of {', '.join(i.id for i in self.items)}")
        wanted = {i.id for i in self.items if not only or i.id in only or i.group in only}
        wanted |= self._needed(wanted)
        return tuple(i for i in self.items if i.id in wanted)

    def _needed(self, ids: Collection[str]) -> set[str]:
        """Every item that one of `ids` requires, at any distance."""
        found: set[str] = set()
        open_ones = list(ids)
        while open_ones:
            new = set(self.item(open_ones.pop()).requires) - found
            found |= new
            open_ones += new
        return found


def load(path: Path = DEFAULT) -> Rubric:
    """Read and check a rubric. RubricError where it is missing, no TOML, incomplete, contradictory, or its points do not add up."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise RubricError(f"rubric {str(path)!r} cannot be read: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise RubricError(f"rubric {str(path)!r} is larger than {MAX_BYTES} bytes")
    try:
        return _parsed(raw)
    except RubricError:
        raise
    except (ValueError, RecursionError) as error:
        raise RubricError(f"rubric {str(path)!r} is no TOML: {error}") from None


@functools.lru_cache(maxsize=4)
def _parsed(raw: bytes) -> Rubric:
    """The rubric in a file's bytes; a command asks for the same one many times."""
    return parse(tomllib.loads(raw.decode("utf-8")), hashlib.sha256(raw).hexdigest())


def parse(table: dict[str, Any], sha256: str = "") -> Rubric:
    """A rubric from its TOML table, checked. RubricError as `load`."""
    values.keys("rubric", table, {"schema", "title", "total", "ignored", "contract", "item"})
    if table.get("schema") != SCHEMA:
        raise RubricError(f"schema is {table.get('schema')!r}, but should be {SCHEMA!r}")
    rows = table.get("item", [])
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise RubricError("item is no array of tables, but should be a table [[item]] for each item")
    contract = table.get("contract", {})
    if not isinstance(contract, dict):
        raise RubricError(f"contract is {contract!r}, but should be a table")
    values.keys("contract", contract, {"accepts", "lesson", "borrowed"})
    rest = _unnamed(rows)
    rubric = Rubric(
        title=values.text("rubric", table, "title"),
        total=values.points("total", table.get("total")),
        items=tuple(_item(row, rest) for row in rows),
        accepts=values.words("contract", contract, "accepts", SHAPES, SHAPES),
        lesson=values.words("contract", contract, "lesson", REQUIRED, REQUIRED),
        borrowed=values.choice("contract", contract, "borrowed", BORROWED),
        sha256=sha256,
    )
    _check_ids(rubric)
    _check_cover(rubric, values.words("rubric", table, "ignored", tuple(CHECKS), ()))
    _check_requires(rubric)
    total = math.fsum(i.points for i in rubric.items if not i.optional)
    if not math.isclose(total, rubric.total, abs_tol=1e-9):
        raise RubricError(f"total is {rubric.total:g}, but should be {total:g}, the sum of the items' points")
    return rubric


def _unnamed(rows: list[dict[str, Any]]) -> list[str]:
    """Checks that no row names in full: what a name ending in `.*` stands for."""
    named = {c for row in rows if isinstance(row.get("checks"), list) for c in row["checks"] if isinstance(c, str)}
    return [c for c in CHECKS if c not in named]


def _item(row: dict[str, Any], rest: list[str]) -> Item:
    where = f"item {row.get('id')!r}"
    values.keys(where, row, {f.name for f in fields(Item)})
    item = Item(
        id=values.text(where, row, "id"),
        title=values.text(where, row, "title"),
        points=values.points(f"points of {where}", row.get("points")),
        group=values.text(where, row, "group"),
        checks=_checks(where, row, rest),
        world_sizes=values.sizes(where, row.get("world_sizes")),
        requires=values.words(where, row, "requires", None, ()),
        about=frozenset(values.words(where, row, "about", tuple(SLOTS), ())),
        visibility=values.choice(where, row, "visibility", VISIBILITIES),
        unjudged=values.choice(where, row, "unjudged", UNJUDGED),
        hint=values.text(where, row, "hint", ""),
        lesson=values.text(where, row, "lesson", ""),
    )
    if any(c in CONTRACT_CHECKS for c in item.checks) and (not item.is_contract or item.world_sizes != (1,)):
        raise RubricError(
            f"{where} mixes the contract with other checks, but should ask it alone, at world_sizes = [1]"
        )
    return item


def _checks(where: str, row: dict[str, Any], rest: list[str]) -> tuple[str, ...]:
    """The checks of an item, each name that ends in `.*` replaced by what it stands for, which may be nothing."""
    families = {f"{c.partition('.')[0]}.*" for c in CHECKS}
    names = values.words(where, row, "checks", (*CONTRACT_CHECKS, *CHECKS, *families), None)
    if all(name in families for name in names):
        raise RubricError(f"checks of {where} is {list(names)}, but should name at least one in full")
    return tuple(c for n in names for c in ([r for r in rest if r.startswith(n[:-1])] if n in families else [n]))


def _check_ids(rubric: Rubric) -> None:
    ids = [i.id for i in rubric.items]
    for id in ids:
        if ids.count(id) > 1:
            raise RubricError(f"item {id!r} is there {ids.count(id)} times, but should be there once")


def _check_cover(rubric: Rubric, ignored: Collection[str]) -> None:
    asked = {c for i in rubric.items for c in i.checks}
    left = [c for c in CHECKS if c not in asked and c not in ignored and not set(CHECKS[c].slots) <= set(OPTIONAL)]
    if left:
        raise RubricError(f"check {left[0]!r} belongs to no item, but should belong to one, or stand in `ignored`")


def _check_requires(rubric: Rubric) -> None:
    ids = {i.id for i in rubric.items}
    for i in rubric.items:
        for id in i.requires:
            if id not in ids:
                raise RubricError(f"item {i.id!r} requires {id!r}, which is no item")
        if i.id in rubric._needed([i.id]):
            raise RubricError(f"item {i.id!r} requires itself, in a circle")
