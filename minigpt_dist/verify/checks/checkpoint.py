"""Does load_sharded give back what save_sharded was given: every kind of value, every rank, nothing else touched?

Owns the round trips, and the words shared with `checkpoint_refusals.py` and `checkpoint_crash.py`. Leaves what ranks do to
`verify/checkpoint_probe.py`. World size here is the number of states; all of it runs on one rank.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

from minigpt_dist.verify.checkpoint_probe import STEP, Rows, as_states, probe_body
from minigpt_dist.verify.checkpoint_states import REQUIRED, Census, censuses, difference, lesson_states, tensor_kinds, value_kinds
from minigpt_dist.verify.checks.registry import Check, register
from minigpt_dist.verify.subject import NotJudged, Subject
from minigpt_dist.verify.violation import Violation

Find = Callable[[Subject, int], list[Violation]]


class CannotAsk(Exception):  # noqa: N818 - what happened reads better than what it is
    """Even an undisturbed save failed; the violation says how."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(violation.what)
        self.violation = violation


def asked(subject: Subject, probe: str, *args: Any) -> Rows:
    """The rows of one probe, in a folder that is gone afterwards. CannotAsk if a plain save already fails."""
    with tempfile.TemporaryDirectory(prefix="minigpt-dist-", ignore_cleanup_errors=True) as area:
        answer = subject.ask(probe_body, 1, probe, area, *args)[0]
    if "broken" in answer:
        raise CannotAsk(Violation("save_sharded, undisturbed,", str(answer["broken"]), "returned", "save"))
    rows: Rows = answer["rows"]
    return rows


def check(name: str, claim: str, find: Find, world_sizes: tuple[int, ...] = (2,), stage: str = "load") -> None:
    """Register a check of the checkpoint piece; a save that fails by itself is its violation."""

    def guarded(subject: Subject, world_size: int) -> list[Violation]:
        try:
            return find(subject, world_size)
        except CannotAsk as reason:
            return [reason.violation]

    register(Check(f"checkpoint.{name}", claim, guarded, ("checkpoint",), stage, world_sizes))


def told(loaded: dict[str, Any]) -> str:
    """What a load did, in words."""
    if "states" in loaded:
        return "loaded"
    return f"refused ({loaded['refused']})" if "refused" in loaded else str(loaded["wrong"])


def unequal(loaded: dict[str, Any], wanted: list[Census], case: str, stage: str = "load", step: int | None = 10, hint: str = "") -> list[Violation]:
    """None if exactly the wanted states were loaded; else the first place where they differ, or what happened instead."""
    if "states" not in loaded:
        return [Violation(f"the load of {case}", told(loaded), "the saved states", stage, step=step, hint=hint)]
    found = difference(loaded["states"], wanted)
    if found is None:
        return []
    rank, path, seen, right = found
    return [Violation(f"what was loaded of {case}", seen, f"{right}, as saved", stage, step=step, rank=rank, tensor=path, hint=hint)]


def first(found: list[list[Violation]]) -> list[Violation]:
    """The first that is not empty."""
    return next((violations for violations in found if violations), [])


def saved(world_size: int, version: int = 1) -> list[Census]:
    """The census of the states of one version."""
    return censuses(lesson_states(world_size, version))


def round_trip(subject: Subject, world_size: int) -> list[Violation]:
    """Each rank's state comes back from the disk in another process, bit for bit, at its own place in the list."""
    loaded = asked(subject, "round_trip", world_size)[0]["loaded"]
    return unequal(loaded, saved(world_size), "the checkpoint", hint=_misplaced(loaded, saved(world_size)))


def _misplaced(loaded: dict[str, Any], wanted: list[Census]) -> str:
    """Are the right states there in another order, or one in place of all?"""
    states = loaded.get("states", [])
    places = [wanted.index(state) if state in wanted else None for state in states]
    if None in places or places == list(range(len(wanted))):
        return ""
    return f"these are the states of ranks {places}: " + ("sorted as text?" if sorted(map(str, places)) == [str(p) for p in places] else "in another order")


def _kinds(which: str) -> Find:
    make = tensor_kinds if which == "tensors" else value_kinds

    def find(subject: Subject, world_size: int) -> list[Violation]:
        """Every kind comes back as it was; a save may raise for an uncommon one, but not change it."""
        for row in asked(subject, "kinds", world_size, which):
            named = row["kinds"][0] if len(row["kinds"]) == 1 else "every kind of value"
            if row["save"]:
                if named in REQUIRED:
                    return [Violation(f"the save of a state with {named}", f"raised {row['save']}", "done", "save", step=10)]
                continue
            wanted = censuses(as_states([{kind: make(rank)[kind] for kind in row["kinds"]} for rank in range(world_size)]))
            found = unequal(row["loaded"], wanted, f"a state with {named}")
            if found:
                return found
        return []

    return find


def states_untouched(subject: Subject, world_size: int) -> list[Violation]:
    """A save reads its states and does not change them."""
    row = asked(subject, "untouched", world_size)[0]
    return unequal(row["loaded"], saved(world_size), row["case"], "save", hint="the save changed the caller's own states")


def independent(subject: Subject, world_size: int) -> list[Violation]:
    """Neither training on after a save nor after a load changes the checkpoint, and it is on the disk when the save returns."""
    rows = asked(subject, "independent", world_size)
    hint = "the save must have copied or written every byte before it returns, and the load must not share memory with the file or the saved tensors"
    return first([unequal(row["loaded"], saved(world_size), f"the checkpoint ({row['case']})", hint=hint) for row in rows])


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
        found = unequal(row["loaded"], saved(size, row["version"]), row["case"], "save", step=None, hint="a file of the earlier checkpoint was loaded")
        if found:
            return found
    return []


def deliberate(refusal: str) -> bool:
    """Does an error say that something exists already?"""
    return refusal.startswith("raised") and any(word in refusal for word in ("FileExistsError", "exist", "already"))


def side_by_side(subject: Subject, world_size: int) -> list[Violation]:
    """Checkpoints in several folders do not mix, nor is one removed by saving another; a moved one is itself, or refused."""
    found = []
    for row in asked(subject, "side_by_side", world_size):
        if not (row.get("or_refused") and "refused" in row["loaded"]):
            found.append(unequal(row["loaded"], saved(world_size, row["version"]), row["case"], "save", step=None))
    return first(found)


def paths(subject: Subject, world_size: int) -> list[Violation]:
    """A relative dest_dir means the working directory of the save, for good, and nothing is written beside it."""
    row = asked(subject, "paths", world_size)[0]
    if row["strays"]:
        return [Violation("what the save left outside dest_dir", ", ".join(row["strays"][:5]), "nothing", "save", step=10)]
    return unequal(row["loaded"], saved(world_size), f"the checkpoint {row['case']}", hint="does the manifest hold paths relative to the working directory?")


def one_file_a_rank(subject: Subject, world_size: int) -> list[Violation]:
    """No file holds two ranks' states."""
    rows = asked(subject, "layout", world_size)
    shared = next((row for row in rows if len(row["ranks"]) > 1), None)
    if shared:
        ranks = ", ".join(map(str, shared["ranks"]))
        return [Violation(f"the ranks whose state is in {shared['file']}", ranks, "one: a shard holds its rank's state only", "save", step=10)]
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
