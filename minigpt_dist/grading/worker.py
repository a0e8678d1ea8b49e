"""A grading process: reads orders as JSON lines on stdin, writes answers as JSON lines on stdout.

Owns the line protocol of the worker's side. No submission's code runs here: that is in ranks, which this process starts. Run as
`python -m minigpt_dist.grading.worker`.

In: {"do": "open", "order": {...}} -> {"opened": {...}} or {"broken": "why"}; {"do": "ask", "group": {...}} -> {"answer": {...}} for each
unit, then {"done": NAME}. A new "open" ends the submission before it. End of input ends the worker and all its ranks.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any, TextIO

from minigpt_dist.grading.grader import OURS, Grader, Order, broken
from minigpt_dist.grading.plan import Group


class _Served:
    """The submission that is open, and the lines said about it."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._grader: Grader | None = None

    def say(self, message: dict[str, Any]) -> None:
        self._out.write(json.dumps(message, allow_nan=False) + "\n")
        self._out.flush()

    def do(self, message: dict[str, Any]) -> None:
        try:
            {"open": self._open, "ask": self._ask}[message["do"]](message)
        except OURS as error:
            self.say({"broken": broken(error)})

    def _open(self, message: dict[str, Any]) -> None:
        self.end()
        self._grader = Grader(Order.from_dict(message["order"]))
        self.say({"opened": self._grader.inspect() if message["inspect"] else {}})

    def _ask(self, message: dict[str, Any]) -> None:
        assert self._grader is not None, "ask before open"
        group = Group.from_dict(message["group"])
        for answer in self._grader.answer(group):
            self.say({"answer": answer.to_dict()})
        self.say({"done": group.name})

    def end(self) -> None:
        grader, self._grader = self._grader, None
        if grader is None:
            return
        grader.close()
        del grader
        gc.collect()  # evidence, and errors whose tracebacks lead back to it, are cycles, which would add up over a cohort
        gc.freeze()  # what is left (modules, oracles that all submissions share) need not be looked at again


def main() -> None:
    """Serve until stdin ends. Whatever else prints to stdout goes to stderr, so that the lines stay clean."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii") as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        served = _Served(out)
        try:
            served.say({"ready": True})
            for line in sys.stdin:
                served.do(json.loads(line))
        except (BrokenPipeError, KeyboardInterrupt):
            pass  # the grader is gone, or is ending us
        finally:
            served.end()


if __name__ == "__main__":
    main()
