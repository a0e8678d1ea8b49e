"""Ends the process with status 0 from a trace function, an audit hook and a callback of the collector, in the judge's code."""

# attacks: optimizer.plain

import gc
import os
import sys
import threading

import wrong
from wrong import *  # noqa: F403


class ZeroOptimizer(wrong.ZeroOptimizer):
    def step(self):
        gc.callbacks.append(lambda *args: None)
        threading.setprofile(lambda *args: None)
        sys.addaudithook(lambda event, args: os._exit(0) if event.startswith("socket.send") else None)
        sys.settrace(lambda frame, event, arg: os._exit(0) if frame.f_code.co_name == "encode" else None)
