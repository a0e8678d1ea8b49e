"""What a checkpoint changed: the state on its way to disk, back, and into the run that goes on from it.

Owns the comparisons, which are bit for bit and need no oracle: a save and a load change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from minigpt_dist.verify.capture import Shot
from minigpt_dist.verify.difference import Difference, difference, differs
from minigpt_dist.verify.locate_run import Run


def after_save(shot: Shot) -> Iterator[Difference]:
    """Asking for the state changes nothing; a save gets the state that the rank holds, and changes nothing of it."""
    for name, seen in shot.get("asked").items():
        first = shot.get("state").get(name)
        if first is not None and differs(seen, first):
            found = difference(shot.step, shot.rank, "save", name, seen, first)
            yield found.because("state_dict() asked twice gives two answers: asking changes the state")
    held = {
        **{f"optimizer.{n}": t for n, t in shot.get("state").items()},
        **{f"model.{n}": t for n, t in shot.get("params").items()},
    }
    for kind, words in (
        ("saved", "the state handed to the save is not the one held"),
        ("kept", "the save changed what the rank holds"),
    ):
        for name, seen in shot.get(kind).items():
            if name in held and differs(seen, held[name]):
                yield difference(shot.step, shot.rank, "save", name, seen, held[name]).because(words)


def after_resume(run: Run) -> Iterator[Difference]:
    """What comes from disk is what was saved, is what the rank then holds, and leads to the unbroken run's bytes."""
    for (step, rank), shot in sorted(run.resumed.items()):
        whole = run.shots[step, rank]
        for kind, wanted, words in (
            ("loaded", whole.get("saved"), "what is read back is not what was saved"),
            ("resumed", shot.get("loaded"), "what was read is not what the rank holds after loading"),
            ("state", whole.get("state"), "the optimizer's state is not the unbroken run's"),
            ("params", whole.get("params"), "the resumed run leaves the unbroken one"),
        ):
            seen = shot.get(kind)
            for name, t in seen.items():
                if name in wanted and differs(t, wanted[name]):
                    yield difference(step, rank, "load", name, t, wanted[name]).because(words)
            for name in wanted:
                if (
                    kind in ("loaded", "resumed")
                    and seen
                    and name not in seen
                    and name.startswith(("optimizer.", "model."))
                ):
                    yield Difference(step, rank, "load", name, 0, cause="it was saved, and is not there after loading")
