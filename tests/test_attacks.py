"""Submissions that try to be graded for work they did not do: each fails what it attacks, and leaves nothing behind.

Each file of `attacks/` names the check it attacks; "needs: walls" marks what only namespaces of its own can hold off. Mode none is for
trusted code, and is not attacked.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox_modes import working

from minigpt_dist.grading.answers import Unit, ask
from minigpt_dist.launch.sandbox import Isolation
from minigpt_dist.verify.checks import CHECKS, put
from minigpt_dist.verify.subject import Subject

ATTACKS = {
    path.stem: path
    for path in sorted(Path(__file__).with_name("attacks").glob("*.py"))
    if path.stem not in ("wrong", "honest", "unsharded")
}
SHORT = ("exits_in_step", "searches_the_disk", "leaves_a_daemon", "simulates_the_others")
WALLED = ("namespaces", "bwrap")
DEADLINE_S = 8.0
MARKS = ("attack-left-behind",)
OPEN_TO_ALL = ("/tmp", "/var/tmp", "/dev/shm", "/run/lock")


def said(path: Path, what: str) -> str:
    found = re.search(rf"^# {what}: (.+)$", path.read_text(), re.MULTILINE)
    return found[1] if found else ""


def modes_for(path: Path) -> tuple[str, ...]:
    return WALLED if said(path, "needs") == "walls" else (*WALLED, "uid")


@pytest.fixture(autouse=True, scope="module")
def own_tmp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Whatever a sandbox has on this machine lies here, where another user can pass, unlike below pytest's own folder."""
    tmp_path_factory.getbasetemp()  # made when first asked for: not in here, which goes away
    temporary = tempfile.TemporaryDirectory(prefix="minigpt-dist-", ignore_cleanup_errors=True)
    with temporary as folder, pytest.MonkeyPatch.context() as patch:
        os.chmod(folder, 0o711)
        patch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def left_behind() -> list[str]:
    """Command lines of processes that an attack started."""
    lines = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            lines.append(Path("/proc", pid, "cmdline").read_bytes().decode(errors="replace"))
        except OSError:
            continue  # it has ended
    return [line for line in lines if any(mark in line for mark in MARKS)]


def litter() -> list[str]:
    """Files and System V objects that an attack made, where all may make them."""
    kept = [line for kind in ("shm", "msg", "sem") for line in Path("/proc/sysvipc", kind).read_text().split("\n")]
    ipc = [line for line in kept if line.strip().startswith(str(0x61747400)[:8])]
    return ipc + [str(path) for place in OPEN_TO_ALL for path in Path(place).glob("attack-file*")]


def verdict_on(path: Path, mode: str, seed: int = 20_260_801) -> str:
    """What a grade is made of: a check that trips over what ranks forged has not passed either."""
    unit = Unit(said(path, "attacks"), 2)
    with Subject(str(path), deadline_s=DEADLINE_S, isolation=Isolation(mode), seed=seed, budget_s=60.0) as subject:
        outcome = ask(subject, unit).outcome
    return outcome if outcome in ("passed", "not_judged") else "failed"


def attack(name: str, mode: str, tmp: Path) -> None:
    working(mode)
    assert verdict_on(ATTACKS[name], mode) == "failed"
    assert left_behind() == []
    assert list(tmp.glob("minigpt-dist-jail-*")) == []
    assert litter() == []
    assert not Path("/tmp/attack-payload-ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_attack_fails_what_it_attacks_and_leaves_nothing(name: str, own_tmp: Path) -> None:
    attack(name, "namespaces", own_tmp)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["namespaces", "bwrap", "uid"])
def test_honest_work_passes_what_the_attacks_fail(mode: str) -> None:
    working(mode)
    honest, asked = Path(__file__).parent / "attacks" / "honest.py", ["optimizer.plain", "optimizer.sharded"]
    with Subject(str(honest), isolation=Isolation(mode), seed=20_260_801) as subject:
        walled = ["optimizer.traffic", "optimizer.resident"] if mode in WALLED else []
        verdicts = [put(CHECKS[name], subject, 2) for name in (*asked, *walled)]
    assert [v.check for v in verdicts if not v.passed] == []


@pytest.mark.corpus
@pytest.mark.parametrize("name, mode", [(name, mode) for name, path in ATTACKS.items() for mode in modes_for(path)])
def test_attack_fails_under_every_mode(name: str, mode: str, own_tmp: Path) -> None:
    attack(name, mode, own_tmp)


def test_every_attack_names_a_check() -> None:
    assert {said(path, "attacks") for path in ATTACKS.values()} <= set(CHECKS)
