"""Does load_sharded give back what save_sharded was given: every kind of value, every rank, nothing else touched?

Owns the round trips. Leaves what ranks do to `verify/checkpoint_probe.py`, refusals to `checkpoint_refusals.py`, and
saves that fail to `checkpoint_crash.py`.
"""

from __future__ import annotations

from typing import Any

from minigpt_dist.verify.checkpoint_probe import STEP, across_body, as_states
from minigpt_dist.verify.checkpoint_states import REQUIRED, Census, censuses, tensor_kinds, value_kinds
from minigpt_dist.verify.checks.checkpoint_words import Find, asked, check, deliberate, first, saved, unequal
from minigpt_dist.verify.subject import NotJudged, Subject
from minigpt_dist.verify.violation import Violation


def round_trip(subject: Subject, world_size: int) -> list[Violation]:
    """Each rank's state comes back from the disk in another process, bit for bit, at its own place in the list."""
    loaded = asked(subject, "round_trip", world_size)[0]["loaded"]
    found = unequal(loaded, saved(world_size), "the checkpoint", hint=_misplaced(loaded, saved(world_size)))
    return found or _elsewhere(subject, world_size)


def _elsewhere(subject: Subject, world_size: int) -> list[Violation]:
    """The same in a sandbox in which the checkpoint's files, put there by the judge, are all that there is of the save."""
    if not subject.walled:
        return []
    with subject.area() as area:
        files, failure = subject.ask(across_body, 1, area, world_size, None)[0]
        loaded = failure or subject.run_afresh(across_body, 1, area, world_size, files)[0][1]
    hint = "only what is in dest_dir may be needed: no other folder, no shared memory, no attributes of files"
    return unequal(loaded, saved(world_size), "the checkpoint's files, alone,", hint=hint)


def _misplaced(loaded: dict[str, Any], wanted: list[Census]) -> str:
    """Are the right states there, but in other places?"""
    places = [wanted.index(state) if state in wanted else None for state in loaded.get("states", [])]
    if None in places or places == list(range(len(wanted))):
        return ""
    text_order = sorted(range(len(wanted)), key=str)
    return f"these are the states of ranks {places}" + (": file names sorted as text" if places == text_order else "")


def _kinds(which: str) -> Find:
    make = tensor_kinds if which == "tensors" else value_kinds

    def find(subject: Subject, world_size: int) -> list[Violation]:
        """Every kind comes back as it was; a save may raise for an uncommon one, but not change it."""
        for row in asked(subject, "kinds", world_size, which):
            named = row["kinds"][0] if len(row["kinds"]) == 1 else "every kind of value"
            if row["save"]:
                if named in REQUIRED:
                    return [
                        Violation(f"the save of a state with {named}", f"raised {row['save']}", "done", "save", step=10)
                    ]
                continue
            wanted = censuses(
                as_states([{kind: make(rank)[kind] for kind in row["kinds"]} for rank in range(world_size)])
            )
            found = unequal(row["loaded"], wanted, f"a state with {named}")
            if found:
                return found
        return []

    return find


def states_untouched(subject: Subject, world_size: int) -> list[Violation]:
    """A save reads its states and does not change them."""
    row = asked(subject, "untouched", world_size)[0]
    return unequal(
        row["loaded"], saved(world_size), row["case"], "save", hint="the save changed the caller's own states"
    )


def independent(subject: Subject, world_size: int) -> list[Violation]:
    """Training on after a save or a load does not change the checkpoint, which is there when the save returns."""
    rows = asked(subject, "independent", world_size)
    hint = "every byte must be written before the save returns, and no memory shared with caller or file"
    return first(
        [unequal(row["loaded"], saved(world_size), f"the checkpoint ({row['case']})", hint=hint) for row in rows]
    )


def overwrite(subject: Subject, world_size: int) -> list[Violation]:
    """The last of several saves to a folder is the one that loads, with no shard of an earlier one."""
    for row in asked(subject, "overwrite", world_size):
        size = world_size + 1 if row.get("more") else world_size
        if row["save"]:
            if deliberate(row["save"]):
                raise NotJudged(f"a folder that holds a checkpoint is refused: {row['save']}")
            return [Violation(f"the save of {row['case']}", row["save"], "done", "save")]
        if row.get("more") and "refused" in row["loaded"]:
            continue
        found = unequal(
            row["loaded"],
            saved(size, row["version"]),
            row["case"],
            "save",
            step=None,
            hint="a file of the earlier checkpoint was loaded",
        )
        if found:
            return found
    return []


def side_by_side(subject: Subject, world_size: int) -> list[Violation]:
    """Checkpoints in several folders do not mix, nor does a save remove another; a moved one is itself, or refused."""
    found = []
    for row in asked(subject, "side_by_side", world_size):
        if not (row.get("or_refused") and "refused" in row["loaded"]):
            found.append(unequal(row["loaded"], saved(world_size, row["version"]), row["case"], "save", step=None))
    return first(found)


def paths(subject: Subject, world_size: int) -> list[Violation]:
    """A relative dest_dir means the working directory of the save, for good, and nothing is written beside it."""
    row = asked(subject, "paths", world_size)[0]
    if row["strays"]:
        return [
            Violation("what the save left outside dest_dir", ", ".join(row["strays"][:5]), "nothing", "save", step=10)
        ]
    return unequal(
        row["loaded"],
        saved(world_size),
        f"the checkpoint {row['case']}",
        hint="does the manifest hold paths relative to the working directory?",
    )


def one_file_a_rank(subject: Subject, world_size: int) -> list[Violation]:
    """No file holds two ranks' states."""
    rows = asked(subject, "layout", world_size)
    shared = next((row for row in rows if len(row["ranks"]) > 1), None)
    if shared:
        ranks = ", ".join(map(str, shared["ranks"]))
        return [
            Violation(
                f"the ranks whose state is in {shared['file']}",
                ranks,
                "one: a shard holds its rank's state only",
                "save",
                step=10,
            )
        ]
    if not any(row["ranks"] for row in rows) and len(rows) >= world_size:
        raise NotJudged("the files hold no tensor's bytes as they are")
    if len(rows) < world_size:
        return [Violation("the number of files", str(len(rows)), f"at least {world_size}, one a rank", "save", step=10)]
    return []


def records_step(subject: Subject, world_size: int) -> list[Violation]:
    """The manifest tells the step it was given."""
    rows = asked(subject, "recorded_step", world_size)
    for row in rows:
        if row["error"]:
            return [Violation("the load", row["error"], "free of errors", "load", step=STEP)]
        if row["step"] not in (None, STEP):
            return [Violation(f"the step told by {row['place']}", str(row["step"]), str(STEP), "save", step=STEP)]
    if any(row["step"] == STEP for row in rows):
        return []
    documents = [row["place"] for row in rows if row["place"].endswith(".json")]
    if documents:
        return [Violation(f"the step told by {documents[0]}", "absent", str(STEP), "save", step=STEP)]
    raise NotJudged("there is no manifest in JSON, and neither function returns one")


check("round_trip", "every rank's state comes back from the disk bit for bit", round_trip, (1, 2, 3, 4, 11))
check("tensors", "tensors of every dtype and shape come back as they were", _kinds("tensors"))
check("values", "plain values of every kind come back as they were", _kinds("values"))
check("states_untouched", "a save does not change the states it is given", states_untouched, stage="save")
check("independent", "training on after a save or a load does not change the checkpoint", independent)
check("overwrite", "of several saves to one folder the last is loaded", overwrite, stage="save")
check("side_by_side", "checkpoints in several folders do not mix", side_by_side, stage="save")
check("paths", "a save depends on no working directory and writes nothing elsewhere", paths, stage="save")
check("one_file_a_rank", "each rank's state has its own file", one_file_a_rank, (3,), stage="save")
check("records_step", "the step is recorded", records_step, stage="save")
