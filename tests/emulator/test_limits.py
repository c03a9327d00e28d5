"""Kernels without an end, launches beyond the hardware's limits, divisions by zero."""

from __future__ import annotations

import time

import numpy as np
import pytest

from fa4.emulator.errors import EmulationFailed, LaunchError
from fa4.emulator.machine.options import Options
from tests.emulator.kernels import kinds, module_text, run_ptx

FOREVER = "mov.u32 %r2, %ctaid.x;\nLOOP: add.u32 %r1, %r1, 1;\nbra LOOP;"
SCHEDULES = ("fifo", "random", "adversarial")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_endless_loop_ends_at_the_limit(schedule: str) -> None:
    """The finding names a warp that runs, and its line."""
    report = run_ptx(FOREVER, collect=True, max_steps=5000, schedule=schedule, block=(64, 1, 1))
    (finding,) = report.findings
    assert finding.kind == "step-limit" and "5000 steps" in finding.message
    assert finding.line in (17, 18) and finding.cta == 0 and finding.warp in (0, 1)
    assert report.steps <= 5000
    with pytest.raises(EmulationFailed, match="step-limit"):
        run_ptx(FOREVER, max_steps=5000)


def test_the_limit_lets_shorter_kernels_be() -> None:
    body = "mov.u32 %r1, 0; LOOP: add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 500; @%p1 bra LOOP;"
    steps = run_ptx(body).steps
    assert steps > 500
    assert run_ptx(body, max_steps=steps + 200).ok
    assert kinds(run_ptx(body, max_steps=steps - 1, collect=True)) == {"step-limit"}


def test_a_large_grid_ends_at_the_limit_too() -> None:
    """Of the 2^31 CTAs that CUDA allows, none is listed before it starts."""
    began = time.perf_counter()
    report = run_ptx("mov.u32 %r1, 1;", grid=(2**31 - 1, 1, 1), collect=True, max_steps=20_000)
    assert kinds(report) == {"step-limit"} and time.perf_counter() - began < 20


@pytest.mark.parametrize("steps", [0, -1, 2.5])
def test_the_limit_is_a_positive_integer(steps: float) -> None:
    with pytest.raises(LaunchError, match=f"max_steps {steps}: a positive integer is needed"):
        Options(max_steps=steps)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": (2**31, 1, 1)}, "grid .2147483648, 1, 1.: at most 2147483647, 65535, 65535"),
        ({"grid": (1, 65536, 1)}, "grid .1, 65536, 1.: at most"),
        ({"grid": (1, 1, 65536)}, "grid .1, 1, 65536.: at most"),
        ({"block": (1, 1, 65)}, "block .1, 1, 65.: at most 1024, 1024, 64"),
        ({"block": (1025, 1, 1)}, "block .1025, 1, 1.: at most 1024, 1024, 64"),
        ({"block": (33, 32, 1)}, "1056 threads, at most 1024"),
        ({"cluster": (17, 1, 1), "grid": (17, 1, 1)}, "17 CTAs, at most 16"),
    ],
)
def test_launches_beyond_the_limits_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        run_ptx("mov.u32 %r1, 1;", **change)  # type: ignore[arg-type]


DIVIDE = """
  mov.u32 %r1, %tid.x; cvt.u64.u32 %rd9, %r1; cvt.u16.u32 %h1, %r1;
  mov.b32 %r2, 9; mov.b64 %rd10, 9; mov.b16 %h2, 9;
  setp.ne.u32 %p1, %r1, 0;
  {instruction}
"""
DIVISIONS = [
    f"{name}.{sign}{bits} {register}3, {register}{first}, {register}{second};"
    for name in ("div", "rem")
    for sign in "us"
    for bits, register, first, second in ((16, "%h", 2, 1), (32, "%r", 2, 1), (64, "%rd", 10, 9))
]


@pytest.mark.parametrize("instruction", DIVISIONS)
def test_a_division_of_integers_by_zero_is_reported(instruction: str) -> None:
    """Of lane 0 alone; not if that lane does not divide, nor if the divisor is another."""
    body = DIVIDE.format(instruction=instruction)
    report = run_ptx(body, collect=True)
    (finding,) = report.findings
    assert finding.kind == "division" and "lane 0 divides by zero" in finding.message
    assert finding.line == module_text(body, 0).splitlines().index(f"  {instruction}") + 1
    assert run_ptx(body, checks=False).ok
    assert run_ptx(DIVIDE.format(instruction=f"@%p1 {instruction}")).ok
    swapped = instruction.split(", ")
    assert run_ptx(DIVIDE.format(instruction=f"{swapped[0]}, {swapped[1]}, {swapped[1]};")).ok
    assert run_ptx(DIVIDE.format(instruction=f"{swapped[0]}, {swapped[1]}, 7;")).ok


def test_a_division_by_zero_goes_on() -> None:
    """The results are those of an H200; other lanes are right; it is counted once."""
    out = np.zeros(32, np.uint32)
    body = DIVIDE.format(instruction="div.u32 %r3, %r2, %r1;") + (
        "mad.wide.u32 %rd11, %r1, 4, %rd1; st.global.b32 [%rd11], %r3;"
    )
    report = run_ptx(body, [out], collect=True)
    assert out.tolist() == [0xFFFFFFFF, *(9 // lane for lane in range(1, 32))]
    assert report.warp_instructions["div.u32"] == 1
    assert kinds(run_ptx(DIVIDE.format(instruction="rem.s32 %r3, %r2, 0;"), collect=True)) == {
        "division"
    }
