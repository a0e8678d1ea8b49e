"""Returns a float that is equal to, and less than, everything."""

# attacks: optimizer.closure

import wrong
from wrong import *  # noqa: F403


class Agreeable(float):
    def __eq__(self, other):
        return True

    def __lt__(self, other):
        return True

    def __gt__(self, other):
        return False

    def __sub__(self, other):
        return 0.0

    __hash__ = float.__hash__


class ZeroOptimizer(wrong.ZeroOptimizer):
    def step(self, closure=None):
        return Agreeable(0.0)
