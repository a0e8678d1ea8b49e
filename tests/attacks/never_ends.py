"""Runs forever, with every signal ignored and every exception swallowed."""

# attacks: optimizer.plain

import contextlib
import signal

for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    with contextlib.suppress(OSError, ValueError):
        signal.signal(number, signal.SIG_IGN)
while True:
    try:
        while True:
            pass
    except BaseException:
        continue
