"""The schedule probe: an implementation's pipeline schedules, as plain lists."""

from __future__ import annotations

from typing import Any

from minigpt_dist.verify.contract import resolve
from minigpt_dist.verify.keywords import accepts

MOST_ACTIONS = 100_000


def schedule_body(spec: str, slots: list[str], cases: list[list[Any]]) -> dict[str, Any]:
    """Each case (kind, ranks, micro-batches, chunks): [rank][position] of [kind, stage, micro-batch], or {"raised": ...}."""
    found = resolve(spec, tuple(slots))
    if not found.offers("pipeline"):
        return {"not_judged": "it hands in no pipeline: --slots pipeline asks for it"}
    call = found.require("pipeline_schedule")
    if any(chunks > 1 for *_, chunks in cases) and not accepts(call, "chunks"):
        return {"not_judged": "pipeline_schedule takes no chunks"}
    shown: list[Any] = []
    for kind, ranks, micros, chunks in cases:
        try:
            out = call(kind, ranks, micros, chunks=chunks) if chunks > 1 else call(kind, ranks, micros)
        except NotImplementedError:  # not written yet, which is said as for every piece
            raise
        except Exception as error:
            shown.append({"raised": f"{type(error).__name__}: {error}"})
        else:
            shown.append(_plain(out))
    return {"schedules": shown}


def _plain(schedule: Any) -> Any:
    """Lists of (str, int, int); the text of what is none."""
    try:
        rows = [[[str(kind), int(stage), int(micro)] for kind, stage, micro in row] for row in schedule]
    except (TypeError, ValueError):
        return {"raised": "", "shown": repr(schedule)[:200]}
    return (
        rows if sum(map(len, rows)) <= MOST_ACTIONS else {"raised": "", "shown": "more actions than anyone could run"}
    )
