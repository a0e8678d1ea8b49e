"""The autograder's archive depends on nothing but the package and its options, and grades in Gradescope's layout."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from submission_corpus import HERE, rubric_at_one_size

from minigpt_dist.__main__ import main
from minigpt_dist.grading.gradescope_zip import autograder, build_wheel

ROOT = Path(__file__).parents[1]
ACTION = ROOT / ".github" / "actions" / "grade"


def names(archive: bytes) -> dict[str, int]:
    """Permissions by file name."""
    return {i.filename: i.external_attr >> 16 for i in zipfile.ZipFile(io.BytesIO(archive)).infolist()}


def test_the_archive_is_the_same_each_time_and_has_its_scripts_at_the_root() -> None:
    archive = autograder()
    assert archive == autograder()
    assert {name: mode for name, mode in names(archive).items() if "/" not in name and "." not in name[-4:]} == {
        "run_autograder": 0o755
    }
    assert names(archive)["setup.sh"] == 0o755


def test_a_rubric_of_ones_own_goes_into_the_archive_and_is_read_first(tmp_path: Path) -> None:
    assert main(["gradescope", str(tmp_path), "--rubric", str(rubric_at_one_size(tmp_path / "mine.toml"))]) == 0
    assert "rubric.toml" in names((tmp_path / "autograder.zip").read_bytes())
    (tmp_path / "bad.toml").write_text("total = 3")
    assert main(["gradescope", str(tmp_path / "no"), "--rubric", str(tmp_path / "bad.toml")]) == 2
    assert not (tmp_path / "no").exists()


def test_the_wheel_holds_the_whole_package_with_what_it_reads_at_run_time() -> None:
    name, wheel = build_wheel()
    inside = set(names(wheel))
    assert name.endswith("-py3-none-any.whl")
    about = zipfile.ZipFile(io.BytesIO(wheel)).read(f"{name.removesuffix('-py3-none-any.whl')}.dist-info/METADATA")
    assert b"Provides-Extra: grading\n" in about
    for path in ("grading/rubric.toml", "grading/page/templates/style.css", "grading/starter/solution.py", "worker.py"):
        assert f"minigpt_dist/{path}" in inside
    assert not [path for path in inside if "__pycache__" in path or path.startswith("/") or ".." in path]


def test_an_index_for_torch_is_quoted_in_the_script() -> None:
    archive = zipfile.ZipFile(io.BytesIO(autograder(torch_index="https://x.invalid/; rm -rf /")))
    assert "--index-url 'https://x.invalid/; rm -rf /'\n" in archive.read("setup.sh").decode()


@pytest.mark.skipif(
    shutil.which("bash") is None, reason="bash, which Gradescope runs the scripts with, is not on this machine"
)
@pytest.mark.parametrize("script", ["setup.sh", "run_autograder", "grade.sh"])
def test_scripts_are_bash_that_can_be_read(script: str) -> None:
    text = (
        (ACTION / script).read_bytes()
        if script == "grade.sh"
        else zipfile.ZipFile(io.BytesIO(autograder())).read(script)
    )
    subprocess.run(["bash", "-n"], input=text, check=True, timeout=30)


def installed(folder: Path, archive: bytes) -> Path:
    """Gradescope's layout below `folder`, as after setup.sh; the interpreter is this one, with the archive's wheel before all else."""
    for name in ("source", "submission", "results", "venv/bin"):
        (folder / name).mkdir(parents=True)
    zipfile.ZipFile(io.BytesIO(archive)).extractall(folder / "source")
    (wheel,) = (folder / "source").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    python = folder / "venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}/site" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return folder


def run_autograder(folder: Path) -> dict[str, object]:
    """What the script leaves in results.json."""
    environment = {**os.environ, "AUTOGRADER_ROOT": str(folder)}
    command = ["bash", str(folder / "source" / "run_autograder")]
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=600, capture_output=True)
    found: dict[str, object] = json.loads((folder / "results" / "results.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_run_autograder_leaves_gradescopes_result(tmp_path: Path) -> None:
    rubric = rubric_at_one_size(tmp_path / "rubric.toml").read_bytes()
    root = installed(tmp_path / "autograder", autograder(rubric, isolation="none"))
    shutil.copy(HERE / "bases" / "wrapper.py", root / "submission")
    (root / "submission" / "conftest.py").write_text("raise SystemExit")
    result = run_autograder(root)
    assert (result["score"], result["extra_data"]) == (100.0, {"schema": "minigpt-dist-grade/1", "verdict": "pass"})


@pytest.mark.slow
def test_a_grader_that_breaks_leaves_a_result_that_says_so(tmp_path: Path) -> None:
    root = installed(tmp_path / "autograder", autograder(isolation="none"))
    (root / "venv" / "bin" / "python").write_text("#!/bin/sh\nexit 3\n")
    result = run_autograder(root)
    assert (result["score"], "grader itself failed (code 3)" in str(result["output"])) == (0, True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_action_hands_classroom_its_result_and_the_summary_its_markdown(tmp_path: Path) -> None:
    shutil.copy(HERE / "bases" / "wrapper.py", tmp_path / "wrapper.py")
    rubric_at_one_size(tmp_path / "rubric.toml")
    output, summary = tmp_path / "output", tmp_path / "summary"
    given = {"SUBMISSION": "wrapper.py", "RUBRIC": "rubric.toml", "ISOLATION": "none", "SUITE_PYTHON": sys.executable}
    github = {"GITHUB_OUTPUT": str(output), "GITHUB_STEP_SUMMARY": str(summary), "RUNNER_TEMP": str(tmp_path)}
    path = {"PYTHONPATH": str(ROOT)}
    subprocess.run(
        ["bash", str(ACTION / "grade.sh")],
        cwd=tmp_path,
        env={**os.environ, **path, **given, **github},
        check=True,
        timeout=600,
    )
    name, _, encoded = output.read_text().partition("=")
    assert (name, json.loads(base64.b64decode(encoded))["status"]) == ("result", "pass")
    assert "wrapper" in summary.read_text(encoding="utf-8")
