"""Each synchronisation pattern of PTX ISA 9.7.16.6.4: clean as written, a finding for each step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fa4.emulator.execute import Report
from tests.emulator.kernels import kinds
from tests.emulator.tcgen05_patterns import PATTERNS, Pattern, Step, expected, run
from tests.emulator.tcgen05_ring import LEFT_OUT, Ring
from tests.emulator.tensor_kernels import SCHEDULES, TensorKernel
from tests.emulator.tensor_kernels import wait as acquire
from tests.emulator.tensor_operands import commit, mma

SEEDS = range(3)
STEPS = [
    pytest.param(name, *place, id=f"{name}: {' '.join(pattern.step(*place).text.split()[:2])}")
    for name, pattern in PATTERNS.items()
    for place in pattern.required()
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", PATTERNS)
def test_the_pattern_is_clean_as_written(name: str, schedule: str) -> None:
    pattern = PATTERNS[name]
    report, found = run(pattern, schedule=schedule)
    assert report.ok, str(report)
    np.testing.assert_array_equal(found, expected(pattern, 5 if pattern.second else 0))


def reports_without(pattern: Pattern, warp: int, index: int) -> list[Report]:
    without = pattern.without(warp, index)
    options = [{"schedule": schedule, "seed": seed} for schedule in SCHEDULES for seed in SEEDS]
    return [run(without, **option)[0] for option in options]


@pytest.mark.parametrize("name, warp, index", STEPS)
def test_a_finding_names_the_step_that_is_left_out(name: str, warp: int, index: int) -> None:
    step = PATTERNS[name].step(warp, index)
    reports = reports_without(PATTERNS[name], warp, index)
    for report in reports:
        assert kinds(report) & {"race", "deadlock"}, str(report)
    named = [step.names in str(report) for report in reports]
    # Who does not wait may come first all the same: then the other one's next step is missing.
    assert any(named) if step.waits else all(named), named


def plain(step: Step) -> Step:
    """The step with an arrival that releases and a wait that acquires."""
    return Step(step.text.replace("arrive.relaxed", "arrive.release").replace(
        "parity.relaxed", "parity.acquire"))  # fmt: skip


def by_barrier(step: Step) -> Step:
    """The step with a barrier of the CTA for the hand-over: both warps wait at it."""
    hand_over = "mbarrier." in step.text and "commit" not in step.text
    return Step("  bar.sync 1, 64;\n") if hand_over else step


@settings(max_examples=60)
@given(
    name=st.sampled_from(sorted(PATTERNS)),
    warps=st.permutations(range(8)),
    form=st.sampled_from([None, plain, by_barrier]),
    schedule=st.sampled_from(SCHEDULES),
    seed=st.integers(0, 9999),
)
def test_other_warps_and_other_hand_overs(name, warps, form, schedule, seed) -> None:
    pattern, (first, second) = PATTERNS[name], warps[:2]
    if form is by_barrier:
        commits = any("commit" in step.text for step in pattern.first)
        assume(pattern.second and not commits and "flag" not in name)
    if form is not None:
        pattern = Pattern(
            tuple(map(form, pattern.first)),
            # What reads D at the end waits for a commit.
            tuple(form(s) if k == 0 or form is plain else s for k, s in enumerate(pattern.second)),
            pattern.times, pattern.counts, pattern.kept,
        )  # fmt: skip
        if form is by_barrier:
            assert sum("bar.sync 1" in step.text for step in pattern.first + pattern.second) == 2
    report, found = run(pattern, first, second, schedule=schedule, seed=seed)
    assert report.ok, str(report)
    reader = second if pattern.second else first
    np.testing.assert_array_equal(found, expected(pattern, reader))


@settings(max_examples=40)
@given(
    place=st.sampled_from([parameter.values for parameter in STEPS]),
    warps=st.permutations(range(8)),
    schedule=st.sampled_from(SCHEDULES),
    seed=st.integers(0, 9999),
)
def test_a_drawn_step_left_out(place, warps, schedule, seed) -> None:
    name, warp, index = place
    step = PATTERNS[name].step(warp, index)
    without = PATTERNS[name].without(warp, index)
    report, _ = run(without, *warps[:2], schedule=schedule, seed=seed)
    assert not report.ok and (step.waits or step.names in str(report)), str(report)


rings = st.builds(
    Ring,
    stages=st.integers(1, 3),
    extra=st.integers(1, 4),
    group=st.sampled_from([1, 2]),
    issuer=st.integers(4, 7),
)


@settings(max_examples=20)
@given(ring=rings, schedule=st.sampled_from(SCHEDULES), seed=st.integers(0, 9999))
def test_a_ring_of_accumulators_is_clean(ring: Ring, schedule: str, seed: int) -> None:
    """Relaxed signals alone, over several phases of each barrier, in one CTA and in a pair."""
    report, found = ring.run(schedule=schedule, seed=seed)
    assert report.ok, str(report)
    np.testing.assert_array_equal(found, ring.product())


@settings(max_examples=30)
@given(
    ring=rings,
    left_out=st.sampled_from(sorted(LEFT_OUT)),
    schedule=st.sampled_from(SCHEDULES),
    seed=st.integers(0, 9999),
)
def test_a_ring_without_one_of_its_steps(ring, left_out, schedule, seed) -> None:
    report, _ = ring.run(left_out, schedule=schedule, seed=seed)
    assert not report.ok
    assert left_out.startswith("wait for") or LEFT_OUT[left_out] in str(report), str(report)


# What the committing thread has learned since its last operation.

FREE = acquire(8, name="FREE")
LATE_COMMIT = """
  setp.ge.u32 %p11, %r1, 32;
  @%p11 bra WAITER;
  @!%p1 bra JOINED;
{first}
  bra JOINED;
WAITER:
{second}
JOINED:
  bar.sync 0;
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("again", [commit(0), mma(Ring().problem, "f16") + commit(0)])
@pytest.mark.parametrize("free", [True, False])
def test_a_commit_tells_what_its_thread_has_waited_for(free, again, schedule) -> None:
    """Phase 1 of the mbarrier ends behind the wait for phase 0, also without a product between."""
    first = mma(Ring().problem, "f16") + commit(0) + (FREE if free else "") + again
    second = acquire(0, name="FIRST") + "  mbarrier.arrive.shared::cta.b64 _, [%r20+8];\n"
    second += acquire(0, 1, name="AGAIN")
    image = Ring().problem.image
    kernel = TensorKernel(
        barriers=(1, 32), image_bytes=image.shape[1], threads=64,
        before=LATE_COMMIT.format(first=first, second=second),
    )  # fmt: skip
    report = kernel.run([image.copy()], schedule=schedule)
    assert report.ok if free else kinds(report) & {"mbarrier", "deadlock"}, str(report)
