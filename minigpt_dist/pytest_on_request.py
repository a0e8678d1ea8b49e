"""Tests that run on request alone: their markers, and what is left out of a run that names none of them.

Owns the markers of long tests, and the questions about pieces that our own stack does not have.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

ON_REQUEST = {
    "peers": "well-known packages under the same judge, at every world size",
    "slow": "long tests of the package itself: crashes at every call, other revisions, torchrun, foreign checkpoints",
    "corpus": "every small submission and every attack of the corpora, graded whole, in every kind of sandbox",
    "catalogue": "every planted fault and every correct variant under the judge",
    "nightly": "every pair of layouts that a checkpoint moves between, every way to lose a rank or a node",
}


def leave_out_what_runs_on_request(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests of long markers, none of which `-m` names, unless a test's full name asks for it."""
    expression = str(config.getoption("-m"))
    left_out = [
        item
        for item in items
        if _asks_what_ours_is_not(item)
        or (
            not asked_for({marker.name for marker in item.iter_markers()}, expression)
            and not any(arg.endswith(item.name) for arg in config.args)
        )
    ]
    if left_out:
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=left_out)


def _asks_what_ours_is_not(item: pytest.Item) -> bool:
    """Would it ask our own stack about a piece that it does not have, in the shape that others have it?"""
    params = getattr(getattr(item, "callspec", None), "params", {})
    if params.get("subject") != "minigpt_dist" or "check_at" not in params:
        return False
    from minigpt_dist import __all__ as ours
    from minigpt_dist.verify.checks import CHECKS
    from minigpt_dist.verify.contract import SLOTS

    return not all(set(SLOTS[slot]) <= set(ours) for slot in CHECKS[params["check_at"][0]].slots)


def asked_for(markers: Iterable[str], expression: str) -> bool:
    """Does a test with these markers run under `-m expression`? One with markers of long tests, if it names any of them."""
    long = set(markers) & set(ON_REQUEST)
    return not long or any(marker in expression for marker in long)
