"""Does load_sharded refuse what is not the checkpoint that was saved?

Any exception is a refusal, and nothing less is. Damage that leaves every value as it was may go unnoticed: what counts
is that no wrong state is ever loaded. Owns the refusals' checks. Leaves the damage to `verify/checkpoint_damage.py`.
"""

from __future__ import annotations

from minigpt_dist.verify.checkpoint_states import difference
from minigpt_dist.verify.checks.checkpoint_words import Find, asked, check, saved, told, unequal
from minigpt_dist.verify.subject import NotJudged, Subject
from minigpt_dist.verify.violation import Violation

UNVERIFIED = (
    "every shard's checksum must be in the manifest, and be compared with the bytes read, before they are believed"
)


def _damage(category: str, hint: str = UNVERIFIED) -> Find:
    def find(subject: Subject, world_size: int) -> list[Violation]:
        """After each damage of the category, the load raises, or gives exactly what was saved."""
        control, *rows = asked(subject, "damage", world_size, category)
        broken = unequal(control["loaded"], saved(world_size), "the undamaged checkpoint")
        if broken:
            return broken
        if not rows:
            raise NotJudged("its files give no place for this damage")
        for row in rows:
            loaded, what = row["loaded"], f"the load of a checkpoint with {row['case']}"
            if "refused" in loaded:
                continue
            if "states" not in loaded:
                return [
                    Violation(
                        what, told(loaded), "refused by an exception", "load", step=10, rank=row["rank"], hint=hint
                    )
                ]
            found = difference(loaded["states"], saved(world_size))
            if found:
                rank, path, seen, right = found
                observed, expected = f"accepted, with {path} {seen}", f"refused (saved was {right})"
                return [
                    Violation(
                        what,
                        observed,
                        expected,
                        "load",
                        step=10,
                        rank=row["rank"] if rank is None else rank,
                        tensor=path,
                        hint=hint,
                    )
                ]
        return []

    return find


def refuses_world_size(subject: Subject, world_size: int) -> list[Violation]:
    """A checkpoint of N ranks is not one of fewer or more."""
    control, *rows = asked(subject, "other_world_sizes", world_size)
    broken = unequal(control["loaded"], saved(world_size), "the checkpoint at its own world size")
    if broken:
        return broken
    for row in rows:
        if "refused" not in row["loaded"]:
            what = f"the load for {row['case']} ranks of a checkpoint of {world_size}"
            return [
                Violation(
                    what,
                    told(row["loaded"]),
                    "refused by an exception",
                    "load",
                    step=10,
                    hint="compare the manifest's world_size with expected_world_size",
                )
            ]
    return []


def refuses_before_loading(subject: Subject, world_size: int) -> list[Violation]:
    """A shard whose checksum is wrong is not unpickled first."""
    for row in asked(subject, "payload", world_size, False):
        if row["ran"]:
            return [
                Violation(
                    f"a pickle planted in {row['case']}, whose checksum does not fit,",
                    "unpickled: its code ran",
                    "refused unread",
                    "load",
                    step=10,
                    hint="compare the checksum before torch.load or pickle.load see the bytes",
                )
            ]
    return []


def runs_no_pickle(subject: Subject, world_size: int) -> list[Violation]:
    """No file can run code by being loaded, even with a fitting checksum. Not judged where all shards are pickles, as in the lesson."""
    rows = asked(subject, "payload", world_size, True)
    ran = [row for row in rows if row["ran"]]
    if not ran:
        return []
    if all(row["pickle"] for row in rows if row["shard"]):
        raise NotJudged(
            f"its shards are pickles, and who can write {ran[0]['case']} and the manifest can run code: "
            "torch.load with weights_only=True, or safetensors, would refuse"
        )
    return [
        Violation(
            f"a pickle planted in {ran[0]['case']}",
            "unpickled: its code ran",
            "refused",
            "load",
            step=10,
            hint="a side file needs the same care as the shards",
        )
    ]


check("refuses_world_size", "a checkpoint of another world size is refused", refuses_world_size, (1, 2, 4))
check(
    "refuses_missing", "a missing shard is refused", _damage("missing", "a shard that is not there must not be skipped")
)
check("refuses_truncated", "a truncated shard is refused", _damage("truncated"))
check("refuses_altered", "a shard with one altered byte is refused", _damage("altered"))
check("refuses_exchanged", "shards of another rank or step are refused", _damage("exchanged"))
check(
    "refuses_manifest",
    "a missing, torn or edited manifest is refused",
    _damage("manifest", "the manifest decides what is loaded: without it, or against it, nothing is"),
)
check(
    "refuses_no_checksum",
    "a missing checksum is no checksum passed",
    _damage("no_checksum", "a checksum that is null, empty or absent must be refused, not skipped"),
)
check("refuses_before_loading", "nothing is unpickled before its checksum is compared", refuses_before_loading)
check("runs_no_pickle", "loading runs no code, unless the shards are pickles by design", runs_no_pickle)
