"""Boxes with nothing in their tensor, through maps that begin where no memory is.

Hopper GPUs translate the map's own address for a load of such a box, and crash if nothing is there;
a box that reaches into the tensor does not, nor do prefetches, stores and reductions. A map may
begin in front of its tensor on purpose: so that a sequence's end is a dimension's end
(`fa4.kit.views.ending_views`).
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa4.emulator.tma.descriptor import TensorMap
from tests.emulator.kernels import kinds, run_ptx
from tests.emulator.test_memory_tensor_copies import (
    FEW,
    coordinates,
    load_kernel,
    store_kernel,
)

COLUMNS, BOX = 16, (16, 4)
PREFETCH = """mov.b64 %rd9, block0; mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, 0;
  @%p1 cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%rd9, {at}];"""
STORE = "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group"
REDUCTION = "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group"


def moved_map(rows: int) -> tuple[np.ndarray, TensorMap]:
    """(rows, 16) of float32 in the middle of a larger array, and a map that begins `rows` before:
    element (n - length + j, start + length) of its last two dimensions is row start + j."""
    whole = np.zeros((3 * rows + 8, COLUMNS), np.float32)
    skip = -whole.ctypes.data % 64 // 4
    tensor = whole.reshape(-1)[skip + rows * COLUMNS :][: rows * COLUMNS].reshape(rows, COLUMNS)
    tensor[...] = np.arange(tensor.size).reshape(tensor.shape) + 1
    pitch = COLUMNS * 4
    return tensor, TensorMap(
        address=tensor.ctypes.data - rows * pitch, element="f32",
        dims=(COLUMNS, rows, rows + 1), strides_bytes=(pitch, pitch), box=(*BOX, 1),
        element_strides=(1, 1, 1),
    )  # fmt: skip


@FEW
@given(data=st.data(), rows=st.integers(1, 12), prefetched=st.booleans())
def test_a_box_with_nothing_in_it_needs_memory_at_the_maps_address(
    data: st.DataObject, rows: int, prefetched: bool
) -> None:
    start = data.draw(st.integers(0, rows), "start")
    length = data.draw(st.integers(0, rows - start), "length")
    first = data.draw(st.integers(0, 5), "first")
    tensor, table = moved_map(rows)
    at = (0, rows - length + first, start + length)
    out = np.full((4, COLUMNS), 99, np.float32)
    if prefetched:
        text, arrays = PREFETCH.replace("{at}", coordinates(at)), [tensor]
    else:
        text, arrays = load_kernel(at, out.nbytes, 3), [tensor, out]
    report = run_ptx(text, arrays, smem=2048, blocks=[table.encode()], collect=True)
    if first >= length and not prefetched:
        assert kinds(report) == {"out-of-bounds"}
        assert "lies wholly outside its tensor" in report.findings[0].message
        assert f"{rows * COLUMNS * 4} bytes before array0" in report.findings[0].message
    else:
        assert report.ok
        shown = np.zeros_like(out)
        inside = tensor[start + first : start + max(first, length)][: len(out)]
        shown[: len(inside)] = inside
        np.testing.assert_array_equal(out, 99 if prefetched else shown)


@pytest.mark.parametrize("at", [(0, 9, 0), (16, 0, 0), (0, -4, 0), (0, 0, 9), (-16, 0, 0)])
def test_every_dimension_counts_and_memory_there_is_enough(at: tuple[int, ...]) -> None:
    """The same box with the map's address in registered memory, and without."""
    tensor, table = moved_map(8)
    out = np.full((4, COLUMNS), 99, np.float32)
    for arrays, found in (
        ([tensor, out], {"out-of-bounds"}),
        ([tensor, out, as_array(table)], set()),
    ):
        report = run_ptx(load_kernel(at, out.nbytes, 3), arrays, smem=2048, collect=True,
                         blocks=[table.encode()])  # fmt: skip
        assert kinds(report) == found
    assert not out.any()


def as_array(table: TensorMap) -> np.ndarray:
    """The sixteen bytes at a map's address, which belong to the array around its tensor."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * 16).from_address(table.address))


@pytest.mark.parametrize("instruction", [STORE, REDUCTION])
def test_stores_and_reductions_need_no_memory_there(instruction: str) -> None:
    tensor, table = moved_map(8)
    values = np.ones((4, COLUMNS), np.float32)
    before = tensor.copy()
    text = store_kernel(instruction, (0, 8, 0), values.nbytes)
    report = run_ptx(text, [tensor, values], smem=2048, blocks=[table.encode()])
    assert report.ok
    np.testing.assert_array_equal(tensor, before)
