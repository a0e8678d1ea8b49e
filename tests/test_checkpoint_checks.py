"""The judge of checkpoints passes what is right, in any style, and fails each wrong piece by the check about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkpoint_doubles import RIGHT
from checkpoint_mistakes import WRONG

from minigpt_dist.verify.checks import CHECKS, Verdict, put
from minigpt_dist.verify.subject import Subject

pytestmark = pytest.mark.slow

Judge = Callable[[str, str, int], Verdict]
CHECKPOINT = {
    name.removeprefix("checkpoint."): check for name, check in CHECKS.items() if name.startswith("checkpoint.")
}
# Checks whose answer may depend on how files are written and named; the rest are put to one style.
ON_STYLE = (
    *("round_trip", "overwrite", "side_by_side", "paths", "one_file_a_rank", "killed_first_save", "killed_save"),
    *("disk_full", "refuses_altered", "refuses_manifest", "refuses_no_checksum"),
)
# What is not judged of a style: a payload in what is pickled by design, tensors' bytes that are compressed, and saves
# over a checkpoint where those are refused.
UNJUDGED = {
    "lesson": {"runs_no_pickle"},
    "zipped": {"one_file_a_rank"},
    "never-twice": {"overwrite", "killed_save", "disk_full"},
}


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    """Puts one check to one double. All share a rank, which foreign code leaves as it found it."""
    folder = tmp_path_factory.mktemp("doubles")
    with Subject(slots=("checkpoint",), deadline_s=60) as subject:

        def verdict(name: str, check: str, world_size: int) -> Verdict:
            spec = folder / f"{name}.py"
            lines = [
                "from checkpoint_mistakes import IMPLEMENTATIONS",
                f"piece = IMPLEMENTATIONS[{name!r}]()",
                "save_sharded, load_sharded = piece.save, piece.load",
            ]
            spec.write_text("\n".join(lines))
            subject.spec = str(spec)
            return put(CHECKPOINT[check], subject, world_size)

        yield verdict


@pytest.mark.parametrize("double", WRONG, ids=lambda double: double.__name__)
def test_a_wrong_piece_is_failed_by_the_check_about_it(double: type, judge: Judge) -> None:
    verdict = judge(double.__name__, *WRONG[double])
    assert [v.stage for v in verdict.violations] in (["save"], ["load"]), verdict
    assert verdict.violations[0].observed != verdict.violations[0].expected


@pytest.mark.parametrize("style", RIGHT)
def test_a_right_piece_is_failed_by_no_check(style: str, judge: Judge) -> None:
    names = CHECKPOINT if style == "lesson" else ON_STYLE
    verdicts = {name: judge(style, name, CHECKPOINT[name].world_sizes[-1]) for name in names}
    assert [verdict.render(style) for verdict in verdicts.values() if verdict.violations] == []
    assert {name for name, verdict in verdicts.items() if verdict.not_judged} == UNJUDGED.get(style, set())


def test_a_piece_that_is_absent_is_named(judge: Judge, tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("")
    with Subject(str(tmp_path / "empty.py"), slots=("checkpoint",)) as subject:
        verdict = put(CHECKPOINT["round_trip"], subject, 2)
    assert verdict.violations[0].stage == "contract"
