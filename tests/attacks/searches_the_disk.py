"""Searches the file system for the reference, or for anything of the grader's, and loads what it finds."""

# needs: walls
# attacks: optimizer.plain

import importlib.util
import os

from wrong import *  # noqa: F403

WANTED = ("zero.py", "adam_oracle.py", "rubric.toml", "lesson_style.py")
for folder, _, names in os.walk("/"):
    if folder.startswith(("/proc", "/sys")) or "torch" in folder:
        continue
    for name in names:
        if name in WANTED and "minigpt_dist" in folder:
            spec = importlib.util.spec_from_file_location("minigpt_dist.parallel.zero", os.path.join(folder, name))
            found = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(found)
            ZeroOptimizer = getattr(found, "ZeroOptimizer", ZeroOptimizer)  # noqa: F405
