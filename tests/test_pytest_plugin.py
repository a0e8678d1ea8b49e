"""The plugin's rules: which long tests run, and when; and the suite over a submission, from the submission's own folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from minigpt_dist.pytest_on_request import asked_for


@pytest.mark.parametrize(
    "expression, runs",
    {
        "": False,
        "catalogue": False,
        "peers": True,
        "slow": True,
        "peers or slow": True,
        "slow and not checks": True,
    }.items(),
)
def test_a_long_test_runs_when_any_of_its_markers_is_named(expression: str, runs: bool) -> None:
    assert asked_for({"slow", "peers", "parametrize"}, expression) is runs


def test_a_test_without_such_a_marker_always_runs() -> None:
    assert asked_for({"parametrize"}, "")


LESSON = Path(__file__).parent / "submissions" / "bases" / "lesson.py"
HOSTILE = ("conftest.py", "sitecustomize.py", "json.py", "torch.py", "pytest.py", "xdist.py", "test_mine.py")


def self_check(folder: Path, impl: str, *words: str) -> subprocess.CompletedProcess[str]:
    """`pytest --impl` as a student calls it: the console script, in the submission's folder."""
    script = folder.parent / "console.py"
    script.write_text("import sys, pytest\nsys.exit(pytest.console_main())\n")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    command = [sys.executable, str(script), "-n", "2", "--impl", impl, "--world-sizes", "1,2", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A submission's folder with everything in it that pytest, Python or xdist would import by itself."""
    folder = tmp_path / "mine"
    folder.mkdir()
    shutil.copy(LESSON, folder / "lesson.py")
    for name in HOSTILE:
        (folder / name).write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write({name!r})\nraise SystemExit(9)\n")
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\npython_files = nothing\n")
    return folder


@pytest.mark.slow
def test_a_submission_is_judged_in_its_own_folder_and_nothing_beside_it_is_imported(hostile: Path) -> None:
    done = self_check(hostile, "./lesson.py", "-k", "corpus")
    assert (done.returncode, " passed" in done.stdout) == (0, True), done.stdout[-3000:] + done.stderr[-3000:]
    assert not (hostile.parent / "imported").exists()


@pytest.mark.slow
@pytest.mark.parametrize("verbosity", ["-q", "-v"])
def test_a_submission_that_cannot_be_imported_is_one_line_and_no_test_runs(verbosity: str, hostile: Path) -> None:
    (hostile / "lesson.py").write_text("import torch\nraise KeyError('mine')\n")
    done = self_check(hostile, "./lesson.py", verbosity)
    assert (done.returncode, "./lesson.py cannot be loaded: " in done.stdout) == (4, True)
    assert "failed" not in done.stdout
