"""Small submissions, right and wrong, each a right base with a function replaced; what each must lose stands beside it.

Owns reading `submissions/index.toml`, writing a submission's files, and having one graded. Leaves what is claimed to the tests.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from minigpt_dist.__main__ import main
from minigpt_dist.grading.rubric import DEFAULT, load
from minigpt_dist.verify.checks import judge
from minigpt_dist.verify.subject import Subject

try:
    import tomllib
except ImportError:  # Python 3.10
    tomllib = pytest.importorskip("tomli")

HERE = Path(__file__).parent / "submissions"


@dataclass(frozen=True)
class Case:
    """One submission. `replace` maps a qualified name of the base to its new source, "" to delete it; `loses` are ids of rubric items,
    without those that are skipped because they require one of them.

    files: more files beside it, by name; `{base}` stands in them, and in `entry`'s text, for the base's source.
    """

    name: str
    base: str
    loses: tuple[str, ...] = ()
    why: str = ""
    replace: dict[str, str] = field(default_factory=dict)
    before: str = ""
    after: str = ""
    entry: str = ""
    files: dict[str, str] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        return not self.loses

    def source(self) -> str:
        """The base with functions replaced, and lines before and after it."""
        text = (HERE / "bases" / f"{self.base}.py").read_text(encoding="utf-8")
        for name, code in self.replace.items():
            text = replaced(text, name, code)
        return "\n\n".join(part for part in (self.before, text, self.after) if part)

    def write(self, folder: Path) -> Path:
        """The submission's files in `folder`; what to grade: the one file, or the folder if there are several."""
        folder.mkdir(parents=True)
        entry = folder / (self.entry or f"{self.name}.py")
        entry.parent.mkdir(parents=True, exist_ok=True)
        entry.write_text(self.source(), encoding="utf-8")
        for name, text in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        return folder if self.files else entry


def replaced(text: str, name: str, code: str) -> str:
    """`text` with the class or function of this qualified name replaced. KeyError if there is none."""
    node: Any = ast.parse(text)
    for part in name.split("."):
        node = next((n for n in node.body if getattr(n, "name", "") == part), None)
        if node is None:
            raise KeyError(f"the base has no {name}")
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    lines = text.splitlines()
    new = textwrap.indent(textwrap.dedent(code).strip("\n"), " " * node.col_offset)
    return "\n".join([*lines[: first - 1], *new.splitlines(), *lines[node.end_lineno :], ""])


def cases() -> list[Case]:
    """Every submission of the index, wrong ones and right ones."""
    table = tomllib.loads((HERE / "index.toml").read_text(encoding="utf-8"))
    return [Case(**{**row, "loses": tuple(row.get("loses", ()))}) for row in table["case"]]


def rubric_at_one_size(path: Path) -> Path:
    """The suite's rubric at `path`, with one world size an item: 3 where that is asked (uneven slices, and more than a pair), else 2."""

    def one(found: re.Match[str]) -> str:
        sizes = [int(n) for n in found[1].split(",")]
        return f"world_sizes = [{next((n for n in (3, 2) if n in sizes), sizes[0])}]"

    path.write_text(re.sub(r"world_sizes = \[([\d, ]+)\]", one, DEFAULT.read_text(encoding="utf-8")), encoding="utf-8")
    return path


def graded(path: Path, scratch: Path, *options: str) -> dict[str, Any]:
    """The report of one submission at one world size an item, under a fixed seed, without isolation: these are our own."""
    out, rubric = scratch / "out", rubric_at_one_size(scratch / "rubric.toml")
    words = ("grade", str(path), "--out", str(out), "--rubric", str(rubric), "--seed", "5", "--isolation", "none")
    main([*words, "--deadline", "60", "-n", "0", *options])
    (report,) = out.glob("*/grade.json")
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return found


def judged(path: Path, items: Collection[str]) -> set[str]:
    """Which of these items a submission loses at one world size, asked on ranks that this process has already: quick."""
    chosen = [item for item in load().items if item.id in items]
    sizes = {item.id: next((n for n in (3, 2) if n in item.world_sizes), item.world_sizes[0]) for item in chosen}
    with Subject(str(path)) as subject:
        found = {item.id: judge(subject, item.checks, [sizes[item.id]]) for item in chosen}
    return {id for id, verdicts in found.items() if any(v.violations for v in verdicts)}


def lost(report: dict[str, Any]) -> set[str]:
    """Ids of items that were asked and earned less than they could; those skipped because of them are left out."""
    return {i["id"] for i in report["items"] if i["outcome"] in ("failed", "partial", "timeout", "crashed")}


def skipped(report: dict[str, Any]) -> dict[str, set[str]]:
    """What each skipped item requires, itself or through others."""
    requires = {i["id"]: set(i["requires"]) for i in report["items"]}

    def all_of(id: str) -> set[str]:
        return requires[id].union(*(all_of(needed) for needed in requires[id]))

    return {i["id"]: all_of(i["id"]) for i in report["items"] if i["outcome"] == "skipped"}
