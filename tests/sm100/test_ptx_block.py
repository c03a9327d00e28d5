"""PtxBlock PTX inside a traced kernel: what it computes, and what it refuses."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cutlass")

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.base_dsl.compiler import DumpDir
from cutlass.cute.runtime import make_fake_tensor

from fa4.emulator import launch
from fa4.kit.ptx_block import PtxBlock, hold_before, literal, stand_apart
from fa4.reference.exp2 import fma_f32

ROWS = 32
FLOATS = st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=False)


@cute.kernel
def several(given_: cute.Tensor, number: cute.Tensor, out: cute.Tensor):
    """Results of every kind of register, from inputs that are read twice, between two branches."""
    thread = cute.arch.thread_idx()[0]
    a, b = given_[thread, 0], given_[thread, 1]
    stand_apart(number[0])
    code = PtxBlock()
    first, second, again, count = code.read_all([a, b, a, number[0]])
    largest = code.do("max.f32", first, second)
    low, high = code.halves(
        code.packed("fma.rn", code.pair(first, second), code.pair(second, again),
                    code.pair(literal(1.0), literal(-0.5)))
    )  # fmt: skip
    larger = code.do("setp.gt.f32", first, second, kind="pred")
    chosen = code.do("selp.f32", literal(3.0), code.read(0.25), larger)
    doubled = code.do("shl.b32", count, "1", kind="b32")
    results = code.trace(low, largest, high, chosen, doubled)
    hold_before(results)  # of both kinds; where one is negative it sleeps
    stand_apart(number[0])
    for c, value in enumerate(results):
        out[thread, c] = value.to(Float32) if isinstance(value, Int32) else value


@cute.jit
def run_several(given_: cute.Tensor, number: cute.Tensor, out: cute.Tensor):
    """Launch one warp."""
    several(given_, number, out).launch(grid=(1, 1, 1), block=(ROWS, 1, 1))


@pytest.fixture(scope="module")
def kernel() -> Any:
    def tensor(element: Any, *shape: int) -> Any:
        stride = (shape[1], 1) if len(shape) == 2 else (1,)
        return make_fake_tensor(element, shape, stride=stride, assumed_align=16)

    with tempfile.TemporaryDirectory() as folder:
        options = (cute.EnableTVMFFI(True), cute.KeepPTX(True), cute.GPUArch("sm_100a"),
                   DumpDir(folder))  # fmt: skip
        return cute.compile[options](
            run_several, tensor(Float32, ROWS, 2), tensor(Int32, 1), tensor(Float32, ROWS, 5)
        )


@settings(max_examples=25)
@given(a=st.lists(FLOATS, min_size=ROWS, max_size=ROWS), b=FLOATS, number=st.integers(0, 1000))
def test_results_in_the_order_they_are_asked_for(
    kernel: Any, a: list[float], b: float, number: int
) -> None:
    rows = np.array([[x, b] for x in a], np.float32)
    out = np.zeros((ROWS, 5), np.float32)
    launch(kernel, rows, np.array([number], np.int32), out)
    first, second = rows.T
    one, half = np.float32(1.0), np.float32(-0.5)
    expected = np.stack([
        fma_f32(first, second, one), np.maximum(first, second), fma_f32(second, first, half),
        np.where(first > second, 3.0, 0.25), np.full(ROWS, 2.0 * number),
    ], axis=1)  # fmt: skip
    np.testing.assert_array_equal(out, expected.astype(np.float32))


def test_a_negative_number_is_not_passed(kernel: Any) -> None:
    """The branch is one: threads that take it write nothing."""
    out = np.full((ROWS, 5), 7.0, np.float32)
    launch(kernel, np.ones((ROWS, 2), np.float32), np.array([-1], np.int32), out)
    assert (out == 7.0).all()


def test_what_is_held_reads_every_value(kernel: Any) -> None:
    """Five values: the first, and two in each of two more instructions."""
    ptx = str(kernel.artifacts.PTX)
    assert ptx.count("nanosleep.u32") == 1 and ptx.count("lop3.b32") == 2


def test_results_must_differ_from_each_other_and_from_inputs() -> None:
    code = PtxBlock()
    result = code.do("add.f32", "%f32_8", "%f32_9")
    with pytest.raises(ValueError, match="twice"):
        code.trace(result, result)
