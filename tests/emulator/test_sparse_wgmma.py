"""wgmma.mma_async.sp against the product in float64 of A with the zeros that it leaves out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.errors import UnsupportedInstruction
from fa4.emulator.tcgen05.descriptors import Swizzle
from fa4.emulator.tcgen05.formats import Format
from tests.emulator.kernels import kinds
from tests.emulator.tcgen05_support import packed_descriptor
from tests.emulator.test_sparse_warp_mma import draw_pairs, metadata_of, spread_out
from tests.emulator.wgmma_kernels import (
    DTYPES,
    ROWS,
    SMEM,
    Layouts,
    Product,
    Types,
    WgmmaKernel,
    descriptor_bits,
    fragments,
    multiply,
    place,
)

F32, F16 = Format.F32, Format.F16
TYPES = [
    Types(F32, Format.BF16, Format.BF16),
    Types(F32, F16, F16),
    Types(F16, F16, F16),
    Types(F32, Format.TF32, Format.TF32),
    Types(F32, Format.E4M3, Format.E5M2),
    Types(F16, Format.E5M2, Format.E5M2),
    Types(Format.S32, Format.U8, Format.S8),
]
WIDE = (Swizzle.NONE, Swizzle.B64, Swizzle.B128)  # K of B is 64 bytes


def name(types: Types) -> str:
    return f"{types.d}.{types.a}.{types.b}"


def sparse_product(
    types: Types, n: int, layouts: Layouts, selector: int, seed: int
) -> tuple[Product, np.ndarray, np.ndarray]:
    """(the operands as they lie, A with its zeros, the metadata of each thread (128,))."""
    random = np.random.default_rng(seed)
    depth = 2 * types.k
    lowest = {Format.U8: 0}
    stored = random.integers(lowest.get(types.a, -3), 4, (ROWS, types.k)).astype(np.float64)
    b = random.integers(lowest.get(types.b, -3), 4, (n, depth)).astype(np.float64)
    form = (depth, str(types.d), str(types.a), str(types.b))
    whole, metadata = [], []
    for warp in range(4):
        pairs = draw_pairs(random, form)
        metadata.append(metadata_of(form, pairs, selector, other=0xFFFFFFFF))
        whole.append(spread_out(form, stored[16 * warp : 16 * warp + 16], pairs))
    size = types.a.container_bytes
    a_swizzle, a_transposed = layouts.a or (Swizzle.NONE, False)
    places, start = [], SMEM
    for rows, k, swizzle, transposed in (
        (ROWS, types.k, a_swizzle, a_transposed),
        (n, depth, *layouts.b),
    ):
        places.append(packed_descriptor(start, swizzle, rows, k, size, not transposed))
        start += 1024 * (-(-rows * k * size * (swizzle.row_bytes // 16) // 1024) + 1)
    image = np.zeros(start - SMEM, np.uint8)
    place(image, places[0], stored.astype(DTYPES[types.a]), a_transposed)
    place(image, places[1], b.astype(DTYPES[types.b]), layouts.b[1])
    words = fragments(np.ascontiguousarray(stored.astype(DTYPES[types.a])))
    descriptors = map(descriptor_bits, places)
    problem = Product(types, stored, b, image, *descriptors, words, layouts)
    return problem, np.concatenate(whole), np.concatenate(metadata)


def run(problem: Product, metadata: np.ndarray, selector: int, **changes: Any) -> Any:
    """The kernel with the sparse instruction; the metadata is the fifth word of each thread."""
    types = problem.types
    work = multiply(problem).replace("mma_async.", "mma_async.sp.")
    work = work.replace(f"k{types.k}.", f"k{2 * types.k}.")
    work = work.replace("%rd21, %p5", f"%rd21, %r30, {selector}, %p5")
    before = (
        "mul.wide.u32 %rd50, %r1, 4; add.u64 %rd50, %rd3, %rd50; ld.global.b32 %r30, [%rd50+2048];"
    )
    words = np.concatenate([problem.a_words, metadata[None].astype(np.uint32)])
    kernel = WgmmaKernel(replace(problem, a_words=words), work=work, before=before)
    return kernel.run(**changes)


@st.composite
def cases(draw: Any, types: Types) -> tuple[int, Layouts, int, int]:
    transposes = st.booleans() if types.a.container_bytes == 2 else st.just(False)
    a = draw(st.none() | st.tuples(st.sampled_from((Swizzle.B32, *WIDE)), transposes))
    layouts = Layouts(a, draw(st.tuples(st.sampled_from(WIDE), transposes)))
    selector = draw(st.integers(0, 1)) if types.a.container_bytes > 1 else 0
    return (
        draw(st.sampled_from([8, 24, 64, 160])),
        layouts,
        selector,
        draw(st.integers(0, 99)),
    )


@pytest.mark.parametrize("types", TYPES, ids=name)
@settings(max_examples=6)
@given(data=st.data(), schedule=st.sampled_from(["fifo", "adversarial"]))
def test_it_is_the_product(types: Types, data: Any, schedule: str) -> None:
    """Any swizzle, transpose, source of A and selector; threads not selected may hold anything."""
    n, layouts, selector, seed = data.draw(cases(types))
    problem, whole, metadata = sparse_product(types, n, layouts, selector, seed)
    found, report = run(problem, metadata, selector, schedule=schedule)
    assert report.ok, str(report)
    np.testing.assert_array_equal(found, whole @ problem.b.T)


def test_metadata_that_is_undefined_is_a_finding() -> None:
    problem, _, metadata = sparse_product(TYPES[0], 8, Layouts(), 0, 1)
    metadata[5 * 4] = 0x44445444  # row 5 of warp 0: its columns 12 to 15 have twice the place 1
    _, report = run(problem, metadata, 0)
    assert kinds(report) == {"fault"}
    assert "metadata 0b0101 for row 5, columns from 12 on" in str(report)


@pytest.mark.parametrize("types", [TYPES[0], TYPES[-1]], ids=name)
def test_the_selector_is_one_of_the_quads_parts(types: Types) -> None:
    problem, _, metadata = sparse_product(types, 8, Layouts(), 0, 1)
    selector = 2 if types.a.container_bytes > 1 else 1
    with pytest.raises(UnsupportedInstruction, match=f"immediate below {selector}"):
        run(problem, metadata, selector)
