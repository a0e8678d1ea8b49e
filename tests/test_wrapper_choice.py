"""Which of a file's classes is judged where several would do, and what a wrapper may use of CUDA where there is none."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from own_imports import own_imports  # noqa: F401 - a fixture for all tests here

from minigpt_dist.verify.absent_cuda import MARKS, MOMENTS, QUIET, names_cuda, stand_in_for_cuda
from minigpt_dist.verify.loading import load_path
from minigpt_dist.verify.shapes import find_data_parallel, find_sharded_optimizer, required

WRAPPER = """
class {name}({base}):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)

    {finish}
"""
FINISH = "def finish_gradient_synchronization(self): pass"
TIMED = """
import torch.cuda.nvtx as nvtx

def timed(work):
    torch.cuda.set_device(0)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with nvtx.range("work"), torch.cuda.stream(torch.cuda.Stream()):
        first.record()
        work()
        last.record()
    torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
    torch.cuda.synchronize()
    return first.elapsed_time(last)
"""


def _module(tmp_path: Path, text: str) -> ModuleType:
    place = tmp_path / "pieces.py"
    place.write_text("import torch\nfrom torch import nn\nfrom torch.optim import Optimizer\n" + text)
    return load_path(place)[0]


@pytest.mark.parametrize(
    ("classes", "chosen"),
    [
        ((("BaseDDP", "nn.Module", ""), ("DDP", "BaseDDP", FINISH)), "DDP"),
        ((("BaseDDP", "nn.Module", FINISH), ("OverlapDDP", "BaseDDP", FINISH)), "OverlapDDP"),
        (
            (("NaiveDDP", "nn.Module", FINISH), ("FlatDDP", "nn.Module", FINISH), ("MyDDP", "nn.Module", FINISH)),
            "MyDDP",
        ),
        ((("DDP", "nn.Module", FINISH), ("OtherDDP", "nn.Module", FINISH)), "DDP"),
        ((("NaiveDDP", "nn.Module", ""),), "NaiveDDP"),
    ],
)
def test_the_complete_wrapper_that_none_is_built_on_is_judged(
    tmp_path: Path, classes: tuple[tuple[str, str, str], ...], chosen: str
) -> None:
    text = "".join(WRAPPER.format(name=name, base=base, finish=finish) for name, base, finish in classes)
    found = find_data_parallel(_module(tmp_path, text))
    assert getattr(found, "__name__", None) == chosen


def test_a_trainer_that_takes_an_optimizer_is_not_taken_for_one_where_there_is_one(tmp_path: Path) -> None:
    text = "class Trainer:\n    def __init__(self, model, optimizer): pass\n    def step(self): pass\n"
    own = "class Sharded(Optimizer):\n    def __init__(self, params, optimizer_cls, **kwargs): pass\n    def step(self): pass\n"
    assert getattr(find_sharded_optimizer(_module(tmp_path, text + own)), "__name__", None) == "Sharded"


def test_only_arguments_without_a_default_are_required() -> None:
    def build(module: object, bucket_bytes: int, *, overlap: bool = True) -> None: ...

    assert required(build) == ["bucket_bytes"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there, and nothing stands in for it")
def test_measuring_by_cuda_does_nothing_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (torch.cuda, torch.cuda.nvtx):
        for name in {*QUIET, *MARKS, *MOMENTS} & {*vars(module)}:
            monkeypatch.setattr(module, name, getattr(module, name))  # as it was, afterwards
    stand_in_for_cuda()
    done: list[int] = []
    assert _module(tmp_path, TIMED).timed(lambda: done.append(1)) == 0.0
    assert (done, torch.cuda.is_available(), names_cuda(TIMED.encode())) == ([1], False, True)


def test_a_module_of_its_own_package_that_was_not_handed_in_gets_a_stand_in(tmp_path: Path) -> None:
    (tmp_path / "course").mkdir()
    (tmp_path / "course" / "ddp.py").write_text("class DDP: pass\n")
    place = tmp_path / "adapters.py"
    place.write_text("from course.attention import Flash\nfrom course import models\nfrom course.ddp import DDP\n")
    module, stood_in = load_path(place)
    assert (module.DDP.__module__, stood_in) == ("course.ddp", ["course.attention", "course.models"])


def test_a_name_that_its_own_module_lacks_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "wrappers.py").write_text("class DDP: pass\n")
    (tmp_path / "adapters.py").write_text("from wrappers import Bucketed\n")
    with pytest.raises(ImportError, match="Bucketed"):
        load_path(tmp_path)


LATER = """
def get_ddp(module):
    from later_course.wrapper import DDP
    return DDP(module)
"""


def test_what_a_pieces_module_lacks_is_stood_in_for_though_it_is_imported_in_a_call(tmp_path: Path) -> None:
    (tmp_path / "later_course").mkdir()
    (tmp_path / "later_course" / "wrapper.py").write_text(
        "from absent_course.model import Linear\nDDP = [Linear].__contains__\n"
    )
    (tmp_path / "adapters.py").write_text(LATER)
    module, stood_in = load_path(tmp_path)
    assert (module.get_ddp(torch.nn.Linear), stood_in) == (True, ["absent_course", "absent_course.model"])


def test_the_stand_in_of_a_sum_over_named_axes_sums(tmp_path: Path) -> None:
    module = _module(
        tmp_path, "import einops\nsums = einops.einsum\nfrom absent_lesson import model\nkind = model.Linear\n"
    )
    x, w = torch.arange(12.0).view(2, 2, 3), torch.arange(15.0).view(5, 3)
    assert torch.equal(module.sums(x, w, "... d_in, d_out d_in -> ... d_out"), x @ w.T)
    assert module.kind is torch.nn.Linear


def test_a_module_that_an_installed_package_lacks_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "adapters.py").write_text("import torch.optim.nothing_of_this_name\n")
    with pytest.raises(ImportError):
        load_path(tmp_path)


def test_a_module_is_found_in_the_part_of_the_folder_that_its_author_put_on_the_path(tmp_path: Path) -> None:
    (tmp_path / "code_of_mine").mkdir()
    (tmp_path / "code_of_mine" / "averaging_of_mine.py").write_text("class DDP: pass\n")
    (tmp_path / "tests").mkdir()
    text = "import sys\nsys.path.insert(0, './elsewhere/code_of_mine')\nfrom averaging_of_mine import DDP\n"
    (tmp_path / "tests" / "adapters.py").write_text(text)
    module, stood_in = load_path(tmp_path)
    assert (module.DDP.__module__, stood_in) == ("averaging_of_mine", [])
