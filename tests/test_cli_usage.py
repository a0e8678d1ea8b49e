"""Wrong command lines: one line that says what is, and what should be; exit 2; nothing started, nothing written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from minigpt_dist.__main__ import main
from minigpt_dist.cli import train, verify
from minigpt_dist.cli.commands import MODULES, load

UNKNOWN = "but should be one of the options that `minigpt-dist train --help` lists"
NO_RUN = "but should be the folder of a run with a good checkpoint"
WRONG = {
    "--world-size 0": "world_size is 0, but should be a whole number of at least 1",
    "--world-size -4": "world_size is -4, but should be a whole number of at least 1",
    "--world-size four": "world_size is 'four', but should be a whole number",
    "--steps 0": "steps is 0, but should be a whole number of at least 1",
    "--steps 2.5": "steps is '2.5', but should be a whole number",
    "--seed -1": "seed is -1, but should be a whole number of at least 0",
    "--batch 0": "batch is 0, but should be a whole number of at least 1",
    "--micro-batches 0": "micro_batches is 0, but should be a whole number of at least 1",
    "--vocab 0": "vocab is 0, but should be a whole number of at least 1",
    "--num-layers 0": "num_layers is 0, but should be a whole number of at least 1",
    "--seq-len 0": "seq_len is 0, but should be a whole number of at least 1",
    "--embed-dim 30": "embed_dim is 30, but should be a multiple of num_heads (4)",
    "--num-heads 5": "embed_dim is 32, but should be a multiple of num_heads (5)",
    "--dropout 1": "dropout is 1.0, but should be in [0, 1)",
    "--dropout nan": "dropout is nan, but should be in [0, 1)",
    "--lr nan": "lr is nan, but should be a finite number >= 0",
    "--lr inf": "lr is inf, but should be a finite number >= 0",
    "--lr -1": "lr is -1.0, but should be a finite number >= 0",
    "--lr fast": "lr is 'fast', but should be a number",
    "--eps -1": "eps is -1.0, but should be a finite number >= 0",
    "--weight-decay -1": "weight_decay is -1.0, but should be a finite number >= 0",
    "--betas 0.9,1": "betas is (0.9, 1.0), but should be two numbers in [0, 1)",
    "--betas 0.9": "betas is '0.9', but should be two numbers with a comma between them",
    "--dtype float8": "dtype is 'float8', but should be one of float32, float64, bfloat16, float16",
    "--loss-scale 0.5": "loss_scale is 0.5, but should be a finite number of at least 1",
    "--loss-scale inf": "loss_scale is inf, but should be a finite number >= 0",
    "--tp 0": "tp is 0, but should be a whole number of at least 1",
    "--tp 3": "world_size is 4, but should be a multiple of tp (3)",
    "--tp 8 --dp 1": "num_heads is 4, but should be a multiple of tp (8)",
    "--dp 0": "dp is 0, but should be a whole number of at least 1",
    "--dp 2 --tp 2 --world-size 6": "world_size is 6, but should be 4, dp * tp * pp",
    "--tp 2 --sequence-parallel --seq-len 15": "seq_len is 15, but should be a multiple of tp (2), where the sequence is cut",
    "--reduction max": "reduction is 'max', but should be one of sum, exact",
    "--device tpu": "device is 'tpu', but should be one of auto, cpu, cuda",
    "--backend mpi": "backend is 'mpi', but should be one of gloo, nccl",
    "--deadline 0": "deadline is 0.0, but should be a positive, finite number of seconds",
    "--deadline nan": "deadline is nan, but should be a positive, finite number of seconds",
    "--checkpoint-step 21": "checkpoint_step is 21, but should be a step in 1..20, or 0 for no checkpoint",
    "--checkpoint-step -1": "checkpoint_step is -1, but should be a whole number of at least 0",
    "--text absent.txt": "text is 'absent.txt' (No such file or directory), but should be a readable file",
    "--text folder": "text is 'folder' (Is a directory), but should be a readable file",
    "--text short.txt": "text is 5 bytes long, but should be at least 5200, all that the run reads",
    "--text short.txt --vocab 64": "vocab is 64, but should be at least 256, as the tokens of a text are its bytes",
    "--out folder": "out is 'folder', which holds 'file', but should be a new or empty folder",
    "--out short.txt": "out is 'short.txt' (Not a directory), but should be a new or empty folder",
    "--resume absent": f"resume is 'absent', {NO_RUN}: absent: expected a folder of checkpoints, or one checkpoint, ",
    "--resume folder": f"resume is 'folder', {NO_RUN}: folder: expected a file latest or manifest.json, found ['file']",
    "--no-such-option": f"argument is '--no-such-option', {UNKNOWN}",
    "train extra": f"argument is 'extra', {UNKNOWN}",
    "--steps": "argument --steps: expected one argument (`minigpt-dist train --help` lists the options)",
    "tarin": "command is 'tarin', but should be one of ",
    "verify --world-sizes 2,0": "world_sizes is '2,0', but should be whole numbers from 1, separated by commas",
    "verify --only no_such": "check is 'no_such', but should be one of ",
    "verify --slots brakes": "slot is 'brakes', but should be one of ",
    "verify --impl ./absent.py": "impl is './absent.py', but should be the path of a file or folder that is there",
    "verify --deadline -1": "deadline is -1.0, but should be a positive, finite number of seconds",
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own working folder with a short text and a folder that is in use."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("kept")
    (tmp_path / "short.txt").write_text("short")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_command_line_is_told_in_one_line(
    line: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in (train, verify):
        monkeypatch.setattr(
            command, "prepare", lambda: None if line.startswith("verify") else pytest.fail("ranks started")
        )
    before = sorted(place.rglob("*"))
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"minigpt-dist: {WRONG[line]}")
    assert sorted(place.rglob("*")) == before


def test_a_folder_that_cannot_be_made_is_told_in_one_line(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", "short.txt/run"]) == 2
    assert capsys.readouterr().err.startswith("minigpt-dist: out is 'short.txt/run' (Not a directory), but should be")


def test_a_device_that_is_not_there_is_told_before_ranks_start(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cuda", "--world-size", "4096", "--out", "run"]) == 2
    assert "needs CUDA device 4095" in capsys.readouterr().err
    assert not (place / "run").exists()


def test_under_a_launcher_the_world_size_is_the_launchers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    assert main(["--world-size", "3"]) == 2
    assert "world_size is 3, but should be 2, the ranks that the launcher started" in capsys.readouterr().err


def test_help_and_wrong_options_do_not_wait_for_torch() -> None:
    program = (
        "import sys; from minigpt_dist.__main__ import main; "
        "codes = [main(['--help']), main(['--version']), main(['--steps', 'x'])]; print(codes, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[0, 0, 2] False"
    assert "verify" in done.stdout


@pytest.mark.parametrize("command", ["train", "verify"])
def test_every_command_lists_its_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert "--world-size" in capsys.readouterr().out


@pytest.mark.parametrize("name", MODULES)
def test_every_command_is_found_by_its_own_name(name: str) -> None:
    command = load(name)
    assert (command.NAME, bool(command.HELP), callable(command.run)) == (name, True, True)
