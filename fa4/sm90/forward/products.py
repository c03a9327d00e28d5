"""wgmma: S = Q K^T and O += P V of a warpgroup's 64 rows, with sums and P in registers.

Products run asynchronously. Their sums are Python lists of Float32 that nothing may touch before
`wait_products` has returned them; within a list, a thread's elements lie as `fragment` says.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32

from fa4.config import DTYPE_BITS, PRODUCT_DEPTH_BYTES, WARPGROUP_ROWS
from fa4.kit.descriptors import (
    DESCRIPTOR_UNIT_BYTES,
    OperandTiles,
    constant_or_read,
    descriptors,
    plus,
    swizzle_bytes,
)
from fa4.kit.ptx_block import PtxBlock
from fa4.kit.units import MMA_DEPTH

GROUP = 8  # keys or rows of a core matrix
SWIZZLES = {128: 1, 64: 2, 32: 3}  # of a descriptor, by the bytes of a row that lie together
MOST_AHEAD = 10  # steps; of 11, beside other products', ptxas takes registers of threads
TYPES = {"bf16": "bf16", "fp16": "f16", "e4m3": "e4m3", "e5m2": "e5m2"}


@dataclass(frozen=True)
class WarpgroupProducts:
    """Where a warpgroup's operands lie. q, p: its own rows. q, k, v: of the ring's first stage.

    p: None where P comes from registers. v: of 8-bit elements, transposed: all are K-major then.

    dtype: of all three. values: padded columns of V.
    """

    q: OperandTiles
    k: OperandTiles
    v: OperandTiles
    p: OperandTiles | None
    dtype: cutlass.Constexpr
    tile_n: cutlass.Constexpr
    values: cutlass.Constexpr

    def scores(self, queries: Int32 | int, keys: Int32 | int) -> list[Float32]:
        """Start S = Q K^T with the queries and keys of a stage, as a group of its own."""
        code = PtxBlock()
        a = step_descriptors(code, self.q.stage(queries), self.q.high, self.q.steps)
        b = step_descriptors(code, self.k.stage(keys), self.k.high, self.k.steps)
        sums = [code.register("f32") for _ in range(self.tile_n // 2)]
        multiply(code, sums, a, b, self.dtype, added=False, transposed=False)
        return code.trace(*sums, effects=True)

    def weighted(
        self, sums: list[Float32], words: list[Int32], stage: Int32 | int
    ) -> list[Float32]:
        """Start O += P V as a group of its own; P's words, or none where it is in shared memory."""
        code = PtxBlock()
        into, p = code.update_all(sums), code.read_all(words)
        if self.p is None:
            a = ["{" + ", ".join(p[i : i + 4]) + "}" for i in range(0, len(p), 4)]
        else:
            a = descriptors(code, self.p.low, self.p.high, self.p.steps)
        b = descriptors(code, self.v.stage(stage), self.v.high, self.v.steps)
        multiply(code, into, a, b, self.dtype, added=True, transposed=DTYPE_BITS[self.dtype] == 16)
        return code.trace(*into, effects=True)


def step_descriptors(
    code: PtxBlock, low: Int32, high: Int32 | int, steps: Sequence[int], ahead: int = MOST_AHEAD
) -> Iterable[str]:
    """Those of an operand's steps; of more than `ahead`, each before the product that takes it.

    Else the words of all steps of both operands are live at once: more than there are uniform
    registers, for which ptxas computes them by threads and moves each, 4 instructions a product.
    """
    if len(steps) <= ahead:
        return descriptors(code, low, high, steps)
    first, upper = code.read(low), constant_or_read(code, high)
    words = (plus(code, first, step) for step in steps)
    return (code.do("mov.b64", f"{{{word}, {upper}}}", kind="b64") for word in words)


def multiply(
    code: PtxBlock, sums: list[str], a: Iterable[str], b: Iterable[str], dtype: str, *,
    added: bool, transposed: bool,
) -> None:  # fmt: skip
    """wgmma.mma_async for each step along K (PTX ISA 9.7.15.5.2), and their group.

    added: to what the sums are; else the first step overwrites them. transposed: B is MN-major;
    8-bit types have no such form.
    """
    columns, kind, bits = 2 * len(sums), TYPES[dtype], DTYPE_BITS[dtype]
    onto = [code.do("setp.ne.b32", flag, "0", kind="pred") for flag in (str(int(added)), "1")]
    code.effect("wgmma.fence.sync.aligned;")
    shape = f"m{WARPGROUP_ROWS}n{columns}k{8 * PRODUCT_DEPTH_BYTES // bits}.f32.{kind}.{kind}"
    for step, (left, right) in enumerate(zip(a, b, strict=True)):
        majors = f", {int(transposed)}"
        if not left.startswith("{"):
            majors = f", 0{majors}"
        if bits == 8:
            majors = ""
        code.effect(
            f"wgmma.mma_async.sync.aligned.{shape} {{{', '.join(sums)}}}, "
            f"{left}, {right}, {onto[min(step, 1)]}, 1, 1{majors};"
        )
    code.effect("wgmma.commit_group.sync.aligned;")


def wait_products(pending: int, sums: list[Float32]) -> list[Float32]:
    """The sums of a group, when all but the last `pending` groups are finished."""
    code = PtxBlock()
    values = code.update_all(sums)
    code.effect(f"wgmma.wait_group.sync.aligned {pending};")
    return code.trace(*values, effects=True)


def operand_tiles(
    start: Int32, rows: int, dim: int, *, along_rows: bool, stage_bytes: int,
    element_bytes: int = 2, depth: int | None = None, run_bytes: int = 0,
) -> OperandTiles:  # fmt: skip
    """Descriptors (PTX ISA 9.7.15.5.1.2.2) of `rows` x `dim` elements as TMA stores them.

    start: address in shared memory. Runs of run_bytes, 0 for `swizzle_bytes`, of all rows lie one
    behind the other.
    Summed over the columns, or the first `depth` of them, they are a K-major operand; over the rows
    (along_rows) an MN-major one, of which a product takes as many columns as it has:
    the leading stride leads to the next run, the other to the next eight rows.
    """
    width = run_bytes or swizzle_bytes(dim, element_bytes)
    run = rows * width
    if along_rows:
        offsets = [row * width for row in range(0, rows, MMA_DEPTH)]
    else:
        steps = range(0, element_bytes * (depth or dim), PRODUCT_DEPTH_BYTES)
        offsets = [byte // width * run + byte % width for byte in steps]
    unit = DESCRIPTOR_UNIT_BYTES
    leading = run // unit if along_rows else 1
    return OperandTiles(
        low=start // unit | leading << 16,
        high=GROUP * width // unit | SWIZZLES[width] << 30,
        steps=tuple(offset // unit for offset in offsets),
        pitch=stage_bytes // unit,
        shift=0,
    )
