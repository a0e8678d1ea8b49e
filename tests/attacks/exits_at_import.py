"""Ends the process with status 0 before anything is asked."""

# attacks: optimizer.plain

import os

os._exit(0)
