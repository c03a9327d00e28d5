"""im2col copies against loops over pixels, and convolutions made of them."""

from __future__ import annotations

import ctypes as C
from itertools import islice, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.errors import EmulationFailed, LaunchError
from fa4.emulator.host.tensor_maps import ELEMENTS, encode_im2col
from fa4.emulator.tma.descriptor import TensorMap, TensorMapError
from fa4.emulator.tma.im2col import Im2colMap
from tests.emulator.kernels import aligned, run_ptx

COMPLETE = "mbarrier::complete_tx::bytes"
SWIZZLES = (0, 32, 64, 128)
DTYPES = {"f16": np.float16, "f32": np.float32, "u8": np.uint8}
SETUP = """
  mov.u32 %r1, %tid.x; mov.u32 %r2, smem; setp.eq.u32 %p1, %r1, 0; mov.b64 %rd9, block0;
  add.u32 %r3, %r2, 1024; mov.u32 %r9, TOTAL;
"""
# Copies %r9 bytes from shared address %r3 to %rd2; and the other way.
DUMP = """
  mov.u32 %r4, 0;
loop: mad.lo.u32 %r5, %r1, 16, %r4; setp.ge.u32 %p3, %r5, %r9; @%p3 bra next;
  add.u32 %r6, %r3, %r5; cvt.u64.u32 %rd11, %r5; add.s64 %rd11, %rd2, %rd11;
  ld.shared.v2.b64 {%rd12, %rd13}, [%r6]; st.global.v2.b64 [%rd11], {%rd12, %rd13};
next: add.u32 %r4, %r4, 512; setp.lt.u32 %p3, %r4, %r9; @%p3 bra loop;
"""
FILL = DUMP.replace(
    "ld.shared.v2.b64 {%rd12, %rd13}, [%r6]; st.global.v2.b64 [%rd11], {%rd12, %rd13};",
    "ld.global.v2.b64 {%rd12, %rd13}, [%rd11]; st.shared.v2.b64 [%r6], {%rd12, %rd13};",
)


def braces(values: Any) -> str:
    return "{" + ", ".join(str(v) for v in values) + "}"


def encoded(tensor: np.ndarray, element: str, box: dict[str, Any], swizzle: int = 0) -> bytes:
    """A map of a tensor (N, [D, [H,]] W, C), by the driver's function. box: lower and upper corner
    and steps, W first; channels, pixels."""
    rank = tensor.ndim
    dims = (C.c_uint64 * rank)(*tensor.shape[::-1])
    strides = (C.c_uint64 * (rank - 1))(*tensor.strides[-2::-1])
    lower, upper = ((C.c_int32 * (rank - 2))(*box[name]) for name in ("lower", "upper"))
    steps = (C.c_uint32 * rank)(1, *box["steps"], 1)
    arrays = [C.addressof(a) for a in (dims, strides, lower, upper, steps)]
    modes = (0, SWIZZLES.index(swizzle), 0, 0)
    code = ELEMENTS.index(element)
    sizes = box["channels"], box["pixels"]
    return encode_im2col(code, rank, tensor.ctypes.data, arrays, sizes, modes)


def visited(tensor: np.ndarray, box: dict[str, Any], at: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The pixels (N, ..., W) of a column, one after the other, without offsets."""
    spatial = tensor.shape[-2:0:-1]  # W, H, D
    axes = [
        range(low, size + high, step)
        for low, high, size, step in zip(
            box["lower"], box["upper"], spatial, box["steps"], strict=True
        )
    ]
    images = range(at[-1], at[-1] + box["pixels"] + 1)
    every = product(images, *reversed(axes))
    started = (p for p in every if p >= tuple(reversed(at[1:])))
    return list(islice(started, box["pixels"]))


def column(
    tensor: np.ndarray, box: dict[str, Any], at: tuple[int, ...], offsets: tuple[int, ...]
) -> np.ndarray:
    """(pixels, channels) of a copy, zeros outside."""
    out = np.zeros((box["pixels"], box["channels"]), tensor.dtype)
    for row, pixel in enumerate(visited(tensor, box, at)):
        moved = (pixel[0], *np.add(pixel[1:], offsets[::-1]))
        for channel in range(box["channels"]):
            place = (*moved, at[0] + channel)
            if all(0 <= p < size for p, size in zip(place, tensor.shape, strict=True)):
                out[row, channel] = tensor[place]
    return out


def swizzled(values: np.ndarray, swizzle: int) -> np.ndarray:
    """Bytes as they lie in shared memory, from a multiple of 1024 on."""
    data = values.view(np.uint8).reshape(-1, 16)
    chunk = np.arange(len(data))
    mask = {0: 0, 32: 1, 64: 3, 128: 7}[swizzle]
    out = np.zeros_like(data)
    out[chunk ^ (chunk * 16 // 128 & mask)] = data
    return out.reshape(-1)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """A tensor, a box in it, where a column begins, offsets."""
    element = draw(st.sampled_from(sorted(DTYPES)))
    size = np.dtype(DTYPES[element]).itemsize
    swizzle = draw(st.sampled_from(SWIZZLES))
    spatial = draw(st.integers(1, 3))
    channels = (swizzle or draw(st.sampled_from([16, 64]))) // size
    extents = [draw(st.integers(3, 6)) for _ in range(spatial)]
    box: dict[str, Any] = {
        "channels": channels,
        "pixels": 8 * draw(st.integers(1, 6)),
        "lower": [draw(st.integers(-2, 1)) for _ in range(spatial)],
        "upper": [draw(st.integers(-1, 2)) for _ in range(spatial)],
        "steps": [draw(st.integers(1, 3)) for _ in range(spatial)],
    }
    at = [
        draw(st.sampled_from(range(low, size + high, step)))
        for low, high, size, step in zip(
            box["lower"], box["upper"], extents, box["steps"], strict=True
        )
    ]
    shape = (draw(st.integers(1, 3)), *extents[::-1], 2 * channels)
    return {
        "element": element, "swizzle": swizzle, "box": box, "shape": shape,
        "at": (draw(st.sampled_from([0, channels])), *at, draw(st.integers(0, shape[0] - 1))),
        "offsets": tuple(draw(st.integers(0, 3)) for _ in range(spatial)),
    }  # fmt: skip


def tensor_of(case: dict[str, Any]) -> np.ndarray:
    values = np.random.default_rng(0).integers(1, 100, case["shape"])
    return aligned(values.astype(DTYPES[case["element"]]))


@settings(max_examples=25)
@given(case=cases(), schedule=st.sampled_from(["fifo", "adversarial"]))
def test_loads_of_any_column(case: dict[str, Any], schedule: str) -> None:
    tensor, box = tensor_of(case), case["box"]
    raw = encoded(tensor, case["element"], box, case["swizzle"])
    expected = column(tensor, box, case["at"], case["offsets"])
    out = aligned(np.full(expected.nbytes, 99, np.uint8))
    names = [f"%h{k + 1}" for k in range(len(case["offsets"]))]
    moves = "".join(f"mov.b16 {n}, {o};" for n, o in zip(names, case["offsets"], strict=True))
    body = f"""{SETUP.replace("TOTAL", str(expected.nbytes))} {moves}
      @%p1 mbarrier.init.shared.b64 [%r2], 1; fence.mbarrier_init.release.cluster; bar.sync 0;
      @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], {expected.nbytes};
      @%p1 cp.async.bulk.prefetch.tensor.{tensor.ndim}d.L2.global.im2col
        [%rd9, {braces(case["at"])}], {braces(names)};
      @%p1 cp.async.bulk.tensor.{tensor.ndim}d.shared::cluster.global.im2col.{COMPLETE}
        [%r2+1024], [%rd9, {braces(case["at"])}], [%r2], {braces(names)};
    again: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0; @!%p2 bra again;
      {DUMP}
    """
    run_ptx(body, [tensor, out], smem=1024 + expected.nbytes, blocks=[raw], schedule=schedule)
    np.testing.assert_array_equal(out, swizzled(expected, case["swizzle"]))


@settings(max_examples=10)
@given(case=cases())
def test_stores_of_any_column(case: dict[str, Any]) -> None:
    tensor, box, at = tensor_of(case), case["box"], case["at"]
    raw = encoded(tensor, case["element"], box, case["swizzle"])
    values = np.random.default_rng(1).integers(100, 120, (box["pixels"], box["channels"]))
    values = values.astype(tensor.dtype)
    expected = tensor.copy()
    for row, pixel in enumerate(visited(tensor, box, at)):
        if all(0 <= p < size for p, size in zip(pixel, tensor.shape[:-1], strict=True)):
            expected[pixel][at[0] : at[0] + box["channels"]] = values[row]
    source = aligned(swizzled(np.ascontiguousarray(values), case["swizzle"]))
    body = f"""{SETUP.replace("TOTAL", str(source.nbytes))} {FILL}
      fence.proxy.async.shared::cta; bar.sync 0;
      @%p1 cp.async.bulk.tensor.{tensor.ndim}d.global.shared::cta.im2col_no_offs.bulk_group
        [%rd9, {braces(at)}], [%r3];
      cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    """
    run_ptx(body, [tensor, source], smem=1024 + source.nbytes, blocks=[raw])
    np.testing.assert_array_equal(tensor, expected)


@pytest.mark.parametrize(("stride", "padding"), [(1, 0), (1, 1), (2, 1), (3, 2)])
def test_columns_make_a_convolution(stride: int, padding: int) -> None:
    """One column for each place of a 3 x 3 filter; the boxes as for an implicit GEMM."""
    random = np.random.default_rng(2)
    x = aligned(random.integers(-3, 4, (2, 7, 8, 16)).astype(np.float32))
    w = random.integers(-3, 4, (3, 3, 16, 5)).astype(np.float64)
    rows, columns = ((n + 2 * padding - 3) // stride + 1 for n in (7, 8))
    box = {
        "channels": 16, "pixels": 2 * rows * columns, "steps": [stride] * 2,
        "lower": [-padding] * 2, "upper": [padding - 2] * 2,
    }  # fmt: skip
    image = Im2colMap.decode(encoded(x, "f32", box, 64))
    assert image.extents == (columns, rows)
    total = np.zeros((2 * rows * columns, 5))
    for r, s in product(range(3), range(3)):
        total += column(x, box, (0, -padding, -padding, 0), (s, r)) @ w[r, s]
    padded = np.pad(x, ((0, 0), (padding,) * 2, (padding,) * 2, (0, 0)))
    exact = np.zeros((2, rows, columns, 5))
    for i, j in product(range(rows), range(columns)):
        window = padded[:, i * stride : i * stride + 3, j * stride : j * stride + 3]
        exact[:, i, j] = np.einsum("nrsc,rsck->nk", window, w)
    np.testing.assert_array_equal(total.reshape(exact.shape), exact)


BOX = {"channels": 16, "pixels": 8, "steps": [1, 1], "lower": [0, 0], "upper": [0, 0]}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"pixels": 1025}, "pixels per column is 1025, allowed: 1 to 1024"),
        ({"lower": [0, -129]}, "lower corner"),
        ({"upper": [128, 0]}, "upper corner"),
        ({"upper": [-4, 0]}, "a box that has pixels"),
        ({"channels": 2}, "box inner bytes"),
    ],
)
def test_maps_that_make_no_sense(change: dict[str, Any], reason: str) -> None:
    x = aligned(np.zeros((1, 4, 4, 16), np.float32))
    with pytest.raises(TensorMapError, match=reason):
        encoded(x, "f32", BOX | change)
    with pytest.raises(LaunchError, match="rank 2, allowed are 3 to 5"):
        encode_im2col(0, 2, 0, (), (1, 1), ())


def test_maps_of_the_other_mode_are_refused() -> None:
    """In both directions; and maps of images in an encoding that is not the emulator's."""
    x = aligned(np.zeros((1, 4, 4, 16), np.float32))
    raw = encoded(x, "f32", BOX)
    assert Im2colMap.decode(raw).encode() == raw
    with pytest.raises(TensorMapError, match="mode is im2col, allowed: tiled"):
        TensorMap.decode(raw)
    tiled = Im2colMap.decode(raw).tensor.encode()
    with pytest.raises(TensorMapError, match="mode is tiled, allowed: im2col"):
        Im2colMap.decode(tiled)
    with pytest.raises(TensorMapError, match="another encoding is not known"):
        Im2colMap.decode(raw[:64] + bytes(64))


@pytest.mark.parametrize("at", [(0, 4, 0, 0), (0, 0, -1, 0)])
def test_a_column_begins_in_the_box(at: tuple[int, ...]) -> None:
    x = aligned(np.zeros((1, 4, 4, 16), np.float32))
    body = f"""{SETUP.replace("TOTAL", "16")} mov.b16 %h1, 0;
      @%p1 cp.async.bulk.prefetch.tensor.4d.L2.global.im2col [%rd9, {braces(at)}], {{%h1, %h1}};"""
    with pytest.raises(EmulationFailed, match="coordinate of a pixel is"):
        run_ptx(body, [x], smem=1024, blocks=[encoded(x, "f32", BOX)])
