"""The changes that Cosmic Ray lacks: calls dropped and doubled, bounds and keyword arguments dropped.

Owns these operators and the list of all places where an operator applies. Leaves making a change to Cosmic Ray.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import cosmic_ray.plugins
import parso
from cosmic_ray.operators.operator import Operator
from cosmic_ray.work_item import MutationSpec

# What is the same when it is done twice: setting, emptying, and calls that do nothing but raise an error.
IDEMPOTENT = re.compile(
    r"\.(zero_|zero_grad|copy_|fill_|clear|discard)\(|\.add_\(0\.0\)|\b(_?check(ed)?_\w+|check|_?need_\w+|step_name)\("
)


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
    """f(a, k=v) becomes f(a). Not of `device`: on a machine with one kind of device, its default is that one."""

    def _keywords(self, node: Any) -> list[int]:
        if node.type == "arglist" or (node.type == "trailer" and node.children[0] == "("):
            return [
                i
                for i, c in enumerate(node.children)
                if c.type == "argument" and c.children[1] == "=" and c.children[0].value != "device"
            ]
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
