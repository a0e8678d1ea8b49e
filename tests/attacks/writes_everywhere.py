"""Writes results of its own wherever it can, over the package and the submission too."""

# needs: walls
# attacks: optimizer.plain

import contextlib
import os
import sys

from wrong import *  # noqa: F403

RESULT = '{"score": 100, "verdict": "pass"}'
places = ["/autograder/results", "/submission", "/shared", "/site", "/", "/tmp", "/etc", "/root", *sys.path]
for place in places:
    for name in ("results.json", "grade.json", "sitecustomize.py"):
        with contextlib.suppress(OSError), open(os.path.join(place, name), "w") as file:
            file.write(RESULT)
