"""What optimizer memory above a rank's share looks like: everything everywhere, more on some ranks, something beside it, or growth.

Owns the hint of a violated memory rule. Leaves what is too much to `checks/`.
"""

from __future__ import annotations

from collections.abc import Sequence

SLACK = 4 * 4096  # ranks that hold alike differ by step counts and padding


def hint_of(held: Sequence[int], P: int, share: int, later: int = 0) -> str:
    """`held` bytes of every rank where `share` is right, for `P` parameters; `later` is what one of them holds after more steps."""
    worst = max(held)
    if later > worst + SLACK:
        return f"it grows with the steps: {later} bytes later"
    least = min(held)
    whole = least >= 12 * P or 8 * P <= least <= 8 * P * 1.03 + SLACK  # with a master copy, or two moments alone
    if len(held) > 1 and whole:
        return "every rank holds the whole state: it is not sharded"
    if worst - least > SLACK:
        return f"state is lopsided, and too much in all: the least that a rank holds is {least} bytes"
    return f"every rank holds {worst / share:.3g} times its share: something is kept beside master copy and moments"
