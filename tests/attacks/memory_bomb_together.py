"""Takes all memory with many processes, each within its own limit."""

# needs: walls
# attacks: optimizer.plain

import os
import time

for _ in range(16):
    if os.fork() == 0:
        break
hoard = [bytearray(b"x") * (1 << 26) for _ in range(24)]
time.sleep(300)  # the attack itself: it keeps what it took
