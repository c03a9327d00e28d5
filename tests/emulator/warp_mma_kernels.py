"""mma.sync and mma.sp in a kernel of one warp: matrices to registers of lanes, and back."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np

from tests.emulator.kernels import run_ptx

TYPES: dict[str, Any] = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "s8": np.int8,
    "u8": np.uint8,
    "s32": np.int32,
}


def fragments(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, of_32_bits: bool = False
) -> tuple[list[Any], ...]:
    """What every lane holds, element by element: the formulas that PTX ISA 9.7.14.5 has for each
    shape, by how many elements a register holds; of sparse A (9.7.14.6) those that are there."""
    depth, size = a.shape[1], 4 if of_32_bits else a.dtype.itemsize
    of_a: list[Any] = []
    of_b: list[Any] = []
    of_c: list[Any] = []
    for lane in range(32):
        group, thread = lane >> 2, lane % 4
        for i in range(depth // 2):
            if size == 4:  # m16n8k4, m16n8k8: a0..a3
                row, k = group + 8 * (i % 2), thread + 4 * (i >= 2)
            elif size == 2:  # m16n8k8, m16n8k16: a0..a7
                row = group + 8 * (i in (2, 3, 6, 7))
                k = thread * 2 + (i & 1) + 8 * (i >= 4)
            else:  # m16n8k16, m16n8k32: a0..a15
                row = group if i < 4 or 8 <= i < 12 else group + 8
                k = thread * 4 + (i & 3) + (16 if i >= 8 else 0)
            of_a.append(a[row, k])
        for i in range(b.shape[0] // 4):
            if size == 4:
                k = thread + 4 * i
            elif size == 2:
                k = thread * 2 + (i & 1) + 8 * (i // 2)
            else:
                k = thread * 4 + (i & 3) + 16 * (i // 4)
            of_b.append(b[k, group])
        of_c += [c[group + (8 if i >= 2 else 0), thread * 2 + (i & 1)] for i in range(4)]
    return of_a, of_b, of_c


def multiply(
    opcode: str,
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    metadata: np.ndarray | None = None,
    selector: int | str = 0,
) -> np.ndarray:
    """The (32, 4) results of each lane that an instruction gives in the emulator.

    metadata: of mma.sp, a word of each lane.
    """
    words = [
        np.array(v, x.dtype).view(np.uint32).reshape(32, -1)
        for v, x in zip(fragments(a, b, c), (a, b, c), strict=True)
    ]
    if metadata is not None:
        words.append(metadata.reshape(32, 1))
    packed = np.concatenate(words, axis=1)
    count = packed.shape[1]
    starts = np.cumsum([0] + [w.shape[1] for w in words])
    names = [[f"%r{10 + k}" for k in range(s, e)] for s, e in pairwise(starts)]
    loads = "".join(f"ld.global.b32 %r{10 + k}, [%rd3+{4 * k}];" for k in range(count))
    results = [f"%r{60 + k}" for k in range(len(names[2]))]
    stores = "".join(f"st.global.b32 [%rd5+{4 * k}], {r};" for k, r in enumerate(results))
    vectors = ", ".join("{" + ", ".join(group) + "}" for group in (results, *names[:3]))
    if metadata is not None:
        vectors += f", {names[3][0]}, {selector}"
    out = np.zeros((32, len(results)), np.uint32)
    run_ptx(
        f"""
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd4, %r1, {4 * count};
  add.s64 %rd3, %rd1, %rd4;
  mul.wide.u32 %rd4, %r1, {4 * len(results)};
  add.s64 %rd5, %rd2, %rd4;
  {loads}
  {opcode} {vectors};
  {stores}
""",
        [packed, out],
    )
    return out.view(c.dtype).reshape(32, 4)


def draw(random: np.random.Generator, name: str, shape: tuple[int, int]) -> np.ndarray:
    """Quarters up to 2 (eighths would not fit 13 bits of sums), integers of the whole range."""
    kind = TYPES[name]
    if name in ("s8", "u8"):
        return random.integers(np.iinfo(kind).min, np.iinfo(kind).max + 1, shape).astype(kind)
    if name == "s32":
        return random.integers(-(2**30), 2**30, shape).astype(kind)
    return (random.integers(-8, 9, shape) / 4).astype(kind)
