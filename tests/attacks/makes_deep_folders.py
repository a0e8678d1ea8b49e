"""Makes folders in folders, thousands deep, wherever it may, and locks the last."""

# attacks: optimizer.plain

import contextlib
import os
import tempfile

from wrong import *  # noqa: F403

for place in dict.fromkeys((tempfile.gettempdir(), "/tmp", "/shared")):
    with contextlib.suppress(OSError):
        os.mkdir(f"{place}/attack-file-{os.getpid()}")
        os.chdir(f"{place}/attack-file-{os.getpid()}")
        for _ in range(2000):
            os.mkdir("d")
            os.chdir("d")
        os.chmod(".", 0)
os.chdir("/")
