"""What changes the scores of a key's row of S^T, and how a gradient passes back through that.

The callables are those of the forward kernel (`fa4.sm100.forward.mods`), and

    score_mod_bwd(grad, score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors) -> grad

with the score before score_mod, multiplied by softmax_scale.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Float32, Int32

from fa4.kit.rowmath import one_minus_squares, tanh
from fa4.kit.scores import TracedSeqlens
from fa4.sm100.backward.tiles import KeyTile


@dataclass(frozen=True)
class KeyMods:
    """What the callables are told of a key, of which a thread has the scores of some queries.

    scale: factor of the raw scores, None where they stay raw. head: of the queries. columns: where
    the queries of the scores are, counted from the first; None: side by side.
    """

    spec: cutlass.Constexpr
    scale: Float32 | None
    aux: tuple | None
    batch: Int32
    head: Int32
    key: Int32
    seqlens: TracedSeqlens
    columns: cutlass.Constexpr = None

    def next_head(self) -> "KeyMods":
        """The same for the next head of the group."""
        return replace(self, head=self.head + 1)

    def modified(self, raw: list[Float32], first_row: Int32) -> list[Float32]:
        """The scores of the queries from `first_row` on, modified and masked by mask_mod.

        With softcap they are tanh(s / softcap): the factor softcap is part of the exponents' scale.
        """
        if self.spec.softcap:
            return self._masked(self.tanh(raw), first_row)
        if self.spec.score_mod is None:
            return self._masked(raw, first_row)
        scores = [
            Float32(self.spec.score_mod(score * self.scale, *self._where(first_row + column)))
            for column, score in zip(self._columns(raw), raw, strict=True)
        ]
        return self._masked(scores, first_row)

    def tanh(self, raw: list[Float32]) -> list[Float32]:
        """tanh of scores as softcap scales them."""
        return tanh(raw, self.scale)

    def one_minus_squares(self, values: list[Float32], factors: list[Float32]) -> list[Float32]:
        """factor * (1 - x^2)."""
        return one_minus_squares(values, factors)

    def _columns(self, scores: list[Float32]) -> Sequence[int]:
        return range(len(scores)) if self.columns is None else self.columns

    def _masked(self, scores: list[Float32], first_row: Int32) -> list[Float32]:
        if self.spec.mask_mod is None:
            return scores
        keeps = [
            cutlass.Boolean(self.spec.mask_mod(*self._where(first_row + column)))
            for column in self._columns(scores)
        ]
        return [
            cutlass.select_(keep, score, -Float32.inf)
            for keep, score in zip(keeps, scores, strict=True)
        ]

    def passed_back(
        self, gradients: list[Float32], raw: list[Float32], first_row: Int32
    ) -> list[Float32]:
        """Gradients of the modified scores as those of the scores times softmax_scale."""
        if self.spec.softcap:
            return self.one_minus_squares(self.tanh(raw), gradients)
        return [
            Float32(
                self.spec.score_mod_bwd(
                    gradient, score * self.scale, *self._where(first_row + column)
                )
            )
            for column, gradient, score in zip(self._columns(raw), gradients, raw, strict=True)
        ]

    def _where(self, row: Int32) -> tuple:
        """Where a pair is; rows beyond the end are given the last one."""
        row = cutlass.min(row, self.seqlens.seqlen_q - 1)
        return self.batch, self.head, row, self.key, self.seqlens, self.aux


def key_mods(spec: Any, scale: Float32 | None, aux: Any, tile: KeyTile, key: Int32) -> KeyMods:
    """The mods of a key of a work tile, for the first head of its group."""
    return KeyMods(
        spec=spec,
        scale=scale,
        aux=aux,
        batch=tile.batch,
        head=tile.head_k * tile.group,
        key=cutlass.max(cutlass.min(key, tile.seqlen_k - 1), 0),
        seqlens=TracedSeqlens(tile.seqlen_q, tile.seqlen_k),
    )
