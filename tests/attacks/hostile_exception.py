"""Raises an exception whose text ends the process, or never comes."""

# attacks: optimizer.plain

import os

import wrong
from wrong import *  # noqa: F403


class HostileError(Exception):
    def __str__(self):
        os._exit(0)

    __repr__ = __str__


class ZeroOptimizer(wrong.ZeroOptimizer):
    def step(self):
        raise HostileError
