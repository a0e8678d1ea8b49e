"""Sandboxes: what is in them, what cannot leave them, and that nothing of them stays."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox_modes import working

from minigpt_dist.launch import RankDied
from minigpt_dist.launch.removal import remove_tree
from minigpt_dist.launch.sandbox import MODES, Contents, Isolation, IsolationError, Jail, choose, isolation
from minigpt_dist.launch.sandbox.contents import copy_submission
from minigpt_dist.launch.sandbox.kits import copy_kit, launch_kit
from minigpt_dist.launch.sandbox.leftovers import owned_folder, sweep
from minigpt_dist.verify.checks import CHECKS, put
from minigpt_dist.verify.contract import origins_body
from minigpt_dist.verify.kit import BODIES, beside, kit
from minigpt_dist.verify.subject import Subject

SUBMISSION = Path(__file__).parent / "attacks" / "wrong.py"
WORKING = [pytest.param(mode, marks=pytest.mark.slow) for mode in MODES if mode != "none"]


@pytest.fixture(autouse=True, scope="module")
def own_tmp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Whatever a sandbox has on this machine lies here, where another user can pass, unlike below pytest's own folder."""
    tmp_path_factory.getbasetemp()  # made when first asked for: not in here, which goes away
    temporary = tempfile.TemporaryDirectory(prefix="minigpt-dist-", ignore_cleanup_errors=True)
    with temporary as folder, pytest.MonkeyPatch.context() as patch:
        os.chmod(folder, 0o711)
        patch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def jails(tmp: Path) -> list[str]:
    return [path.name for path in tmp.glob("minigpt-dist-jail-*")]


@pytest.mark.parametrize("mode", WORKING)
def test_ranks_of_a_sandbox_answer_and_nothing_of_it_stays(mode: str, own_tmp: Path) -> None:
    with Subject(str(SUBMISSION), isolation=working(mode)) as subject:
        assert "ZeroOptimizer" in subject.ask(origins_body, 2)[1]
        assert jails(own_tmp) != []
    assert jails(own_tmp) == []


@pytest.mark.parametrize("mode", WORKING)
def test_a_rank_that_dies_in_a_sandbox_is_named(mode: str) -> None:
    dies = SUBMISSION.with_name("exits_at_import.py")
    with Subject(str(dies), isolation=working(mode)) as subject, pytest.raises(RankDied):
        subject.ask(origins_body, 2)


@pytest.mark.slow
def test_traffic_is_counted_from_outside() -> None:
    with Subject(str(SUBMISSION), isolation=working("namespaces"), seed=3) as subject:
        assert not put(CHECKS["optimizer.traffic"], subject, 2).passed
        assert (subject.traffic(2) or 0) > 0


@pytest.mark.slow
def test_a_fresh_sandbox_has_nothing_of_the_one_before() -> None:
    with Subject("fault:none", isolation=working("namespaces"), seed=3) as subject:
        assert put(CHECKS["resume_bytes"], subject, 2).passed


@pytest.mark.slow
def test_kit_holds_every_body_and_none_of_the_reference(own_tmp: Path) -> None:
    copy_kit(kit(), own_tmp)
    modules = ", ".join([*launch_kit(), *(f"minigpt_dist.{name}" for name in BODIES)])
    code = f"import sys; sys.path.insert(0, {str(own_tmp)!r}); import {modules}"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=own_tmp)
    assert done.returncode == 0, done.stderr
    forbidden = (
        "zero.py",
        "model.py",
        "corpus.py",
        "data_parallel.py",
        "*oracle*.py",
        "checks",
        "faults",
        "checkpoint",
        "suite",
    )
    assert [name for name in forbidden if list((own_tmp / "minigpt_dist").rglob(name))] == []


@pytest.mark.parametrize("slot", ["model", "corpus", "optimizer", "checkpoint"])
def test_what_stands_beside_a_piece_is_not_that_piece(slot: str) -> None:
    home = {"model": "model", "corpus": "corpus", "optimizer": "parallel.zero", "checkpoint": "checkpoint"}[slot]
    assert f"minigpt_dist.{home}" not in beside((slot,))
    assert len(beside((slot,))) > 2


@pytest.mark.slow
@pytest.mark.parametrize("slot", ["model", "corpus", "broadcast", "optimizer", "checkpoint", "ddp"])
def test_what_stands_beside_a_piece_is_whole(slot: str, own_tmp: Path) -> None:
    copy_kit((*kit(), *beside((slot,))), own_tmp / slot)
    code = f"import sys; sys.path.insert(0, {str(own_tmp / slot)!r}); import {', '.join(beside((slot,)))}"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=own_tmp)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("base, check", [("wrapper", "monotone_loss"), ("torch_shape", "resume_bytes")])
def test_one_piece_is_judged_in_a_sandbox_with_ours_beside_it(base: str, check: str) -> None:
    piece = Path(__file__).parent / "submissions" / "bases" / f"{base}.py"
    with Subject(str(piece), isolation=working("namespaces"), seed=3) as subject:
        assert put(CHECKS[check], subject, 2).passed


def test_submission_is_copied_with_what_it_imports_and_nothing_else(own_tmp: Path) -> None:
    copied = copy_submission(SUBMISSION.with_name("exits_in_step.py"), own_tmp / "copy")
    assert sorted(path.name for path in copied.parent.iterdir()) == ["exits_in_step.py", "wrong.py"]


def test_links_of_a_submission_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "solution.py").touch()
    (tmp_path / "given" / "secret").symlink_to("/etc/passwd")
    copied = copy_submission(tmp_path / "given", tmp_path / "copy")
    assert [path.name for path in copied.iterdir()] == ["solution.py"]


def test_submission_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "large.py").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(ValueError, match="more than"):
        copy_submission(tmp_path / "large.py", tmp_path / "copy")


def test_a_sandbox_that_cannot_be_made_leaves_nothing(own_tmp: Path) -> None:
    with pytest.raises(ValueError, match="not there"):
        Jail(Isolation("bwrap"), Contents(kit(), own_tmp / "absent.py"))
    assert jails(own_tmp) == []


@pytest.mark.slow
def test_folders_without_end_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "top").mkdir()
    monkeypatch.chdir(tmp_path / "top")
    for _ in range(1100):  # beyond Python's limit of recursion
        os.mkdir("d", 0o700)
        os.chdir("d")
    os.symlink(tmp_path, "back")
    os.chmod(".", 0)
    os.chdir(tmp_path)
    remove_tree(tmp_path / "top")
    assert list(tmp_path.iterdir()) == []


def test_users_of_two_sandboxes_differ() -> None:
    first, second = Jail(Isolation("bwrap"), Contents(kit())), Jail(Isolation("bwrap"), Contents(kit()))
    users = first.user, second.user
    first.close()
    second.close()
    assert users[0] != users[1] or os.geteuid() != 0


def test_weaker_isolation_than_required_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "_failure", lambda name: None if name == "none" else "no such thing")
    assert choose("auto").name == "none"
    assert any("no such thing" in note for note in choose("bwrap").notes)
    for mode in ("auto", "bwrap"):
        with pytest.raises(IsolationError, match="required"):
            choose(mode, require=True)


def test_unknown_isolation_is_refused() -> None:
    with pytest.raises(ValueError, match="should be one of"):
        choose("prison")


def test_budget_of_a_subject_ends_its_runs() -> None:
    with Subject(str(SUBMISSION), budget_s=0.0) as subject:
        verdict = put(CHECKS["corpus"], subject, 1)
    assert "took its 0 s" in verdict.violations[0].observed


def test_a_seed_changes_what_is_asked_and_none_does_not() -> None:
    def draws(seed: int | None) -> list[int]:
        return [Subject(seed=seed).draw(what) for what in ("a", "b")]

    assert draws(None) == [0, 0]
    assert draws(5) == draws(5) != draws(6)


HOLDER = """
import sys
from minigpt_dist.launch.sandbox import Isolation, nursery
from minigpt_dist.verify.contract import origins_body
from minigpt_dist.verify.subject import Subject

if __name__ == "__main__":
    subject = Subject(sys.argv[1], isolation=Isolation("namespaces"))
    subject.ask(origins_body, 2)
    print(*(stem.pid for stem in nursery._stems.values()), flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_sandboxes_of_a_killed_parent_end_and_leave_no_folder(own_tmp: Path) -> None:
    working("namespaces")
    command = [sys.executable, "-c", HOLDER, str(SUBMISSION)]
    environment = {**os.environ, "TMPDIR": str(own_tmp)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        stem = os.pidfd_open(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
    assert select.select([stem], [], [], 60.0)[0] == [stem]
    os.close(stem)
    assert jails(own_tmp) == []


def test_the_next_start_removes_the_folder_of_a_killed_parent_and_no_other(own_tmp: Path) -> None:
    pid = os.fork()
    if pid == 0:
        owned_folder()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    mine, owner = owned_folder()
    assert len(jails(own_tmp)) == 2
    sweep.__wrapped__()
    assert jails(own_tmp) == [mine.name]
    mine.joinpath("owner").unlink()
    mine.rmdir()
    os.close(owner)
