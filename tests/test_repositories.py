"""A repository is graded as a whole: glue in its tests folder, or none; stubs; packages that are not here; calls before a step."""

from __future__ import annotations

from pathlib import Path

import pytest
from submission_corpus import HERE

from minigpt_dist.grading.cohort import entrants
from minigpt_dist.launch import run_world
from minigpt_dist.verify.entries import entry_of, piece_files

TORCH_SHAPE = (HERE / "bases" / "torch_shape.py").read_text(encoding="utf-8")
OPTIMIZER, WRAPPER = TORCH_SHAPE.split("class DDP(nn.Module)")
IMPORTS = "import torch\nimport torch.distributed as dist\nfrom torch import nn\n\n\n"
GLUE = """
from mine.attention import backward
from mine.wrapper import DDP


def get_ddp_bucketed(module, bucket_size_mb):
    \"\"\"To be written.\"\"\"
    raise NotImplementedError


def ddp_bucketed_on_after_backward(model, optimizer):
    raise NotImplementedError


def get_ddp_individual_parameters(module):
    return DDP(module)


def ddp_individual_parameters_on_after_backward(model, optimizer):
    model.finish_gradient_synchronization()


def get_sharded_optimizer(params, optimizer_cls, **kwargs):
    raise NotImplementedError
"""
KERNEL = """
from importlib.metadata import version

import triton
import triton.language as tl

__version__ = version("mine-of-a-course")


@triton.jit
def kernel(x, n: tl.constexpr | None):
    tl.store(x, n)


def backward(x):
    return x
"""


def repository(folder: Path) -> Path:
    """Pieces in a package, and glue over one of them in tests/adapters.py, beside what nobody filled in."""
    texts = {
        "mine/sharded.py": OPTIMIZER,
        "mine/wrapper.py": f"{IMPORTS}class DDP(nn.Module){WRAPPER}",
        "mine/attention.py": KERNEL,
        "mine/bench_ddp.py": "class BenchDDP:\n    def __init__(self, module):\n        pass\n",
        "tests/adapters.py": GLUE,
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def found(folder: str) -> dict[str, object]:
    """On a rank: the pieces by name, and the calls around a step of the wrapper."""
    from minigpt_dist.verify.contract import resolve

    impl = resolve(folder)
    names = {name: getattr(call, "__name__", "") for name, call in impl.names.items() if folder in impl.origins[name]}
    calls = {key: getattr(impl.extras[key], "__name__", None) for key in ("start", "finish")}
    return {**names, **calls, "stood_in": impl.extras["stood_in"]}


def test_a_repository_is_one_submission_whose_glue_is_its_entry(tmp_path: Path) -> None:
    folder = repository(tmp_path / "repository")
    assert [e.path for e in entrants([str(folder)], tmp_path)] == [str(folder)]
    assert entry_of(folder) == folder / "tests" / "adapters.py"
    assert [f.name for f in piece_files(folder)] == ["sharded.py", "wrapper.py", "bench_ddp.py"]


def test_pieces_come_from_glue_that_is_written_and_from_files_where_it_is_not(tmp_path: Path) -> None:
    seen = run_world(found, 1, str(repository(tmp_path / "repository")))[0]
    assert seen == {
        "ZeroOptimizer": "ShardedOptimizer",
        "DistributedDataParallel": "get_ddp_individual_parameters",
        "start": None,
        "finish": "ddp_individual_parameters_on_after_backward",
        "stood_in": ["triton", "triton.language", "mine-of-a-course"],
    }


def test_a_package_without_glue_offers_what_its_files_define(tmp_path: Path) -> None:
    seen = run_world(found, 1, str(repository(tmp_path / "repository") / "mine"))[0]
    assert (seen["ZeroOptimizer"], seen["DistributedDataParallel"]) == ("ShardedOptimizer", "DDP")


def test_a_folder_without_an_entry_or_a_piece_is_refused(tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("x = 1\n", encoding="utf-8")
    with pytest.raises(ValueError, match="files that define a sharded optimizer or a wrapper"):
        entry_of(tmp_path)


@pytest.mark.slow
def test_torch_compiles_at_import_beside_a_stand_in_for_triton(tmp_path: Path) -> None:
    folder = repository(tmp_path / "repository")
    file = folder / "mine" / "attention.py"
    file.write_text(
        KERNEL.replace("import triton\n", "import torch\nimport triton\n").replace(
            "def backward", "@torch.compile\ndef backward"
        )
    )
    assert run_world(found, 1, str(folder))[0]["ZeroOptimizer"] == "ShardedOptimizer"
