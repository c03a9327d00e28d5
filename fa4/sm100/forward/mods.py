"""What changes scores between the product and the mask: score_mod, softcap and mask_mod.

    score_mod(score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors) -> score
    mask_mod(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors) -> keep?

Both are traced once per column of a KV tile, on scalars: score is a Float32 that has been
multiplied by softmax_scale, batch, head (of the queries) and the indices are Int32, seqlen_info has
`seqlen_q` and `seqlen_k`, and aux_tensors is a tuple of `cute.Tensor` (None without any). Rows and
keys beyond a sequence's end are given its last index, so that tensors may be read at any index.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32

from fa4.kit.rowmath import tanh
from fa4.kit.scores import TracedSeqlens
from fa4.kit.tiles import WorkTile


@dataclass(frozen=True)
class Mods:
    """What all rows share. score_scale: factor of the raw scores, None where they stay raw."""

    spec: cutlass.Constexpr
    score_scale: Float32 | None
    aux: tuple | None

    def of_row(self, tile: WorkTile, row: Int32) -> "RowMods":
        """The same for a packed row of a work tile."""
        return RowMods(
            mods=self,
            batch=tile.batch,
            head=tile.query_head(row),
            position=cutlass.min(tile.position(row), tile.seqlen_q - 1),
            seqlens=TracedSeqlens(tile.seqlen_q, tile.seqlen_k),
        )


@dataclass(frozen=True)
class RowMods:
    """What the callables are told of a row. position: its index, within the sequence."""

    mods: Mods
    batch: Int32
    head: Int32
    position: Int32
    seqlens: TracedSeqlens

    def modified(self, scores: list[Float32], first_key: Int32) -> list[Float32]:
        """The scores of the keys from `first_key` on, modified and masked.

        With softcap they are tanh(s / softcap): the factor softcap is part of `scales`.
        """
        spec, scale = self.mods.spec, self.mods.score_scale
        if spec.softcap:
            scores = tanh(scores, scale)
        if spec.score_mod is None and spec.mask_mod is None:
            return scores
        last = cutlass.max(self.seqlens.seqlen_k - 1, 0)
        keys = [cutlass.min(first_key + column, last) for column in range(len(scores))]
        return [self.modify(score, key) for score, key in zip(scores, keys, strict=True)]

    def modify(self, score: Float32, key: Int32) -> Float32:
        """One score, by the callables; key: its index, at most the last one's."""
        spec, aux = self.mods.spec, self.mods.aux
        where = self.batch, self.head, self.position, key, self.seqlens, aux
        if spec.score_mod is not None:
            score = Float32(spec.score_mod(score * self.mods.score_scale, *where))
        if spec.mask_mod is not None:
            keep = cutlass.Boolean(spec.mask_mod(*where))
            score = cutlass.select_(keep, score, -Float32.inf)
        return score
