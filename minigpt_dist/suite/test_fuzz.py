"""Shard boundaries found by fuzzing: random shapes, world sizes, seeds and conditions, on live gloo worlds."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from minigpt_dist.config import TrainConfig
from minigpt_dist.verify.checks.fuzz import fuzz_verdict, resume_verdict
from minigpt_dist.verify.scenario import Scenario
from minigpt_dist.verify.subject import Subject

SHAPES = st.lists(
    st.one_of(st.just(()), st.tuples(st.integers(0, 9)), st.tuples(st.integers(1, 4), st.integers(1, 5))),
    min_size=1,
    max_size=6,
).filter(lambda shapes: any(0 not in shape for shape in shapes))


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """A configuration as a few small numbers; the tensors come from its seed, so a failing example is one printable line."""
    shapes = tuple(draw(SHAPES))
    trainable = [i for i, shape in enumerate(shapes) if 0 not in shape]
    keep = draw(st.sampled_from(trainable))  # one tensor always takes part
    others = st.sets(st.integers(0, len(shapes) - 1).filter(lambda i: i != keep), max_size=2)
    frozen = draw(others)
    absent = tuple((i, draw(st.integers(-1, 3))) for i in sorted(draw(others) - frozen))
    return Scenario(
        name="fuzz",
        why="random shapes and conditions",
        shapes=shapes,
        steps=draw(st.integers(1, 4)),
        frozen=tuple(sorted(frozen)),
        absent=absent,
        backwards=draw(st.integers(1, 2)),
        transposed=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


@given(scenario=scenarios(), world_size=st.sampled_from([1, 2, 3, 4]))
@example(scenario=Scenario("fuzz", "P = 0 mod N", shapes=((4, 2),)), world_size=4)
@example(scenario=Scenario("fuzz", "P = 1 mod N", shapes=((5,),)), world_size=4)
@example(scenario=Scenario("fuzz", "P = 3 mod N", shapes=((7,),)), world_size=4)
@example(scenario=Scenario("fuzz", "P < N", shapes=((), (0,), (2,))), world_size=4)
def test_optimizer_is_adamw_wherever_the_shards_are_cut(subject: Subject, scenario: Scenario, world_size: int) -> None:
    assert fuzz_verdict(subject, scenario, world_size) == ""


@settings(max_examples=max(2, settings().max_examples // 10))  # an example starts two worlds and trains in both
@given(steps=st.integers(2, 6), at=st.integers(1, 5), seed=st.integers(0, 99), world_size=st.sampled_from([1, 2, 3]))
@example(steps=1, at=1, seed=0, world_size=2)
def test_a_run_resumes_from_any_step(subject: Subject, steps: int, at: int, seed: int, world_size: int) -> None:
    config = TrainConfig(world_size=world_size, steps=steps, checkpoint_step=min(at, steps), seed=seed)
    assert resume_verdict(subject, config) == ""
