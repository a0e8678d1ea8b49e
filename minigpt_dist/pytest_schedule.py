"""Which tests go to which of pytest-xdist's workers: those that share runs to one, the longest first.

Owns the order under `-n`. Leaves what runs are shared to `verify/subject.py`.
"""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# One run a world size answers them all: apart, each worker would make it again.
COMPOSED = ("test_monotone_loss", "test_param_norms", "test_optimizer_bytes", "test_oracle", "test_resume_bytes")
# Each of their cases makes long runs of its own: in one scope, one worker would have them all.
ALONE = ("test_a_correct_variant_passes_every_check",)


class SharedRuns(LoadScopeScheduling):
    """A file's tests go to one worker, those of the composed run too, and files in the order in which they were collected.

    The suite is collected first, so its long files do not end up last, when only one worker is left with something to do.
    """

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # else files with few tests come last, and those have the long ones

    def _split_scope(self, nodeid: str) -> str:
        scope: str = super()._split_scope(nodeid)
        if nodeid.split("::")[-1].partition("[")[0] in ALONE:
            return nodeid
        return "composed" if PurePosixPath(scope.split("::")[0]).stem in COMPOSED else scope
