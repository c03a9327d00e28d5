"""What the tensor core is told: operands and products as descriptors, and the products' issue."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import tcgen05

from fa4.kit.ptx_block import PtxBlock
from fa4.kit.rings import stage_offset
from fa4.kit.units import MMA_DEPTH

ELEMENTS = {
    "bf16": cutlass.BFloat16,
    "fp16": cutlass.Float16,
    "e4m3": cutlass.Float8E4M3FN,
    "e5m2": cutlass.Float8E5M2,
}
CTA_GROUPS = {1: tcgen05.CtaGroup.ONE, 2: tcgen05.CtaGroup.TWO}
DESCRIPTOR_UNIT_BYTES = 16  # of addresses and offsets in a shared-memory descriptor


@dataclass(frozen=True)
class OperandTiles:
    """Shared-memory descriptors of an operand's tiles (PTX ISA 9.7.16.4.1), in 16-byte units.

    low, high: words of the first stage's. steps: offsets of the steps of 16 along K. pitch, shift:
    from one stage to the next, and what stage 1 lies off.
    """

    low: Int32
    high: Int32 | int
    steps: cutlass.Constexpr
    pitch: cutlass.Constexpr
    shift: cutlass.Constexpr

    def stage(self, number: Int32 | int) -> Int32:
        """The low word of a stage's first step."""
        return self.low + stage_offset(number, self.pitch, self.shift)


def computed_anew(tiles: OperandTiles) -> OperandTiles:
    """The same tiles by a word that the compiler takes for another one.

    Between the two Q tiles' PV lies a QK: holding V's words over it takes 16 uniform registers that
    do not exist. Spilling them costs more than adding the steps again.
    """
    return replace(tiles, low=cute.arch.make_warp_uniform(tiles.low))


def operand_tiles(
    fragment: cute.Tensor, pitch: int, shift: int, element_bytes: int
) -> OperandTiles:
    """The descriptors of an operand's tiles; pitch and shift in elements."""
    steps = cute.size(fragment, mode=[2])
    offsets = tuple(cute.crd2idx((0, 0, step), fragment.layout) for step in range(steps))
    word = tcgen05.smem_descriptor_to_int(fragment.iterator)
    pitch, shift = (n * element_bytes // DESCRIPTOR_UNIT_BYTES for n in (pitch, shift))
    return OperandTiles(word.to(Int32), (word >> 32).to(Int32), offsets, pitch, shift)


def swizzle_bytes(dim: int, element_bytes: int = 2) -> int:
    """Bytes of a row that lie together in shared memory, of tiles with `dim` columns."""
    return next(width for width in (128, 64, 32) if element_bytes * dim % width == 0)


def swizzled_tiles(
    start: cute.Pointer, rows: int, dim: int, *, along_rows: bool, stage_bytes: int = 0
) -> OperandTiles:
    """The descriptors of `rows` x `dim` 16-bit elements as TMA stores them, for either product.

    Runs of `swizzle_bytes` of all rows lie one behind the other. Summed over the columns they are a
    K-major operand; over the rows (along_rows) an MN-major one, of the same bytes (PTX ISA
    9.7.16.10.6: strides between runs and between groups of 8 rows).
    """
    width = swizzle_bytes(dim)
    run = rows * width
    if along_rows:
        offsets = [row * width for row in range(0, rows, MMA_DEPTH)]
    else:
        bits = range(0, 2 * dim, 2 * MMA_DEPTH)
        offsets = [byte // width * run + byte % width for byte in bits]
    mode = {128: 2, 64: 4, 32: 6}[width]
    unit = DESCRIPTOR_UNIT_BYTES
    high = 8 * width // unit | 1 << 14 | mode << 29
    return OperandTiles(
        low=Int32(start.toint()) // unit | run // unit << 16,
        high=high,
        steps=tuple(offset // unit for offset in offsets),
        pitch=stage_bytes // unit,
        shift=0,
    )


def instruction_descriptor(
    dtype: str, m: int, n: int, *, transpose_b: bool, transpose_a: bool = False
) -> int:
    """kind::f16 with float32 sums (PTX ISA 9.7.16.4.2); transposed operands are MN-major."""
    kind = {"fp16": 0, "bf16": 1}[dtype]
    types = 1 << 4 | kind << 7 | kind << 10
    return types | transpose_a << 15 | transpose_b << 16 | n // 8 << 17 | m // 16 << 24


def descriptors(code: PtxBlock, low: Int32, high: Int32 | int, steps: Sequence[int]) -> list[str]:
    """Shared-memory descriptors of the steps of an operand's tile."""
    first = code.read(low)
    upper = constant_or_read(code, high)
    words = [plus(code, first, step) for step in steps]
    return [code.do("mov.b64", f"{{{word}, {upper}}}", kind="b64") for word in words]


def constant_or_read(code: PtxBlock, value: Int32 | int) -> str:
    """A word; one that is known while compiling goes straight to a uniform register."""
    if isinstance(value, int):
        return code.do("mov.b32", str(value), kind="b32")
    return code.read(value)


def plus(code: PtxBlock, word: str, offset: int) -> str:
    """A word with an offset added, if there is one."""
    return code.do("add.s32", word, str(offset), kind="b32") if offset else word


def multiply(
    code: PtxBlock, target: Int32 | int, a: list[str], b: list[str], idesc: int, sums: list[str],
    cta_group: int,
) -> None:  # fmt: skip
    """tcgen05.mma for each step (PTX ISA 9.7.16.10.9.1), by an elected thread.

    a: addresses in tensor memory in brackets, or descriptors as b. sums: what says, other than 0,
    that the step's product is added to `target`.
    """
    elected, kind = code.register("pred"), code.do("mov.b32", str(idesc), kind="b32")
    code.effect(f"elect.sync _|{elected}, -1;")
    into = constant_or_read(code, target)
    for left, right, add in zip(a, b, sums, strict=True):
        added = code.do("setp.ne.b32", add, "0", kind="pred")
        code.effect(
            f"@{elected} tcgen05.mma.cta_group::{cta_group}.kind::f16 "
            f"[{into}], {left}, {right}, {kind}, {added};"
        )
    code.trace(effects=True)
