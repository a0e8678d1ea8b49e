"""The judge judged: every planted fault is caught where it is, and nothing correct is called wrong."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from minigpt_dist.cli.faults import REPEAT
from minigpt_dist.verify.checks import CHECKS, put
from minigpt_dist.verify.contract import SLOTS
from minigpt_dist.verify.false_alarms import runs
from minigpt_dist.verify.faults import FAULTS, FILES, build
from minigpt_dist.verify.faults.variants import VARIANTS
from minigpt_dist.verify.matrix import Extent, Outcome, chosen, judge_all, judge_fault, replaced
from minigpt_dist.verify.subject import Subject
from minigpt_dist.verify.violation import STAGES

# One or two of each file, none that has to be waited for.
QUICK = (
    "broadcast-skips-buffers",
    "ring-drops-the-remainder",
    "warm-up-is-one-short",
    "rank-0-decides-alone",
    "row-bias-added-once-a-rank",
    "maximum-is-each-ranks-own",
    "layernorm-grads-not-summed-over-tp",
    "sharded-sum-assigned-not-added",
    "not-gathered-again-for-backward",
    "mask-is-drawn-anew",
    "clip-before-unscale",
    "broadcast-tree-misses-the-odd-rank",
    "corpus-seeded-by-rank",
    "no-causal-mask",
    "sum-instead-of-mean",
    "nothing-is-reduced",
    "gradients-travel-in-bfloat16",
    "message-zeroed-once",
    "only-last-microbatch-survives",
    "zero-grad-clears-owned-parameters-only",
    "unused-parameter-stops-its-bucket",
    "dummy-step-counts",
    "shared-step-counter-across-subgroups",
    "weight-decay-twice",
    "master-in-bfloat16",
    "remainder-never-updated",
    "slices-joined-in-reverse",
    "nothing-is-gathered",
    "ten-tensors-a-launch",
    "ddp-drops-keyword-arguments",
    "state-of-the-first-step-taken-for-none",
    "full-state-reported-as-a-share",
    "lr-edits-ignored",
    "late-group-never-optimized",
    "closure-called-twice",
    "clip-by-the-norm-of-the-own-slice",
    "adam-step-lost",
    "save-gathers-a-stale-shard",
    "reduction-order-differs-by-rank",
    "state-dropped-at-a-rebuild",
    "ddp-sums-gradients",
    "fsdp-sums-gradients",
    "shard-corrupted-only-inside-save",
    "overwrite-in-place",
    "missing-shard-filled-with-zeros",
    "missing-checksum-accepted",
)
QUICK_VARIANTS = ("wrapper-with-one-message",)
EQUIVALENT = [(fault.name, N) for fault in FAULTS.values() for N, _ in fault.equivalent if N <= 4]


def cases(names: Iterable[str], quick: Iterable[str]) -> list[Any]:
    """All names as parameters; those that are not quick run on request."""
    return [pytest.param(n, marks=() if n in quick else pytest.mark.catalogue, id=n) for n in names]


@pytest.fixture(scope="module")
def caught(request: pytest.FixtureRequest) -> dict[str, Outcome]:
    """Every fault of this session before the judge, several at a time; the whole of what it promises if the catalogue is asked for."""
    mine = [item for item in request.session.items if "caught" in getattr(item, "fixturenames", ())]
    faults = chosen(item.callspec.params["name"] for item in mine)  # type: ignore[attr-defined]  # they are parametrized
    extent: Extent = "promised" if "catalogue" in request.config.getoption("-m") else "quick"
    return {o.fault.name: o for o in judge_all(faults, functools.partial(judge_fault, extent=extent))}


@pytest.mark.timeout(3600)  # the first of them waits for all
@pytest.mark.parametrize("name", cases(FAULTS, QUICK))
def test_it_is_caught_by_the_check_that_ought_to_where_it_is_and_by_none_else(
    name: str, caught: dict[str, Outcome]
) -> None:
    assert caught[name].complaint == ""


@pytest.mark.catalogue
@pytest.mark.parametrize("name, world_size", EQUIVALENT)
def test_where_it_is_equivalent_the_check_sees_nothing(name: str, world_size: int) -> None:
    outcome = judge_fault(FAULTS[name], world_size=world_size, extent="quick")
    assert outcome.complaint == ""


def failures(spec: str, slots: set[str], world_size: int, whole: bool) -> list[str]:
    """What checks of `slots` say; with `whole`, also those that run the composition, which take longer than all others together."""
    about = [c for c in CHECKS.values() if slots & set(c.slots) and world_size in c.world_sizes]
    with Subject(spec) as subject:
        verdicts = [put(check, subject, world_size) for check in about if whole or len(check.slots) == 1]
    return [v.render(spec) for v in verdicts if v.violations]


@pytest.mark.parametrize("name", cases(VARIANTS, QUICK_VARIANTS))
def test_a_correct_variant_passes_every_probe_of_its_pieces(name: str) -> None:
    assert failures(f"variant:{name}", replaced(VARIANTS[name]()), 3, whole=False) == []


@pytest.mark.catalogue
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_correct_variant_passes_every_check(name: str, world_size: int) -> None:
    assert failures(f"variant:{name}", replaced(VARIANTS[name]()), world_size, whole=True) == []


def test_three_hundred_runs_of_correct_variants_are_one_command() -> None:
    asked = runs([], REPEAT)
    assert len(asked) >= 300
    assert {run.world_size for run in asked} == {1, 2, 3, 4}
    assert len({(run.variant, run.seed) for run in asked}) == len(asked)


@pytest.mark.catalogue
def test_the_base_that_faults_are_planted_in_passes() -> None:
    assert failures("fault:none", set(SLOTS), 2, whole=True) == []


@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
def test_an_entry_is_complete(fault: Any) -> None:
    assert fault.sentence.endswith(".")
    assert fault.source
    assert fault.needs
    assert fault.stage in STAGES
    assert {fault.check, *fault.green} <= set(CHECKS)
    assert fault.check not in fault.green
    assert fault.world_size not in dict(fault.equivalent)
    assert replaced(fault.names()) & set(CHECKS[fault.check].slots)
    assert len(inspect.getsource(fault.names).splitlines()) <= 50


def test_every_file_is_in_the_quick_subset() -> None:
    assert {FAULTS[name].file for name in QUICK} >= {file.__name__.rpartition(".")[2] for file in FILES}


@pytest.mark.parametrize("refuse", [build, lambda name: chosen([name])])
def test_an_unknown_name_is_refused_in_one_line_with_the_nearest(refuse: Callable[[str], object]) -> None:
    with pytest.raises(ValueError, match=r"fault is 'nobodies', but should be one that `.*` lists$"):
        refuse("nobodies")
    with pytest.raises(ValueError, match=r"lists \(nearest: sum-instead-of-mean"):
        refuse("sum-insted-of-mean")
