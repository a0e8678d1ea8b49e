"""`minigpt-dist diff`: did a change of an implementation change any bit?

Owns the options, and what BASE and HEAD may name: revisions of the repository here, or paths. Imports no torch. Leaves
running and comparing to `verify/refactor.py`, and printing to `diffing`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from minigpt_dist.cli.usage import UsageError, names, number, seconds, sizes, whole
from minigpt_dist.verify.revisions import (
    RevisionError,
    commit_of,
    commits_between,
    repository,
    subject_of,
    worktree,
)
from minigpt_dist.verify.sides import PACKAGE, Side, side_at

NAME = "diff"
HELP = "run two revisions or paths of an implementation side by side and compare every bit"
WORLD_SIZES = (1, 2, 4)
DEADLINE_S = 60.0
WORKING_TREE = "the working tree"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    sizes_text = ",".join(map(str, WORLD_SIZES))
    add("base", metavar="BASE", help="a git revision of the repository here, or a path; with --bisect a good revision")
    add("head", metavar="HEAD", nargs="?", help=f"the same ({WORKING_TREE}); with --bisect a bad revision (HEAD)")
    add(
        "--impl", metavar="PATH", help=f"the file or folder in each tree that is the implementation (package {PACKAGE})"
    )
    add("--world-sizes", type=sizes("world_sizes"), default=WORLD_SIZES, metavar="N,M", help=f"ranks ({sizes_text})")
    add("--only", type=names, default=(), metavar="WORD,...", help="the cases whose name has one of these in it")
    add("--seed", type=whole("seed"), default=0, metavar="N", help="of data and weights (0)")
    add("--within-oracle", action="store_true", help="other bits are fine where both sides are correct within rounding")
    add("--bisect", action="store_true", help="find the first revision after BASE that differs from it")
    deadline = f"seconds one case may take ({DEADLINE_S:g})"
    add("--deadline", type=number("deadline"), default=DEADLINE_S, metavar="S", help=deadline)


def run(args: argparse.Namespace) -> int:
    """Compare and print; 0 if nothing differs (or all is correct, with --within-oracle), 1 if something does."""
    seconds("deadline", args.deadline)
    if args.seed < 0:
        raise UsageError(f"seed is {args.seed}, but should be a whole number of at least 0")
    try:
        return _bisect(args) if args.bisect else _compare(args)
    except RevisionError as error:
        raise UsageError(str(error)) from error


def _compare(args: argparse.Namespace) -> int:
    with opened("BASE", args.base, args.impl) as base, opened("HEAD", args.head, args.impl) as head:
        from minigpt_dist.cli import diffing

        return diffing.compare_sides(base, head, args)


def _bisect(args: argparse.Namespace) -> int:
    repo = repository(Path.cwd())
    if repo is None:
        raise UsageError(f"the folder here is {str(Path.cwd())!r}, but should be in a git repository, to bisect")
    good, bad = (_commit(repo, what, text) for what, text in (("GOOD", args.base), ("BAD", args.head or "HEAD")))
    commits = commits_between(repo, good, bad)
    if not commits:
        raise UsageError(f"BAD is {subject_of(repo, bad)!r}, the same as GOOD, but should be a later revision")
    from minigpt_dist.cli import diffing

    def at(commit: str) -> AbstractContextManager[Side]:
        return _checked_out(repo, commit, args.impl, subject_of(repo, commit))

    return diffing.bisect(at, good, commits, args)


def _commit(repo: Path, what: str, text: str) -> str:
    found = commit_of(repo, text)
    if found is None:
        raise UsageError(f"{what} is {text!r}, but should be a revision of the repository {str(repo)!r}")
    return found


@contextmanager
def opened(what: str, text: str | None, impl: str | None) -> Iterator[Side]:
    """The side that `text` names, for the length of the block: a revision, else a path; None is the working tree.

    UsageError if it is neither, or holds no implementation.
    """
    repo = repository(Path.cwd())
    commit = commit_of(repo, text) if repo is not None and text is not None else None
    if repo is not None and commit is not None:
        with _checked_out(repo, commit, impl, f"{what} {text}") as side:
            yield side
    elif text is not None and Path(text).exists():
        yield _side(f"{what} {text}", Path(text), impl)
    elif text is not None:
        where = "of no repository: there is none here" if repo is None else f"of the repository {str(repo)!r}"
        raise UsageError(f"{what} is {text!r}, but should be a path that is there, or a revision {where}")
    elif repo is None:
        raise UsageError(f"{what} is not given, and the folder here is in no git repository, but one should be there")
    else:
        yield _side(WORKING_TREE, repo, impl)


@contextmanager
def _checked_out(repo: Path, commit: str, impl: str | None, label: str) -> Iterator[Side]:
    with worktree(repo, commit) as tree:
        yield _side(label, tree, impl)


def _side(label: str, place: Path, impl: str | None) -> Side:
    try:
        return side_at(label, place, impl)
    except ValueError as error:
        raise UsageError(str(error)) from error
