"""Runs of the command in this process, and the tables that it prints: what the tests of `minigpt-dist train` share."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path

import pytest

from minigpt_dist.__main__ import main
from minigpt_dist.cli import training
from minigpt_dist.cli.training import Outcome

SIZE = ["--world-size", "2", "--steps", "4", "--reduction", "exact"]


@dataclass
class Run:
    """A finished command: exit code, its output, its folder."""

    code: int
    out: str
    folder: Path
    outcome: Outcome


def run_into(folder: Path, *words: str) -> Run:
    """`minigpt-dist WORDS --out FOLDER`, in this process."""
    seen: list[Outcome] = []
    original = training._train

    def spy(*args: object) -> Outcome:
        seen.append(original(*args))  # type: ignore[arg-type]  # handed through as they came
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(training, "_train", spy)
        code = main([*words, "--out", str(folder)])
    return Run(code, out.getvalue(), folder, seen[-1])


def rows(text: str, title: str) -> list[list[str]]:
    """The cells of the table under `title`, without its head."""
    body = text[text.index(title) :].split("\n\n")[0]
    return [line.split() for line in body.splitlines()[2:]]
