"""Reads command lines, environments and maps of every process for a seed or a path."""

# needs: walls
# attacks: optimizer.plain

import contextlib
import glob

from wrong import *  # noqa: F403

found = b""
for place in glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/environ"):
    with contextlib.suppress(OSError), open(place, "rb") as file:
        found += file.read()
if b"seed" in found:
    raise SystemExit("found it")
