"""The lesson's fourth invariant: a checkpoint resumes byte-equal, in fresh processes, and trains on to the same bytes."""

from __future__ import annotations

from minigpt_dist.launch import LaunchError
from minigpt_dist.trace import Record, Trace
from minigpt_dist.verify.checks.registry import Check, broken_run, register
from minigpt_dist.verify.composition import Composed, altered, evidence_of
from minigpt_dist.verify.subject import NotJudged, Subject
from minigpt_dist.verify.violation import Violation


def resumes_byte_equal(subject: Subject, world_size: int) -> list[Violation]:
    """(d) What is loaded at step 10 equals the snapshot, and each step to 20 the unbroken run: every parameter, buffer and state byte."""
    return resume_violations(evidence_of(subject, world_size))


def resume_violations(evidence: Composed) -> list[Violation]:
    """The first byte in which the resumed run differs from the unbroken one, from its checkpoint on."""
    if isinstance(evidence.resume_error, NotJudged):
        raise evidence.resume_error
    if isinstance(evidence.resume_error, LaunchError):
        return [broken_run(evidence.resume_error, "load")]
    if evidence.resume_error is not None or evidence.resumed is None:
        return [Violation("the resume", str(evidence.resume_error), "free of errors", "load")]
    return continues(evidence.resumed, evidence.whole, evidence.config.checkpoint_step)


def continues(resumed: Trace, unbroken: Trace, start: int) -> list[Violation]:
    """The first place, from the step `start` that was loaded on, where a resumed run differs from the unbroken one in a byte."""
    whole = {(r.step, r.rank): r for r in unbroken.records}
    last = unbroken.steps[-1]
    wanted = [(s, r) for s in range(start, last + 1) for r in range(unbroken.world_size)]
    again = {(r.step, r.rank): r for r in resumed.records}
    for key in wanted:
        if key not in again:
            return [
                Violation(
                    "the resumed run",
                    "without this step",
                    f"trained from {start} to {last}",
                    "load",
                    step=key[0],
                    rank=key[1],
                )
            ]
        found = _first_difference(again[key], whole[key], start)
        if found:
            return [found]
    return []


def _first_difference(resumed: Record, unbroken: Record, start: int) -> Violation | None:
    stage = "load" if resumed.step == start else "optimizer"
    hint = (
        ""
        if resumed.step == start
        else "the state was loaded right, and the next updates differ: something that steers them is not saved "
        "(step count, options, random stream, data position)"
    )
    for kind, mine, theirs in (
        ("parameter", resumed.params, unbroken.params),
        ("optimizer state", resumed.optimizer, unbroken.optimizer),
    ):
        for name, value in theirs.items():
            if mine.get(name) != value:
                return Violation(
                    f"the {kind}'s bytes (sha256)",
                    str(mine.get(name))[:16],
                    f"{value[:16]}, as in the unbroken run",
                    stage,
                    step=resumed.step,
                    rank=resumed.rank,
                    tensor=name,
                    hint=hint,
                )
    if resumed.tokens != unbroken.tokens and resumed.step > start:
        return Violation(
            "tokens read",
            str(resumed.tokens[:4]),
            f"{unbroken.tokens[:4]}, as in the unbroken run",
            "data",
            step=resumed.step,
            rank=resumed.rank,
        )
    return None


def resumes_from_what_is_there(subject: Subject, world_size: int) -> list[Violation]:
    """A moment changed in the checkpoint changes the first update after the resume: what goes on is what was saved."""
    evidence = evidence_of(subject, world_size)
    if evidence.resumed is None:
        raise NotJudged("there is no resume to compare with")
    path, trace = altered(subject, evidence)
    if path is None:
        raise NotJudged("the checkpoint holds no moment that could be changed")
    start = evidence.config.checkpoint_step
    if trace.steps and trace.steps[-1] > start and _params(trace, start + 1) != _params(evidence.resumed, start + 1):
        return []
    hint = "the resumed run does not use what is in the checkpoint"
    what = f"the parameters after the first update from a checkpoint in which {path} was changed"
    return [Violation(what, "the same as from the unchanged one", "others", "load", step=start + 1, rank=0, hint=hint)]


def _params(trace: Trace, step: int) -> list[dict[str, str]]:
    return [record.params for record in trace.at(step)]


register(
    Check(
        "resume_bytes.altered",
        "a moment changed in the checkpoint changes what follows",
        resumes_from_what_is_there,
        ("model", "broadcast", "optimizer", "checkpoint"),
        "load",
        world_sizes=(2,),
    )
)
register(
    Check(
        "resume_bytes",
        "the checkpoint of step 10 resumes byte-equal and trains on to the same bytes",
        resumes_byte_equal,
        ("model", "broadcast", "optimizer", "checkpoint"),
        "load",
    )
)
