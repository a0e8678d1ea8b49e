"""Which paths are submissions, what they are called, and what is kept of an interrupted grading."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from minigpt_dist.grading.answers import Answer
from minigpt_dist.grading.cohort import entrants
from minigpt_dist.grading.kept import NAME, Kept


def made(root: Path, *files: str) -> Path:
    for name in files:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
    return root


def names(path: Path, scratch: Path, **options: bool) -> list[str]:
    return [e.name for e in entrants([str(path)], scratch, **options)]


@pytest.fixture
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch")


def test_a_folder_of_files_folders_and_archives_is_a_cohort(tmp_path: Path, scratch: Path) -> None:
    made(tmp_path, "ada.py", "bob/solution.py", "cy.zip", "dan.ipynb", "notes.md", ".hidden.py", "__pycache__/x.py")
    assert names(tmp_path, scratch) == ["ada", "bob", "cy", "dan.ipynb"]


@pytest.mark.parametrize("entry", ["solution.py", "main.py", "submission.py", "adapters.py", "__init__.py"])
def test_a_folder_with_an_entry_is_one_submission(tmp_path: Path, scratch: Path, entry: str) -> None:
    assert names(made(tmp_path / "eve", entry, "zero.py", "pieces/ddp.py"), scratch) == ["eve"]


def test_a_folder_with_one_python_file_or_nothing_is_one_submission(tmp_path: Path, scratch: Path) -> None:
    (tmp_path / "none").mkdir()
    assert names(made(tmp_path / "fay", "zero.py", "README.md"), scratch) == ["fay"]
    assert names(tmp_path / "none", scratch) == ["none"]


def test_every_submission_has_a_folder_of_its_own_beside_the_files_of_all(tmp_path: Path, scratch: Path) -> None:
    made(tmp_path, "x.2.py", "X.zip", "grades.csv.py", "index.html.py", "y/solution.py")
    (tmp_path / "x.py").symlink_to("x.py")
    found = names(tmp_path, scratch)
    assert found == ["X", "grades.csv.2", "index.html.2", "x.2", "x.3", "y"]


def test_a_folder_is_one_submission_where_that_is_said(tmp_path: Path, scratch: Path) -> None:
    assert names(made(tmp_path / "gil", "zero.py", "ddp.py"), scratch, single=True) == ["gil"]


def test_an_archive_of_folders_is_a_cohort_and_of_one_a_submission(tmp_path: Path, scratch: Path) -> None:
    for archive, members in {"all.zip": ("ada/solution.py", "bob/main.py"), "one.zip": ("ada/solution.py",)}.items():
        with zipfile.ZipFile(tmp_path / archive, "w") as file:
            for member in members:
                file.writestr(f"export/{member}", "x = 1\n")
    assert names(tmp_path / "all.zip", scratch) == ["ada", "bob"]
    assert names(tmp_path / "one.zip", scratch) == ["one"]


def test_a_bad_archive_is_a_submission_that_says_so_itself(tmp_path: Path, scratch: Path) -> None:
    (tmp_path / "bad.zip").write_text("no archive")
    assert names(tmp_path / "bad.zip", scratch) == ["bad"]


def test_names_are_unique_and_safe(tmp_path: Path, scratch: Path) -> None:
    paths = [str(made(tmp_path / d, "a b;é.py") / "a b;é.py") for d in ("one", "two")]
    assert [e.name for e in entrants([*paths, "fault:no_bias_correction"], scratch)] == [
        "a_b_",
        "a_b_.2",
        "fault_no_bias_correction",
    ]


def test_a_glob_is_expanded_where_the_shell_did_not(tmp_path: Path, scratch: Path) -> None:
    made(tmp_path, "ada.py", "bob.py", "cy.txt")
    assert names(tmp_path / "*.py", scratch) == ["ada", "bob"]


def test_a_missing_path_is_told(tmp_path: Path, scratch: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nosuch\.py"):
        names(tmp_path / "nosuch.py", scratch)


def test_kept_answers_hold_for_the_same_header_only(tmp_path: Path) -> None:
    answers = [Answer("optimizer.plain", N, "passed") for N in (1, 2)]
    Kept(tmp_path, {"seed": 1}).begin(answers)
    assert list(Kept(tmp_path, {"seed": 1}).load().values()) == answers
    assert Kept(tmp_path, {"seed": 2}).load() == {}


def test_a_torn_last_line_is_dropped_and_the_file_goes_on(tmp_path: Path) -> None:
    answers = [Answer("optimizer.plain", N, "passed") for N in (1, 2, 3)]
    Kept(tmp_path, {}).begin(answers[:2])
    (tmp_path / NAME).write_text((tmp_path / NAME).read_text()[:-9])
    kept = Kept(tmp_path, {})
    kept.begin(kept.load().values())
    kept.add(answers)
    assert list(Kept(tmp_path, {}).load().values()) == answers
