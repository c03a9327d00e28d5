"""Random operands of tcgen05.mma: images of shared memory, descriptors, and the product by formula.

Values are small integers (or halves), so that every order of summation gives the same float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from fa4.emulator.tcgen05.descriptors import InstructionDescriptor, SmemDescriptor, Swizzle
from fa4.emulator.tcgen05.formats import Format
from tests.emulator.tcgen05_support import element_address, instruction_bits, packed_descriptor
from tests.emulator.tensor_kernels import DATA

K = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32}
DTYPES = {
    Format.F16: np.float16,
    Format.BF16: ml_dtypes.bfloat16,
    Format.TF32: np.float32,
    Format.E4M3: ml_dtypes.float8_e4m3fn,
    Format.E5M2: ml_dtypes.float8_e5m2,
    Format.S8: np.int8,
    Format.U8: np.uint8,
}


@dataclass
class Operands:
    """A problem D = A B for one instruction; A (m, k), B (n, k).

    image: bytes of shared memory from DATA on, of each CTA of the group; each CTA holds its part
    of A's rows and of B's. a_desc, b_desc, idesc: the descriptors.
    """

    a: np.ndarray
    b: np.ndarray
    image: np.ndarray
    a_desc: int
    b_desc: int
    idesc: int

    @property
    def product(self) -> np.ndarray:
        """A B, float64 (m, n)."""
        return self.a @ self.b.T


def operands(
    kind: str,
    element: Format,
    m: int,
    n: int,
    group: int = 1,
    swizzle: Swizzle = Swizzle.B32,
    seed: int = 0,
    result: Format | None = None,
) -> Operands:
    """A random problem, both operands K-major."""
    rng = np.random.default_rng(seed)
    low = 0 if element is Format.U8 else -3
    a = rng.integers(low, 4, (m, K[kind])).astype(np.float64)
    b = rng.integers(low, 4, (n, K[kind])).astype(np.float64)
    size = element.container_bytes
    a_desc = packed_descriptor(DATA, swizzle, m // group, K[kind], size, True)
    row_bytes = max(swizzle.row_bytes, K[kind] * size)
    a_bytes = _whole_pages(m // group * row_bytes)
    b_desc = packed_descriptor(DATA + a_bytes, swizzle, n // group, K[kind], size, True)
    b_bytes = _whole_pages(n // group * row_bytes)
    image = np.zeros((group, a_bytes + b_bytes), np.uint8)
    for rank in range(group):
        for values, desc in ((a, a_desc), (b, b_desc)):
            rows = np.split(values, group)[rank]
            place(image[rank], desc, rows.astype(DTYPES[element]))
    if result is None:
        result = Format.S32 if kind == "i8" else Format.F32
    instruction = InstructionDescriptor(kind, m, n, element, element, result)
    return Operands(a, b, image, a_desc.encode(), b_desc.encode(), instruction_bits(instruction))


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // 1024) * 1024


def place(image: np.ndarray, desc: SmemDescriptor, values: np.ndarray) -> None:
    """Writes K-major elements where the descriptor says, into bytes that start at DATA."""
    size = values.dtype.itemsize
    raw = np.ascontiguousarray(values).view(np.uint8).reshape(*values.shape, size)
    for row in range(values.shape[0]):
        for k in range(values.shape[1]):
            start = element_address(desc, row, k, size, True) - DATA
            image[start : start + size] = raw[row, k]


def move(register: str, value: int) -> str:
    """mov of a 64-bit immediate."""
    return f"  mov.b64 {register}, {value & (1 << 64) - 1:#x};\n"


def mma(
    problem: Operands, kind: str, d: str = "%r21", a: str = "%rd20", accumulate: str = "0",
    group: int = 1, form: str = "mma", rest: str = "",
) -> str:  # fmt: skip
    """The instruction and the moves of its operands."""
    return (
        move("%rd20", problem.a_desc)
        + move("%rd21", problem.b_desc)
        + f"  mov.b32 %r25, {problem.idesc:#x};\n"
        + f"  setp.ne.u32 %p5, {accumulate}, 0;\n"
        + f"  tcgen05.{form}.cta_group::{group}.kind::{kind} [{d}], {a}, %rd21, %r25, "
        + f"%p5{rest};\n"
    )


def commit(offset: int = 0, group: int = 1) -> str:
    """Arrives at the mbarrier at smem + offset."""
    return (
        f"  tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster.b64 "
        f"[%r20+{offset}];\n"
    )
