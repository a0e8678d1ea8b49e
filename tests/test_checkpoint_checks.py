"""The judge of checkpoints passes what is right, in any style, and fails each wrong piece by the check about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkpoint_doubles import RIGHT, WRONG

from minigpt_dist.verify.checks import CHECKS, Verdict, put
from minigpt_dist.verify.subject import Subject

Judge = Callable[[str, str, int], Verdict]
CHECKPOINT = {
    name.removeprefix("checkpoint."): check for name, check in CHECKS.items() if name.startswith("checkpoint.")
}
# What a style may leave unjudged, and why.
UNJUDGED = {
    "lesson": {"runs_no_pickle"},
    "folder-swap": {"runs_no_pickle"},
    "file-by-file": {"runs_no_pickle"},
    "other-languages": {"runs_no_pickle"},
    "zipped": {"one_file_a_rank"},  # nor can a payload be planted in its format: it is refused
    "never-twice": {"runs_no_pickle", "overwrite", "killed_save", "disk_full"},
}


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    """Puts one check to one double. All share a rank, which foreign code leaves as it found it."""
    folder = tmp_path_factory.mktemp("doubles")
    with Subject(slots=("checkpoint",), deadline_s=60) as subject:

        def verdict(name: str, check: str, world_size: int) -> Verdict:
            spec = folder / f"{name}.py"
            lines = [
                "from checkpoint_doubles import IMPLEMENTATIONS",
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
    verdicts = [judge(style, name, check.world_sizes[-1]) for name, check in CHECKPOINT.items()]
    assert [v.render(style) for v in verdicts if v.violations] == []
    assert {v.check.removeprefix("checkpoint.") for v in verdicts if v.not_judged} == UNJUDGED[style]


def test_a_piece_that_is_absent_is_named(judge: Judge, tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("")
    with Subject(str(tmp_path / "empty.py"), slots=("checkpoint",)) as subject:
        verdict = put(CHECKPOINT["round_trip"], subject, 2)
    assert verdict.violations[0].stage == "contract"
