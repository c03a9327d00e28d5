"""mma.sync against a matrix product of whole matrices, placed by the manual's formulas.

The numbers are such that no sum is rounded; how sums are is test_wgmma_sums.py's matter.
"""

from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

from tests.emulator.kernels import run_ptx

TYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}


def fragments(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[list[int], ...]:
    """What every lane holds, element by element (PTX ISA 9.7.14.5.8, figures and formulas)."""
    depth = a.shape[1]
    of_a, of_b, of_c = [], [], []
    for lane in range(32):
        group, thread = lane // 4, lane % 4
        for i in range(depth // 2):
            row = group if i % 4 < 2 else group + 8
            of_a.append(a[row, thread * 2 + i % 2 + (8 if i >= 4 else 0)])
        for i in range(depth // 4):
            of_b += [b[thread * 2 + i % 2 + (8 if i >= 2 else 0), group]]
        of_c += [c[group + (8 if i >= 2 else 0), thread * 2 + i % 2] for i in range(4)]
    return of_a, of_b, of_c


@pytest.mark.parametrize(
    ("depth", "element", "sums"),
    [(16, "bf16", "f32"), (16, "f16", "f32"), (16, "f16", "f16"), (8, "bf16", "f32"),
     (8, "f16", "f16")],
)  # fmt: skip
def test_mma(depth: int, element: str, sums: str) -> None:
    random = np.random.default_rng(depth)
    kind = TYPES[element]
    total = np.float32 if sums == "f32" else np.float16
    a, b = ((random.integers(-8, 9, n) / 4).astype(kind) for n in ((16, depth), (depth, 8)))
    c = (random.integers(-8, 9, (16, 8)) / 4).astype(total)
    of_a, of_b, of_c = fragments(a, b, c)
    words = [np.array(v, t).view(np.uint32).reshape(32, -1)
             for v, t in ((of_a, kind), (of_b, kind), (of_c, total))]  # fmt: skip
    packed = np.concatenate(words, axis=1)
    count = packed.shape[1]
    starts = np.cumsum([0] + [w.shape[1] for w in words])
    names = [[f"%r{10 + k}" for k in range(s, e)] for s, e in pairwise(starts)]
    loads = "".join(f"ld.global.b32 %r{10 + k}, [%rd3+{4 * k}];" for k in range(count))
    results = [f"%r{60 + k}" for k in range(len(names[2]))]
    stores = "".join(f"st.global.b32 [%rd5+{4 * k}], {r};" for k, r in enumerate(results))
    vectors = ", ".join("{" + ", ".join(group) + "}" for group in (results, *names))
    out = np.zeros((32, len(results)), np.uint32)
    run_ptx(
        f"""
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd4, %r1, {4 * count};
  add.s64 %rd3, %rd1, %rd4;
  mul.wide.u32 %rd4, %r1, {4 * len(results)};
  add.s64 %rd5, %rd2, %rd4;
  {loads}
  mma.sync.aligned.m16n8k{depth}.row.col.{sums}.{element}.{element}.{sums} {vectors};
  {stores}
""",
        [packed, out],
    )
    exact = a.astype(np.float64) @ b.astype(np.float64) + c
    expected = fragments(np.zeros((16, depth)), np.zeros((depth, 8)), exact.astype(total))[2]
    assert out.view(total).reshape(-1).tolist() == [float(v) for v in expected]


def test_a_transposed_operand_is_another_instruction() -> None:
    from fa4.emulator.errors import UnsupportedInstruction

    with pytest.raises(UnsupportedInstruction, match="line"):
        run_ptx("mma.sync.aligned.m16n8k16.col.row.f32.f16.f16.f32 {%r1,%r2,%r3,%r4}, "
                "{%r1,%r2,%r3,%r4}, {%r5,%r6}, {%r1,%r2,%r3,%r4};")  # fmt: skip
