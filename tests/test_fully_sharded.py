"""Fully sharded wrappers: found by their shape, read by whatever gives whole parameters, measured by what they gather."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from own_imports import own_imports  # noqa: F401 - a fixture for all tests here
from submission_corpus import HERE
from torch import Tensor, nn

from minigpt_dist.grading.rubric import load
from minigpt_dist.launch import run_world
from minigpt_dist.verify.checks import judge
from minigpt_dist.verify.contract import resolve
from minigpt_dist.verify.in_flight import InFlight
from minigpt_dist.verify.loading import load_path
from minigpt_dist.verify.shapes import find_data_parallel, find_fully_sharded
from minigpt_dist.verify.sharded_oracle import share_of
from minigpt_dist.verify.sharded_scenario import DEEP, Decoder
from minigpt_dist.verify.subject import Subject
from minigpt_dist.verify.whole_parameters import NotReadableError, Reader

BASES = HERE / "bases"
FOUND = {
    "fsdp_rows": "FSDP",
    "fsdp_flat": "FullyShardedDataParallel",
    "fsdp_function": "get_fsdp",
    "fully_shard": "fully_shard",
}
WRAPPER = "class {name}({base}):\n    def __init__(self, module):\n        pass\n    def forward(self, x):\n        return x\n"


def written(text: str) -> ModuleType:
    module = ModuleType("written")
    exec("from torch import nn\n" + text, module.__dict__)
    return module


@pytest.mark.parametrize("base", FOUND)
def test_a_fully_sharded_wrapper_is_found_by_its_shape(base: str) -> None:
    found = resolve(str(BASES / f"{base}.py"))
    assert (found.shape, found.slots) == ("torch", ("fsdp",))
    assert found.origins["FullyShardedDataParallel"].endswith(f":{FOUND[base]}")


@pytest.mark.parametrize("name", ["FSDP", "MyFullyShardedDataParallel", "ZeRO3Model", "Fsdp_Wrapper"])
def test_many_names_say_that_parameters_are_cut(name: str) -> None:
    module = written(WRAPPER.format(name=name, base="nn.Module"))
    assert find_fully_sharded(module) is getattr(module, name)
    assert find_data_parallel(module) is None


@pytest.mark.parametrize("name", ["DDP", "ShardedDDP", "Block"])
def test_other_wrappers_are_none(name: str) -> None:
    assert find_fully_sharded(written(WRAPPER.format(name=name, base="nn.Module"))) is None


def test_an_adapter_that_nobody_wrote_is_no_offer(tmp_path: Path) -> None:
    place = tmp_path / "adapters.py"
    place.write_text('def get_fsdp(module, compute_dtype=None):\n    """To do."""\n    raise NotImplementedError\n')
    assert find_fully_sharded(load_path(place)[0]) is None


def test_a_package_that_a_function_imports_later_has_torchs_layers(tmp_path: Path) -> None:
    place = tmp_path / "mine.py"
    place.write_text(
        "def kinds():\n    from course_of_nobody.model import Embedding, Linear\n    return Linear, Embedding\n"
    )
    module, stood_in = load_path(place)
    assert (module.kinds(), stood_in) == ((nn.Linear, nn.Embedding), ["course_of_nobody.model"])


class Whole(nn.Module):
    """Two layers, and a wrapper's ways to show them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 2)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(ids.float()))
        return out


@contextmanager
def summoned() -> Iterator[None]:
    yield


WAYS: dict[str, Any] = {
    "gather_full_params": lambda m: {f"module.{n}": p for n, p in m.named_parameters()},
    "full_parameters": lambda m: list(m.parameters()),
    "get_full_params": lambda m: iter(m.named_parameters()),
    "summon_full_params": lambda m: summoned(),
    "collect_whole_weights": lambda m: torch.cat([p.reshape(-1) for p in m.parameters()]),
}


@pytest.mark.parametrize("name", WAYS)
def test_whole_parameters_are_read_by_many_names_and_forms(name: str) -> None:
    module = Whole()
    kind = type("Wrapper", (), {name: lambda self: WAYS[name](module)})
    shapes = {n: p.shape for n, p in module.named_parameters()}
    reader = Reader(None, shapes, {n: n for n in shapes}, torch.zeros(1, 2))
    read = reader.read(kind(), module)
    assert reader.chosen == f"wrapper.{name}"
    assert all(torch.equal(read[n], p) for n, p in module.named_parameters())


def test_where_nothing_gives_them_they_are_seen_in_a_forward() -> None:
    module = Whole()
    shapes = {n: p.shape for n, p in module.named_parameters()}
    module.state_dict = dict  # type: ignore[method-assign, assignment]  # a wrapper's that gives nothing
    reader = Reader(None, shapes, {n: n for n in shapes}, torch.zeros(1, 2))
    assert set(reader.read(module, module)) == set(shapes)
    assert reader.chosen == "a forward pass"


def test_parameters_that_nothing_gives_are_said_to_be_unreadable() -> None:
    module = Whole()
    reader = Reader(None, {"other": torch.Size([4])}, {"other": "other"}, torch.zeros(1, 2))
    with pytest.raises(NotReadableError, match=r"offer gather_full_params\(\)"):
        reader.read(module, module)


def gathered_bytes(keep: bool) -> int:
    """The least of some times: the collective's thread may let go of memory late."""
    return min(gathered_once(keep) for _ in range(5))


def gathered_once(keep: bool) -> int:
    kept = []
    with InFlight() as flight:
        for _ in range(3 if keep else 1):
            whole = [torch.zeros(8) for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather(whole, torch.ones(8))
            kept.append(torch.cat(whole) if keep else None)
            del whole
    return flight.most


@pytest.mark.parametrize(("keep", "most"), [(False, 64), pytest.param(True, 256, marks=pytest.mark.slow)])
def test_gathered_bytes_count_with_their_copies_until_they_are_freed(keep: bool, most: int) -> None:
    assert run_world(gathered_bytes, 2, keep) == [most, most]


def test_a_share_is_a_matrix_cut_and_a_norm_whole() -> None:
    share = share_of(DEEP, 3)
    assert share.whole == 4 * sum(p.numel() for p in Decoder(DEEP).parameters())
    assert share.whole / 3 < share.mine < share.whole / 2


def test_the_default_total_leaves_fully_sharded_wrappers_out() -> None:
    rubric = load()
    assert sum(i.points for i in rubric.items if i.group != "fsdp" and not i.optional) == rubric.total
    assert sum(i.points for i in rubric.items if i.group == "fsdp") == 32


@pytest.mark.parametrize("base", ["fsdp_rows", pytest.param("fsdp_function", marks=pytest.mark.slow)])
def test_right_wrappers_pass_what_is_quick(base: str) -> None:
    with Subject(str(BASES / f"{base}.py")) as subject:
        verdicts = judge(subject, ("fsdp.start", "fsdp.update", "fsdp.uneven", "fsdp.tied"), [3])
    assert [v.check for v in verdicts if not v.passed] == []
