"""Are large shards saved whole, and verified whole?"""

from __future__ import annotations

from minigpt_dist.verify.checkpoint_large import large_states
from minigpt_dist.verify.checkpoint_states import censuses, difference
from minigpt_dist.verify.checks.checkpoint_words import asked, check, unequal
from minigpt_dist.verify.subject import Subject
from minigpt_dist.verify.violation import Violation


def large_shards(subject: Subject, world_size: int) -> list[Violation]:
    """Tensors of 1.2 MB come back to the last byte, and a byte changed anywhere in them is refused."""
    wanted = censuses(large_states(world_size))
    control, *rows = asked(subject, "large", world_size)
    broken = unequal(control["loaded"], wanted, control["case"])
    if broken:
        return broken
    for row in rows:
        found = difference(row["loaded"]["states"], wanted) if "states" in row["loaded"] else None
        if found:
            hint = "the checksum must cover the whole file"
            seen = f"accepted, with {found[1]} {found[2]}"
            return [
                Violation(
                    f"the load with {row['case']}",
                    seen,
                    "refused by an exception",
                    "load",
                    step=10,
                    rank=found[0],
                    tensor=found[1],
                    hint=hint,
                )
            ]
    return []


check("large_shards", "shards of more than a mebibyte are saved and verified whole", large_shards)
