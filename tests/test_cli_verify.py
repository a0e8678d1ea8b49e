"""`minigpt-dist verify`: a table of verdicts, the violations in full, and an exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from minigpt_dist.__main__ import main
from minigpt_dist.verify.checks import CHECKS

SUMMED = """
from minigpt_dist import *
from minigpt_dist import ZeroOptimizer as Right

class ZeroOptimizer(Right):
    def step(self, closure=None):
        for p in (p for g in self.param_groups for p in g["params"] if p.grad is not None):
            p.grad.mul_(self.world_size)
        return super().step(closure)
"""


def test_right_code_passes_and_exits_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--world-sizes", "1,2", "--only", "optimizer.large_eps,optimizer.tiny"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "  ZeroOptimizer" in "\n".join(line[:15] for line in out)
    assert [line.split() for line in out if line.startswith("optimizer.")] == [
        ["optimizer.large_eps", "pass", "pass"],
        ["optimizer.tiny", "pass", "pass"],
    ]
    assert out[-1] == "minigpt_dist: 4 passed, 0 failed, 0 not judged"


def test_wrong_code_fails_with_the_place_and_a_line_that_replays_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "summed.py").write_text(SUMMED)
    impl = str(tmp_path / "summed.py")
    assert main(["verify", "--impl", impl, "--world-sizes", "2", "--only", "optimizer.large_eps"]) == 1
    out = capsys.readouterr().out
    assert f"\noptimizer.large_eps [{impl}, dp=2, world size 2] step 1 rank 0: parameter " in out
    assert "\nhint: gradients are summed over ranks but not divided by N\n" in out
    assert f"\nreplay: minigpt-dist verify --impl {impl} --world-sizes 2 --only optimizer.large_eps\n" in out


def test_code_that_cannot_be_imported_is_one_violation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.py").write_text("import json.no_such_part\n")
    assert main(["verify", "--impl", str(tmp_path / "broken.py")]) == 1
    out = capsys.readouterr().out
    assert out.count("but should be") == 1
    assert "the import is ModuleNotFoundError: No module named 'json.no_such_part'" in out


def test_code_that_is_not_there_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--impl", "no_such_module_of_mine"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_what_cannot_be_asked_is_not_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lacking = "from minigpt_dist import *\n\ndef ZeroOptimizer(module, world_size, rank, lr): ...\n"
    (tmp_path / "lacking.py").write_text(lacking)
    assert (
        main(["verify", "--impl", str(tmp_path / "lacking.py"), "--world-sizes", "1", "--only", "optimizer.betas"]) == 0
    )
    out = capsys.readouterr().out
    assert "not judged: optimizer.betas: " in out
    assert out.endswith("0 passed, 0 failed, 1 not judged\n")


def test_the_list_shows_every_check_with_its_claim(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == list(CHECKS)
