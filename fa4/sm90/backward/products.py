"""wgmma: the five products of a warpgroup's 64 keys with a query tile.

Sums are lists of Float32 as in `fa4.sm90.forward.products`: nothing may touch them before
`wait_products` has returned them. A thread's elements of S^T, dP^T, dK and dV are of its two keys,
those of dQ of its two queries.
"""

from dataclasses import dataclass, replace

import cutlass
from cutlass import Float32, Int32

from fa4.kit.descriptors import OperandTiles, descriptors
from fa4.kit.ptx_block import PtxBlock
from fa4.sm90.forward.products import multiply


@dataclass(frozen=True)
class GradientProducts:
    """Where a warpgroup's operands lie.

    k, v: its own keys, of K in the first slot. q, do: summed over their columns; q_rows, do_rows:
    over their rows. ds: of all keys and its queries of dQ; k_rows: all keys, its columns of dQ.
    dtype: of all of them. cols: columns of dK and dV. tile_m: queries of a tile; dq_cols: columns
    of its accumulator of dQ.
    """

    k: OperandTiles
    v: OperandTiles
    q: OperandTiles
    do: OperandTiles
    q_rows: OperandTiles
    do_rows: OperandTiles
    ds: OperandTiles
    k_rows: OperandTiles
    dtype: cutlass.Constexpr
    cols: cutlass.Constexpr
    tile_m: cutlass.Constexpr
    dq_cols: cutlass.Constexpr

    def at(self, slot: Int32) -> "GradientProducts":
        """The same with K in a slot."""
        k, k_rows = (replace(x, low=x.stage(slot)) for x in (self.k, self.k_rows))
        return replace(self, k=k, k_rows=k_rows)

    def scores(self, stage: Int32 | int) -> list[Float32]:
        """Start S^T = K Q^T with the queries of a stage, as a group of its own."""
        return self._new(self.k, self.q, stage)

    def upstream(self, stage: Int32 | int) -> list[Float32]:
        """Start dP^T = V dO^T, likewise."""
        return self._new(self.v, self.do, stage)

    def values(self, sums: list[Float32], p: list[Int32], stage: Int32 | int) -> list[Float32]:
        """Start dV += P^T dO with P's words, likewise; no sums: of nothing yet."""
        return self._add(sums, p, self.do_rows, stage, self.cols[1])

    def keys(self, sums: list[Float32], ds: list[Int32], stage: Int32 | int) -> list[Float32]:
        """Start dK += dS^T Q with dS's words, likewise."""
        return self._add(sums, ds, self.q_rows, stage, self.cols[0])

    def queries(self, stage: Int32 | int) -> list[Float32]:
        """Start dQ = dS K with dS of a stage, likewise."""
        code = PtxBlock()
        ds = descriptors(code, self.ds.stage(stage), self.ds.high, self.ds.steps)
        keys = descriptors(code, self.k_rows.low, self.k_rows.high, self.k_rows.steps)
        sums = [code.register("f32") for _ in range(self.dq_cols // 2)]
        multiply(code, sums, ds, keys, self.dtype, added=False, transposed=True)
        return code.trace(*sums, effects=True)

    def _new(self, keys: OperandTiles, rows: OperandTiles, stage: Int32 | int) -> list[Float32]:
        code = PtxBlock()
        a = descriptors(code, keys.low, keys.high, keys.steps)
        b = descriptors(code, rows.stage(stage), rows.high, rows.steps)
        sums = [code.register("f32") for _ in range(self.tile_m // 2)]
        multiply(code, sums, a, b, self.dtype, added=False, transposed=False)
        return code.trace(*sums, effects=True)

    def _add(
        self, sums: list[Float32], words: list[Int32], rows: OperandTiles, stage: Int32 | int,
        cols: int,
    ) -> list[Float32]:  # fmt: skip
        code = PtxBlock()
        held = code.read_all(words)
        into = code.update_all(sums) if sums else [code.register("f32") for _ in range(cols // 2)]
        a = ["{" + ", ".join(held[i : i + 4]) + "}" for i in range(0, len(held), 4)]
        b = descriptors(code, rows.stage(stage), rows.high, rows.steps)
        multiply(code, into, a, b, self.dtype, added=bool(sums), transposed=True)
        return code.trace(*into, effects=True)


def joined(first: OperandTiles, second: OperandTiles, distance: int) -> OperandTiles:
    """An operand summed over the rows of two tiles, the second `distance` units behind."""
    return replace(first, steps=(*first.steps, *(distance + step for step in second.steps)))
