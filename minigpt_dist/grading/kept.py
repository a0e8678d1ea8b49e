"""Answers kept on disk, so that a grading that was interrupted goes on where it was.

Owns the file of one submission: a line that says what the answers hold for, then one line an answer. Answers to another submission,
another seed, another isolation or another version of the suite are not taken up.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from minigpt_dist.grading.answers import Answer, Unit

NAME = "answers.jsonl"


class Kept:
    """The answers in `folder`, None for nowhere. They hold only for an equal `header`."""

    def __init__(self, folder: Path | None, header: dict[str, Any]) -> None:
        self._path = None if folder is None else folder / NAME
        self._header = json.dumps(header, sort_keys=True)
        self._known: set[Unit] = set()

    def load(self) -> dict[Unit, Answer]:
        """What is kept for this header; a torn last line is dropped."""
        found: dict[Unit, Answer] = {}
        lines = self._lines()
        if lines[:1] != [self._header]:
            return found
        for line in lines[1:]:
            try:
                answer = Answer.from_dict(json.loads(line))
            except (ValueError, TypeError):
                break
            found[answer.unit] = answer
        self._known = set(found)
        return found

    def _lines(self) -> list[str]:
        try:
            return [] if self._path is None else self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError):
            return []

    def begin(self, answers: Iterable[Answer]) -> None:
        """Start the file anew with these answers."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(self._header + "\n", encoding="utf-8")
            self._known.clear()
            self.add(answers)

    def add(self, answers: Iterable[Answer]) -> None:
        """Append those that are not in the file yet."""
        new = [a for a in answers if a.unit not in self._known]
        if self._path is not None and new:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(a.to_dict(), allow_nan=False) + "\n" for a in new)
            self._known.update(a.unit for a in new)
