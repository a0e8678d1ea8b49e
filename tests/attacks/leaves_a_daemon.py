"""Leaves processes behind, each in a session of its own, and detached twice."""

# attacks: optimizer.plain

import os
import sys

from wrong import *  # noqa: F403

for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            # the attack itself: a process that outlives all others for as long as it is let
            os.closerange(0, 64)
            os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(300)  # attack-left-behind"])
        os._exit(0)
