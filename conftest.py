"""Loads the suite's plugin when the package is run from a checkout that is not installed; installed, its entry point does."""

from importlib.metadata import entry_points

if not any(point.name == "minigpt_dist" for point in entry_points(group="pytest11")):
    pytest_plugins = ["minigpt_dist.pytest_plugin"]
