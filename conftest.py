"""Loads the suite's plugin when the package is run from a checkout that is not installed; installed, its entry point does.

Also gives torch one thread in the test processes: they share the cores with each other and with the ranks that they started.
"""

import os
from importlib.metadata import entry_points

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch
if not any(point.name == "minigpt_dist" for point in entry_points(group="pytest11")):
    pytest_plugins = ["minigpt_dist.pytest_plugin"]
