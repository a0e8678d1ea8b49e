"""`minigpt-dist diff`: identical, different, or correct both; over revisions of a small repository, and paths."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from minigpt_dist.__main__ import main
from minigpt_dist.cli import diffing
from minigpt_dist.verify.refactor_run import Sides
from minigpt_dist.verify.revisions import RevisionError, worktree

pytestmark = pytest.mark.slow

RIGHT = """
from minigpt_dist import MiniGPT, make_corpus
from minigpt_dist.verify.faults.base import LessonZero, broadcast_parameters, load_sharded, save_sharded


class ZeroOptimizer(LessonZero):
    pass
"""
IMPORT = "import torch.distributed as dist\n"
DIVIDED_FIRST = """
    def reduce(self):
        flat = self.flat_grads() / 3
        dist.all_reduce(flat)
        return self.cut(flat) * (3 / self.world_size)
"""
WRONG = DIVIDED_FIRST.replace("/ self.world_size", "")
COMMITS = {
    "right": RIGHT,
    "comment": "# a comment\n" + RIGHT,
    "rounding": IMPORT + RIGHT.replace("    pass\n", DIVIDED_FIRST),
    "wrong": IMPORT + RIGHT.replace("    pass\n", WRONG),
    "later": "# a comment\n" + IMPORT + RIGHT.replace("    pass\n", WRONG),
}
QUICK = ["--impl", "impl.py", "--world-sizes", "2", "--only", "float32"]


def git(folder: Path, *arguments: str) -> str:
    options = [
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@b",
        "-c",
        "init.defaultBranch=main",
        "-c",
        "commit.gpgsign=false",
    ]
    done = subprocess.run(["git", *options, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository whose every commit changes `impl.py`, and is tagged; a clean working tree at the last."""
    folder = tmp_path_factory.mktemp("repo")
    git(folder, "init", "-q")
    for name, text in COMMITS.items():
        (folder / "impl.py").write_text(text)
        git(folder, "add", ".")
        git(folder, "commit", "-q", "-m", f"{name} it is")
        git(folder, "tag", name)
    return folder


@pytest.fixture(scope="module")
def start() -> Iterator[Sides]:
    """One interpreter that all sides of this file are started from: torch takes seconds to load."""
    with Sides() as sides:
        yield sides


@pytest.fixture
def here(repo: Path, start: Sides, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The repository as the working folder."""
    monkeypatch.chdir(repo)
    monkeypatch.setattr(diffing, "Sides", lambda: contextlib.nullcontext(start))
    return repo


def untouched(repo: Path) -> bool:
    """Nothing new in the working tree, and no worktree left."""
    return git(repo, "status", "--porcelain", "--ignored") == "" and git(repo, "worktree", "list").count("\n") == 1


def test_a_comment_changes_no_bit(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "right", "comment", *QUICK]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "N=2 float32: identical"
    assert out[-1].startswith(
        "identical: HEAD comment and BASE right, every bit of 1 case (tokens, logits, gradients, "
    )
    assert untouched(here)


def test_rounding_is_a_difference_unless_the_oracle_may_allow_it(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", "comment", "rounding", "--within-oracle", *QUICK]) == 0
    out = capsys.readouterr().out
    assert "N=2 float32: bits differ, both correct\n" in out
    assert "first difference: step 1, rank 0, stage reduce, tensor exp_avg, element " in out
    assert "cause: in the last bits only: " in out


def test_a_fault_in_the_working_tree_is_named_and_blamed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "right", "--within-oracle", *QUICK]) == 1
    out = capsys.readouterr().out
    assert "N=2 float32: wrong\n" in out
    assert "HEAD" not in out
    assert (
        "the working tree (observed) against BASE right (expected)\nfirst difference: step 1, rank 0, stage reduce"
        in out
    )
    assert "the working tree is not correct within rounding:\n" in out
    assert out.count("cause: a factor N = 2: summed, but not divided\n") == 2


def test_bisect_finds_the_first_revision_that_is_wrong(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "--bisect", "right", "later", "--within-oracle", *QUICK]) == 1
    out = capsys.readouterr().out.splitlines()
    asked = [line.split()[1:] for line in out if line.endswith((": good", ": bad"))]
    assert [(words[0], words[-1]) for words in asked] == [("later", "bad"), ("rounding", "good"), ("wrong", "bad")]
    assert out[-1].startswith("first bad revision: ")
    assert " wrong it is (" in out[-1]
    assert untouched(here)


def test_a_side_that_breaks_is_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "broken.py").write_text(
        RIGHT.replace("    pass\n", "    def step(self):\n        raise OSError('no step')\n")
    )
    sides = [str(tmp_path / "right.py"), str(tmp_path / "broken.py")]
    assert main(["diff", *sides, "--world-sizes", "1", "--only", "float32"]) == 1
    out = capsys.readouterr().out
    assert f"only HEAD {sides[1]} raises OSError: no step\n" in out
    assert "broken.py" in out.split("Traceback")[1]


def test_a_side_that_hangs_is_told_in_its_deadline(
    tmp_path: Path, start: Sides, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(diffing, "Sides", lambda: contextlib.nullcontext(start))
    waits = "    def step(self):\n        threading.Event().wait()\n"
    (tmp_path / "hangs.py").write_text("import threading\n" + RIGHT.replace("    pass\n", waits))
    side = str(tmp_path / "hangs.py")
    assert main(["diff", side, side, "--world-sizes", "2", "--only", "float32", "--deadline", "1"]) == 3
    assert "N=2 float32: neither side comes to an end: BASE " in (err := capsys.readouterr().err)
    assert err.count("DeadlineExceeded: no end within 1 s") == 2


USAGE = {
    "diff nowhere": "BASE is 'nowhere', but should be a path that is there, or a revision of the repository ",
    "diff right nowhere": "HEAD is 'nowhere', but should be a path that is there, or a revision of the repository ",
    "diff right comment --impl absent.py": "BASE right is without 'absent.py', but should have a Python file, or a folder ",
    "diff .git": "BASE .git is without the package minigpt_dist, but should hold it, or be a Python file or a folder ",
    "diff right --world-sizes 0": "world_sizes is '0', but should be whole numbers from 1",
    "diff right --impl impl.py --deadline 0": "deadline is 0.0, but should be a positive",
    "diff right --impl impl.py --seed -1": "seed is -1, but should be a whole number of at least 0",
    "diff right --impl impl.py --only never": "only is 'never', but should be a part of one of: N=1 float32; ",
    "diff --bisect nowhere": "GOOD is 'nowhere', but should be a revision of the repository ",
    "diff --bisect later later": "BAD is '",
    "diff --bisect later right": "GOOD is '",
    "diff": "the following arguments are required: BASE",
}


@pytest.mark.parametrize("line", USAGE)
def test_a_wrong_command_is_told_in_one_line(line: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"minigpt-dist: {USAGE[line]}")
    assert untouched(here)


def test_outside_a_repository_only_paths_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert main(["diff", "main"]) == 2
    assert "or a revision of no repository: there is none here" in capsys.readouterr().err
    assert main(["diff", "--bisect", "main"]) == 2
    assert "but should be in a git repository, to bisect" in capsys.readouterr().err


def test_a_worktree_is_gone_after_an_error(repo: Path) -> None:
    places = []

    def fail_inside() -> None:
        with worktree(repo, "wrong") as tree:
            places.append(tree)
            assert (tree / "impl.py").read_text() == COMMITS["wrong"]
            raise RuntimeError("midway")

    with pytest.raises(RuntimeError, match="midway"):
        fail_inside()
    assert not places[0].parent.exists()
    assert untouched(repo)


def test_a_revision_that_cannot_be_checked_out_is_told(repo: Path) -> None:
    with pytest.raises(RevisionError, match="but should be whole"), worktree(repo, "0" * 40):
        pass
    assert untouched(repo)
