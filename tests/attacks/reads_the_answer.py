"""Looks for the expected values in frames, in objects alive, and in modules loaded."""

# attacks: optimizer.plain

import gc
import sys

import wrong
from wrong import *  # noqa: F403


def answers():
    frame = sys._getframe()
    while frame is not None:
        for name, value in frame.f_locals.items():
            if name in ("right", "wanted", "expected", "candidate"):
                yield value
        frame = frame.f_back
    yield from (o for o in gc.get_objects() if isinstance(o, dict) and "expected" in o)
    oracle = sys.modules.get("minigpt_dist.verify.adam_oracle")
    if oracle is not None:
        yield oracle


class ZeroOptimizer(wrong.ZeroOptimizer):
    def step(self):
        if not any(True for _ in answers()):
            raise LookupError("there is no answer in this process")
