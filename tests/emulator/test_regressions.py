"""Small kernels that show what running other people's kernels has found wrong in the emulator."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator.kernels import kinds, run_ptx

SCHEDULES = ("fifo", "random", "adversarial")


def two_ctas(value: str) -> str:
    """Thread 0 of each CTA stores a value to the same word."""
    return f"""
  mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x;
  setp.ne.u32 %p1, %r1, 0; @%p1 bra done;
  {value}
  st.global.u32 [%rd1], %r3;
done:
"""


def test_equal_stores_of_two_ctas_do_not_race():
    """PTX ISA 8.7.2: a race of stores of one size has an outcome, here only one."""
    x = np.zeros(1, np.uint32)
    report = run_ptx(two_ctas("mov.u32 %r3, 7;"), [x], grid=(2, 1, 1), collect=True)
    assert report.ok and x[0] == 7


def test_different_stores_of_two_ctas_race():
    x = np.zeros(1, np.uint32)
    report = run_ptx(two_ctas("add.u32 %r3, %r2, 7;"), [x], grid=(2, 1, 1), collect=True)
    assert kinds(report) == {"race"}


def test_a_store_equal_in_one_lane_and_different_in_another_races():
    """The whole store must leave memory as it is, not only the lane that is looked at."""
    body = """
  mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x;
  mul.wide.u32 %rd2, %r1, 4; add.u64 %rd1, %rd1, %rd2;
  setp.eq.u32 %p1, %r1, 31; selp.u32 %r3, %r2, 7, %p1;
  st.global.u32 [%rd1], %r3;
"""
    report = run_ptx(body, [np.zeros(32, np.uint32)], grid=(2, 1, 1), collect=True)
    assert kinds(report) == {"race"}


ABANDONED = """
  mov.u32 %r1, smem; mov.u32 %r2, %tid.x; shl.b32 %r2, %r2, 4; add.u32 %r1, %r1, %r2;
  cvt.u64.u32 %rd2, %r2; add.u64 %rd1, %rd1, %rd2;
  COPY
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_cta_may_exit_with_its_cp_async_under_way(schedule):
    body = ABANDONED.replace("COPY", "cp.async.cg.shared.global [%r1], [%rd1], 16;")
    x = np.zeros(512, np.uint8)
    report = run_ptx(body, [x], smem=512, schedule=schedule, seed=1, collect=True)
    assert report.ok


def test_a_cta_may_not_exit_before_its_bulk_store_has_read():
    store = """
  st.shared.v4.u32 [%r1], {%r2, %r2, %r2, %r2};
  fence.proxy.async.shared::cta;
  cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], 16;
  cp.async.bulk.commit_group;
"""
    x = np.zeros(512, np.uint8)

    def run(body: str) -> set[str]:
        text = ABANDONED.replace("COPY", body)
        return kinds(run_ptx(text, [x], smem=512, schedule="adversarial", seed=1, collect=True))

    assert run(store) == {"exit"}
    assert run(store + "cp.async.bulk.wait_group.read 0;") == set()


def test_an_argument_that_was_none_when_compiled_stays_none():
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    from cutlass import cute
    from cutlass.cute.runtime import from_dlpack

    from fa4.emulator.errors import LaunchError
    from fa4.emulator.host import emulate
    from tests.emulator.host_kernels import add_or_copy

    a, c = np.arange(300, dtype=np.float32), np.zeros(300, np.float32)
    views = [from_dlpack(array) for array in (a, c)]
    with emulate():
        compiled = cute.compile(add_or_copy, views[0], None, views[1])
        compiled(views[0], None, views[1])
        assert (c == a).all()
        with pytest.raises(LaunchError, match="not a tensor"):
            compiled(None, None, views[1])
