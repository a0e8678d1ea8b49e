"""Names its own helper files like modules of the grader's."""

# attacks: optimizer.plain

import json

import sitecustomize  # noqa: F401  # none of the grader's, and none of this submission's either
from wrong import *  # noqa: F403

assert json.dumps
