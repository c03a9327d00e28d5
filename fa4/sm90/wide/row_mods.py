"""What changes the scores of a thread's two queries, and how a gradient passes back through that.

The callables are those of `fa4.sm100.backward.mods`. A part of S is a run of its elements, in the
accumulator's order; its columns are keys.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4.kit.tiles import WorkTile
from fa4.kit.units import WARPGROUP
from fa4.sm90.forward import fragment
from fa4.sm100.forward.mods import Mods, RowMods


@dataclass(frozen=True)
class RowScoreMods:
    """What a thread's scores are changed by. first_column: the thread's. last_key: that exists."""

    mods: Mods
    rows: tuple[RowMods, ...]
    first_column: Int32
    last_key: Int32

    def modified(self, raw: list[Float32], first_key: Int32) -> list[Float32]:
        """Scores modified and masked by mask_mod; raw: those from `first_key` on."""
        spec = self.mods.spec
        if spec.softcap:
            raw = fragment.tanh(raw, self.mods.score_scale)
        if spec.score_mod is None and spec.mask_mod is None:
            return raw
        return [
            self.rows[fragment.row_of(i)].modify(score, key)
            for i, (score, key) in enumerate(zip(raw, self._keys(raw, first_key), strict=True))
        ]

    def passed_back(
        self, gradients: list[Float32], raw: list[Float32], first_key: Int32
    ) -> list[Float32]:
        """Gradients of the modified scores as those of the scores times softmax_scale."""
        spec, scale = self.mods.spec, self.mods.score_scale
        if spec.softcap:
            return fragment.one_minus_squares(fragment.tanh(raw, scale), gradients)
        found = []
        for i, key in enumerate(self._keys(raw, first_key)):
            row = self.rows[fragment.row_of(i)]
            where = row.batch, row.head, row.position, key, row.seqlens, self.mods.aux
            found.append(Float32(spec.score_mod_bwd(gradients[i], raw[i] * scale, *where)))
        return found

    def _keys(self, raw: list[Float32], first_key: Int32) -> list[Int32]:
        """Each element's; beyond the sequence, its last one."""
        first = first_key + self.first_column
        return [cutlass.min(first + fragment.column_of(i), self.last_key) for i in range(len(raw))]


def row_score_mods(mods: Mods, tile: WorkTile, number: Int32) -> RowScoreMods:
    """The mods of a thread's rows; number: of its warpgroup."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    first_row = tile.tile_row(number) + fragment.thread_row(thread)
    rows = (mods.of_row(tile, first_row + i * fragment.ROW_STEP) for i in range(2))
    last = cutlass.max(tile.seqlen_k - 1, 0)
    return RowScoreMods(mods, tuple(rows), 2 * (thread % fragment.QUAD), last)
