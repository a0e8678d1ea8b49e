"""Revisions of a git repository as folders.

Owns every call of git: resolving a name, a worktree for the length of a block, the commits between two. Nothing is written
into the repository but git's own record of the worktree, which is removed again. Leaves what runs in the folders to
`refactor_run.py`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class RevisionError(ValueError):
    """No such revision, or no repository. The message is one line: what is X, but should be Y."""


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints, without the last line's end; None if it fails. Hooks do not run."""
    # Inside a hook git sets these to the hook's own repository and index.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-c", f"core.hooksPath={os.devnull}", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
        )
    except FileNotFoundError as error:
        raise RevisionError("git is not there, but should be installed, to look at revisions") from error
    return done.stdout.strip() if done.returncode == 0 else None


def repository(folder: Path) -> Path | None:
    """The top of the repository that `folder` is in; None if it is in none."""
    top = _git(folder, "rev-parse", "--show-toplevel")
    return Path(top) if top else None


def commit_of(repo: Path, name: str) -> str | None:
    """The full hash of the commit that `name` stands for; None if it stands for none."""
    return _git(repo, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}") or None


def subject_of(repo: Path, commit: str) -> str:
    """Short hash and first line of its message."""
    return _git(repo, "log", "-1", "--format=%h %s", commit) or commit


def commits_between(repo: Path, good: str, bad: str) -> list[str]:
    """Commits after `good` up to `bad`, oldest first, along first parents. RevisionError unless `good` is an ancestor of `bad`."""
    if _git(repo, "merge-base", "--is-ancestor", good, bad) is None:
        raise RevisionError(
            f"GOOD is {subject_of(repo, good)!r}, but should be an ancestor of BAD, {subject_of(repo, bad)!r}"
        )
    return (_git(repo, "rev-list", "--reverse", "--first-parent", f"{good}..{bad}") or "").split()


@contextmanager
def worktree(repo: Path, commit: str) -> Iterator[Path]:
    """The files of a commit in a temporary folder, for the length of the block; gone afterwards, also after an error."""
    holder = Path(tempfile.mkdtemp(prefix="minigpt-dist-revision-"))
    tree = holder / "tree"
    try:
        if _git(repo, "worktree", "add", "--detach", "--quiet", str(tree), commit) is None:
            raise RevisionError(f"revision {commit} is one that git cannot check out, but should be whole")
        yield tree
    finally:
        _git(repo, "worktree", "remove", "--force", str(tree))
        shutil.rmtree(holder, ignore_errors=True)
        _git(repo, "worktree", "prune")
