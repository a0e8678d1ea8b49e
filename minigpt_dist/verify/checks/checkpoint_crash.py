"""Does a save that is killed, or meets a full disk, cost nothing but itself?

Owns the rules of atomicity. Leaves the crashes to `verify/checkpoint_crash.py`.
"""

from __future__ import annotations

from typing import Any

from minigpt_dist.verify.checkpoint_crash import NEW, NEXT, OLD, PREVIOUS
from minigpt_dist.verify.checkpoint_states import Census, difference
from minigpt_dist.verify.checkpoint_store import Rows
from minigpt_dist.verify.checks.checkpoint_words import asked, check, deliberate, first, saved, told, unequal
from minigpt_dist.verify.subject import NotJudged, Subject
from minigpt_dist.verify.violation import Violation

ATOMIC = (
    "write every file under a temporary name, and rename only when all are written; never open a final name for writing"
)


def _torn(loaded: dict[str, Any], allowed: dict[str, list[Census]], case: str, hint: str) -> list[Violation]:
    """What loads must be one of the allowed, whole; a refusal is none of this rule's business."""
    if "refused" in loaded:
        return []
    if "states" not in loaded:
        return [
            Violation(f"the load after a save {case}", told(loaded), "a checkpoint or a refusal", "load", hint=hint)
        ]
    if any(difference(loaded["states"], states) is None for states in allowed.values()):
        return []
    found = difference(loaded["states"], next(iter(allowed.values())))
    assert found is not None
    rank, path, seen, right = found
    expected = f"{' or '.join(allowed)}, whole ({right}), or a refusal"
    return [
        Violation(
            f"what was loaded after a save {case}", seen, expected, "save", step=30, rank=rank, tensor=path, hint=hint
        )
    ]


def _others(row: dict[str, Any], world_size: int) -> list[Violation]:
    """The checkpoint in another folder is as before, and the next save works."""
    hint = "a save must leave other checkpoints alone"
    found = unequal(
        row["previous"],
        saved(world_size, PREVIOUS),
        f"the previous checkpoint, in another folder, after a save {row['case']}",
        "save",
        10,
        hint,
    )
    # One that refuses to save where a checkpoint is may do so, once there is one.
    done = "states" in row["dest"] and deliberate(str(row.get("again", {}).get("wrong", "")))
    if not found and "again" in row and not done:
        found = unequal(
            row["again"],
            saved(world_size, NEXT),
            f"the next save to the same folder after one {row['case']}",
            "save",
            40,
            "what a killed save leaves must not stop or spoil the next",
        )
    return found


def killed_first_save(subject: Subject, world_size: int) -> list[Violation]:
    """Into a new folder: what a kill leaves is the whole checkpoint or none, and the previous one is as it was."""
    whole, *rows = asked(subject, "killed", world_size, False)
    found = [unequal(whole["dest"], saved(world_size, NEW), "a save that nothing disturbed", step=30)]
    for row in rows:
        allowed = {"the new checkpoint": saved(world_size, NEW)}
        found += [
            _others(row, world_size),
            _torn(row["dest"], allowed, row["case"], "a torn checkpoint must be told from a whole one"),
        ]
    return first(found)


def killed_save(subject: Subject, world_size: int) -> list[Violation]:
    """Over an old checkpoint: it loads until the new files take their names; then the old, the new, or a refusal."""
    found = []
    for row in _over_old(asked(subject, "killed", world_size, True), world_size):
        found.append(_others(row, world_size))
        if row["keep"] and "states" not in row["dest"]:
            found.append(
                [
                    Violation(
                        f"the old checkpoint in the same folder, after a save {row['case']}",
                        told(row["dest"]),
                        "loaded, as before the save",
                        "save",
                        step=20,
                        hint=ATOMIC,
                    )
                ]
            )
        found.append(_torn(row["dest"], _old_or_new(world_size), row["case"], ATOMIC))
    return first(found)


def disk_full(subject: Subject, world_size: int) -> list[Violation]:
    """A save that meets a disk error raises, or has saved all the same; no other checkpoint is harmed."""
    found = []
    for row in _over_old(asked(subject, "disk_errors", world_size), world_size):
        found.append(_others(row, world_size))
        if row["end"] == "returned":
            hint = "save_sharded returned as if it had saved: let the OSError out"
            found.append(
                unequal(
                    row["dest"], saved(world_size, NEW), f"the checkpoint after a save {row['case']}", "save", 30, hint
                )
            )
        elif row["end"] != "raised":
            found.append(
                [Violation(f"a save {row['case']}", f"{row['end']} {row['said']}", "an exception", "save", step=30)]
            )
        found.append(_torn(row["dest"], _old_or_new(world_size), row["case"], ATOMIC))
    return first(found)


def _old_or_new(world_size: int) -> dict[str, list[Census]]:
    return {"the old checkpoint": saved(world_size, OLD), "the new one": saved(world_size, NEW)}


def _over_old(rows: Rows, world_size: int) -> Rows:
    """The rows of saves over an old checkpoint. NotJudged if such a save is refused on purpose."""
    whole, *others = rows
    if whole["end"] == "raised" and deliberate(f"raised {whole['said']}"):
        raise NotJudged(f"a folder that holds a checkpoint is refused: {whole['said']}")
    return others if whole["end"] == "returned" else rows


check("killed_first_save", "a killed save leaves the previous checkpoint as it was", killed_first_save, stage="save")
check("killed_save", "a save killed over an old checkpoint leaves the old or the new", killed_save, stage="save")
check("disk_full", "a save that cannot write raises", disk_full, stage="save")
