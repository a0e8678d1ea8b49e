"""Mutation testing: change one thing in a module of the package, run the tests that ought to notice, say which changes nobody noticed.

    python tests/mutate.py parallel/adam.py parallel/exact.py

Cosmic Ray makes the changes and runs the tests, in a copy of the tree; settings and each module's tests are in pyproject.toml under
`tool.cosmic-ray`. Owns the operators that Cosmic Ray lacks (calls dropped and doubled, bounds and keyword arguments dropped) and the
score. A survivor that no test can notice stands in `equivalent_mutants.toml`, with the reason.
"""

from __future__ import annotations

import difflib
import os
import random
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import cosmic_ray.plugins
import parso
import pytest
import safetensors.torch  # noqa: F401  # imported once, for all forks; with it torch
import toml  # Cosmic Ray's own reader: Python 3.10 has none
import torch._dynamo  # noqa: F401  # imported once, for all forks: the first optimizer does
from cosmic_ray.mutating import use_mutation
from cosmic_ray.operators.operator import Operator
from cosmic_ray.work_item import MutationSpec

ROOT = Path(__file__).parents[1]
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")
# What is the same when it is done twice; and what only guards against a mistake in the module itself.
IDEMPOTENT = re.compile(r"\.(zero_|copy_|fill_)\(|\.add_\(0\.0\)")
GUARD = re.compile(r",\s*strict=\w+")
Change = tuple[str, str]  # lines taken out, lines put in


def place(node: Any) -> tuple[Any, Any]:
    return node.start_pos, node.end_pos


def text(code: str, like: Any) -> Any:
    """A leaf that reads `code` where `like` stood."""
    return parso.python.tree.Name(code, like.start_pos, prefix=like.get_first_leaf().prefix)


def is_call(node: Any) -> bool:
    """A statement that is one call, or an augmented assignment: what is done for its effect."""
    if node.type != "simple_stmt":
        return False
    first = node.children[0]
    called = first.type in ("atom_expr", "power") and first.children[-1].type == "trailer"
    added = first.type == "expr_stmt" and first.children[1].type in ("annassign", "operator")
    return bool(called or (added and re.match(r"\s*[\w.\[\]]+ [+*-]= ", first.get_code())))


class _Statement(Operator):
    """Changes a statement that is made for its effect."""

    template = ""

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        if is_call(node):
            yield place(node)

    def mutate(self, node: Any, index: int) -> Any:
        old = node.children[0]
        node.children[0] = text(self.template.format(old.get_code(include_prefix=False)), old)
        return node

    @classmethod
    def examples(cls) -> Iterable[Any]:
        return ()


class DropStatement(_Statement):
    template = "pass"


class DoubleStatement(_Statement):
    template = "{0}; {0}"

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        if not IDEMPOTENT.search(node.get_code()):
            yield from super().mutation_positions(node)


class DropKeyword(Operator):
    """f(a, k=v) becomes f(a)."""

    def _keywords(self, node: Any) -> list[int]:
        if node.type == "arglist" or (node.type == "trailer" and node.children[0] == "("):
            return [i for i, c in enumerate(node.children) if c.type == "argument" and c.children[1] == "="]
        return []

    def mutation_positions(self, node: Any) -> list[Any]:
        return [place(node.children[i]) for i in self._keywords(node)]

    def mutate(self, node: Any, index: int) -> Any:
        at = self._keywords(node)[index]
        comma = [] if node.type == "trailer" else [at - 1 if at else at + 1]
        node.children = [c for i, c in enumerate(node.children) if i not in (at, *comma)]
        return node

    @classmethod
    def examples(cls) -> Iterable[Any]:
        return ()


class DropBound(Operator):
    """a[lo:hi] becomes a[:hi] or a[lo:]."""

    def _bounds(self, node: Any) -> list[int]:
        return [i for i, c in enumerate(node.children) if c != ":"] if node.type == "subscript" else []

    def mutation_positions(self, node: Any) -> list[Any]:
        return [place(node.children[i]) for i in self._bounds(node)]

    def mutate(self, node: Any, index: int) -> Any:
        node.children.pop(self._bounds(node)[index])
        return node

    @classmethod
    def examples(cls) -> Iterable[Any]:
        return ()


OPERATORS = {cls.__name__: cls for cls in (DropStatement, DoubleStatement, DropKeyword, DropBound)}


def mutations(module: Path, operators: list[str]) -> Iterator[MutationSpec]:
    """Every change that the operators whose names match one of the patterns can make to a module."""
    for name in cosmic_ray.plugins.operator_names():
        if any(re.fullmatch(pattern, name) for pattern in operators):
            operator = cosmic_ray.plugins.get_operator(name)()
            tree = parso.parse(module.read_text(encoding="utf-8"))
            positions = [place for node in nodes(tree) for place in operator.mutation_positions(node)]
            for occurrence, (start, end) in enumerate(positions):
                yield MutationSpec(module, name, occurrence, start, end)


def nodes(node: Any) -> Iterator[Any]:
    yield node
    for child in getattr(node, "children", ()):
        yield from nodes(child)


def change(before: str, after: str) -> Change:
    """The lines taken out and the lines put in, without indentation."""
    lines = list(difflib.ndiff(before.splitlines(), after.splitlines()))
    out, put = ("\n".join(x[2:].strip() for x in lines if x.startswith(sign)) for sign in ("- ", "+ "))
    return out, put


def passes(arguments: list[str], limit_s: float, log: Path) -> bool:
    """Do the tests pass, in `limit_s`? They run in a fork, which has not imported the package; what they print goes to `log`."""
    child = os.fork()
    if child == 0:
        os.setsid()  # a group of its own, which can be ended with all that the tests started
        code = 1
        try:
            for stream in (1, 2):
                os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
            sys.path.insert(0, os.getcwd())
            code = int(pytest.main(arguments))
        finally:
            os._exit(code)  # nothing of the parent's, the copy's removal above all, is this process's to do
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.02)  # between two looks at a child that has a limit; a pidfd would be Linux alone
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def equivalents(name: str) -> set[Change]:
    """The changes of a module that are argued to be none."""
    listed = toml.loads(EQUIVALENT.read_text(encoding="utf-8")).get(name, [])
    return {(entry["out"], entry["put"]) for entry in listed}


def judge(name: str, settings: dict[str, Any]) -> tuple[int, int]:
    """(killed, all but the equivalent) of a module, named as below the package; prints the survivors."""
    log = Path("tests.log")
    tests = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *shlex.split(settings["tests"][name])]
    start = time.monotonic()
    if not passes(tests, settings["timeout"], log):
        raise SystemExit(f"the tests of {name} do not pass before anything is changed:\n{log.read_text()[-2000:]}")
    limit_s = 20 + 4 * (time.monotonic() - start)  # beyond it a mutant counts as hanging, and so as killed
    known, path, killed, survivors = equivalents(name), Path("minigpt_dist", name), 0, 0
    specs = list(mutations(path, settings["operators"]))
    random.Random(0).shuffle(specs)  # so that what is tried before time is up is a fair sample
    end = time.monotonic() + 60 * settings["minutes"]
    for i, spec in enumerate(specs, start=1):
        if time.monotonic() > end:
            print(f"{name}: time is up, {len(specs) - i + 1} of {len(specs)} mutants not tried")
            break
        operator = cosmic_ray.plugins.get_operator(spec.operator_name)()
        with use_mutation(path, operator, spec.occurrence) as (before, after):
            made = change(before, after)
            if made in known or GUARD.sub("", made[0]) == GUARD.sub("", made[1]):
                continue
            log.unlink()
            alive = passes(tests, limit_s, log)
        survivors, killed = survivors + alive, killed + (not alive)
        if alive:
            print(f"\n{name}:{spec.start_pos[0]} survives\n- {made[0]}\n+ {made[1]}", flush=True)
        print(f"{name} {i} of {len(specs)}", end="\r", file=sys.stderr)
    print(f"\n{name}: {killed} of {killed + survivors} killed, {len(known)} equivalent")
    return killed, killed + survivors


def main(names: list[str]) -> int:
    """Judge the modules named, or all; 1 if a change survives that is not in the list."""
    settings = toml.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cosmic-ray"]
    cosmic_ray.plugins.OPERATOR_PROVIDERS["minigpt_dist"] = OPERATORS
    sys.dont_write_bytecode = True  # a change within a second of the last would be taken for the same file
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        for item in ("minigpt_dist", "tests", "conftest.py", "pyproject.toml", "README.md"):
            source = ROOT / item
            target = Path(folder, item)
            shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
        os.chdir(folder)
        totals = [judge(name, settings) for name in names or settings["tests"]]
    killed, judged = (sum(column) for column in zip(*totals, strict=True))
    print(f"\n{killed} of {judged} mutants killed, {100 * killed / max(judged, 1):.1f} %")
    return int(killed < judged)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
