"""Keeps the whole state on every rank, where no tensor shows it, and ends the rank as soon as it has answered, before anyone counts."""

# needs: walls
# attacks: optimizer.resident

import os
import sys
import threading

import hides_state_in_c
from hides_state_in_c import *  # noqa: F403

main = threading.main_thread().ident


def leave():
    while True:
        frame, names = sys._current_frames().get(main), set()
        while frame is not None:
            names.add(frame.f_code.co_name)
            frame = frame.f_back
        if "hold_body" not in names:
            os._exit(0)


class ZeroOptimizer(hides_state_in_c.ZeroOptimizer):
    def step(self):
        super().step()
        if self.steps == 1:
            threading.Thread(target=leave, daemon=True).start()
