"""Which modes of isolation a machine can give, found without any sandbox of ours.

So that a test is left out only where a right or a program is missing, and a sandbox that breaks by itself fails its tests.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys

import pytest

from minigpt_dist.launch.sandbox import Isolation, choose

_TRIALS = {
    "namespaces": [
        "unshare",
        *(["--user", "--map-root-user"] if os.geteuid() else []),
        "--mount",
        "--pid",
        "--fork",
        "--net",
        "true",
    ],
    "bwrap": ["bwrap", "--ro-bind", "/", "/", "--unshare-pid", "--unshare-net", "true"],
}


@functools.cache
def lacking(mode: str) -> str:
    """What the machine lacks for a mode, as another program finds out; "" if nothing."""
    if sys.platform != "linux":
        return "it is not Linux"
    if mode == "uid":
        return "tests do not run as root, who alone may take another user's id" if os.geteuid() else ""
    if mode == "none":
        return ""
    trial = _TRIALS[mode]
    if shutil.which(trial[0]) is None:
        return f"no program {trial[0]}"
    done = subprocess.run(trial, capture_output=True, text=True, timeout=60)
    return done.stderr.strip() if done.returncode else ""


def working(mode: str) -> Isolation:
    """The mode in force. Skips the test where the machine cannot give it; fails it where only ours does not work."""
    if reason := lacking(mode):
        pytest.skip(f"isolation {mode} does not work on this machine: {reason}")
    chosen = choose(mode)
    assert chosen.name == mode, chosen.notes
    return chosen
