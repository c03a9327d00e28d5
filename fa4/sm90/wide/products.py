"""wgmma: the two kinds of products of the wide kernels, of 64 rows of a warpgroup.

Sums are lists of Float32 as in `fa4.sm90.forward.products`: nothing may touch them before
`wait_products` has returned them.
"""

from dataclasses import dataclass
from itertools import chain

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4.kit.descriptors import OperandTiles, descriptors
from fa4.kit.ptx_block import PtxBlock
from fa4.kit.units import WARPGROUP
from fa4.sm90.forward import fragment
from fa4.sm90.forward.products import multiply, step_descriptors
from fa4.sm90.wide.spec import WideBackwardSpec

# Steps. Measured on an H200: with those of 12 computed before, by threads in dQ's kernel, either
# kernel takes up to 2% less time than with each before its product; with those of 14, 4 to 8% more.
MOST_AHEAD = 12


def product_depths(spec: WideBackwardSpec) -> dict[str, int]:
    """Columns of each operand over which products sum."""
    cols, cols_v = spec.pipeline.depths
    return {"q": cols, "k": cols, "do": cols_v, "v": cols_v}


@dataclass(frozen=True)
class RowProducts:
    """Products of a warpgroup's rows, which stay, with tiles that pass: S or dP, or transposed.

    own, passing: both summed over their columns; passing is a ring of tiles of `width` rows. dtype:
    of both. start_own, row_bytes: where own is in shared memory; held: how many of its words a
    thread keeps in registers, of the first columns.
    """

    own: OperandTiles
    passing: OperandTiles
    dtype: cutlass.Constexpr
    width: cutlass.Constexpr
    start_own: Int32 | int = 0
    row_bytes: cutlass.Constexpr = 0
    held: cutlass.Constexpr = 0

    def hold(self) -> list[Int32]:
        """The words of own that a thread keeps in registers, once it is there."""
        if not self.held:
            return []
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        return fragment.load_matrices(self.held, self.start_own, thread, self.row_bytes)

    def start(self, stage: Int32 | int, words: list[Int32] | None = None) -> list[Float32]:
        """Start own x passing^T with the tile of a stage, as a group of its own. words: `hold`."""
        code = PtxBlock()
        held = code.read_all(words or [])
        there = ["{" + ", ".join(held[i : i + 4]) + "}" for i in range(0, len(held), 4)]
        own, passing = self.own, self.passing
        a = step_descriptors(code, own.low, own.high, own.steps[len(there) :], MOST_AHEAD)
        b = step_descriptors(code, passing.stage(stage), passing.high, passing.steps, MOST_AHEAD)
        sums = [code.register("f32") for _ in range(self.width // 2)]
        multiply(code, sums, chain(there, a), b, self.dtype, added=False, transposed=False)
        return code.trace(*sums, effects=True)


def start_sum(
    sums: list[Float32], words: list[Int32], rows: OperandTiles, stage: Int32 | int, dtype: str
) -> list[Float32]:
    """Start sums += A B, as a group of its own: A's words, B of a stage, summed over its rows."""
    code = PtxBlock()
    into, held = code.update_all(sums), code.read_all(words)
    a = ["{" + ", ".join(held[i : i + 4]) + "}" for i in range(0, len(held), 4)]
    b = descriptors(code, rows.stage(stage), rows.high, rows.steps)
    multiply(code, into, a, b, dtype, added=True, transposed=True)
    return code.trace(*into, effects=True)
