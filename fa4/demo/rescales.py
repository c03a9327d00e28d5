"""How often the running maximum of real scores moves far enough to rescale, tile by tile.

The decision depends on the largest score of each row in each KV tile and on nothing else. So the
tile maxima are taken once and then fed, as tiles of one column, to the very `online_step` that FA4
mode uses, for each threshold tau.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from fa4.backends.request import Request
from fa4.config import ForwardConfig
from fa4.reference import sequences
from fa4.reference.online_softmax import RowState, SoftmaxRule, online_step, row_maximum
from fa4.reference.spec import LOG2_E, Attention
from fa4.reference.tiles import Tile, TileMasks, cut

SWEEP_TILE_N = 32  # small, so that a chunk of 512 tokens has 16 KV tiles
SWEEP_TAUS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)


@dataclass
class RescaleCounts:
    """Warps that rescaled and warps that could have, by tau and by KV tile in the order visited.

    done[tau][i] and skipped[tau][i] belong to the (i + 2)-th tile that a row block visits: the
    first one sets the maximum and rescales nothing.
    """

    taus: Sequence[float] = SWEEP_TAUS
    tile_n: int = SWEEP_TILE_N
    done: dict[float, list[int]] = field(default_factory=dict)
    skipped: dict[float, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Start every tau with no tiles."""
        for tau in self.taus:
            self.done[tau], self.skipped[tau] = [], []

    def count(self, request: Request) -> None:
        """Add one layer."""
        config = ForwardConfig(tile_n=self.tile_n)
        for seq in split_sequences(request):
            for tops in tile_maxima(seq, request.spec, config):
                for tau in self.taus:
                    self._walk(tops, request.spec.softmax_scale, tau)

    def _walk(self, tops: np.ndarray, softmax_scale: float, tau: float) -> None:
        """Let one row block visit its tiles; tops (heads, rows, tiles) in unscaled units."""
        scale = np.full((1, 1), softmax_scale * LOG2_E, tops.dtype)
        rule = SoftmaxRule(scale_log2=scale, threshold_log2=tau)
        state = RowState.empty(tops.shape[:2], tops.dtype)
        done, skipped = self.done[tau], self.skipped[tau]
        with np.errstate(invalid="ignore", under="ignore"):  # a row that sees nothing yet: -inf
            for tile in range(tops.shape[-1]):
                step = online_step(state, tops[..., tile : tile + 1].copy(), rule)
                if tile == 0:
                    continue
                if len(done) < tile:
                    done.append(0)
                    skipped.append(0)
                done[tile - 1] += step.rescales_done
                skipped[tile - 1] += step.rescales_skipped

    def as_dict(self) -> dict[str, object]:
        """For the report: rate[i][j] is the share of warps that rescale, tau i, tile_visited j."""
        tiles = max((len(counts) for counts in self.done.values()), default=0)
        rates = [
            [d / (d + s) for d, s in zip(self.done[tau], self.skipped[tau], strict=True)]
            for tau in self.taus
        ]
        totals = [sum(self.done[tau]) for tau in self.taus]
        chances = sum(self.done[self.taus[0]]) + sum(self.skipped[self.taus[0]])
        return {
            "tile_n": self.tile_n,
            "taus": list(self.taus),
            "tile_visited": list(range(2, tiles + 2)),
            "rate": rates,
            "total_rate": [total / chances if chances else 0.0 for total in totals],
        }


def split_sequences(request: Request) -> Iterator[sequences.Sequence]:
    """The sequences of a dense or packed request, heads first."""
    offsets = request.packing.cu_seqlens_q
    if offsets is None:
        parts = zip(request.q, request.k, request.v, strict=True)
    else:
        stops = offsets[1:-1]
        parts = zip(*(np.split(x, stops) for x in (request.q, request.k, request.v)), strict=True)
    for batch, part in enumerate(parts):
        yield sequences.Sequence(batch, *(x.transpose(1, 0, 2) for x in part))


def tile_maxima(
    seq: sequences.Sequence, spec: Attention, config: ForwardConfig
) -> Iterator[np.ndarray]:
    """For each row block (heads, rows, tiles): a row's largest visible score in each KV tile.

    Float32, unscaled, tiles in the order the kernel visits them; -inf where a row sees none of a
    tile's keys.
    """
    masks = TileMasks(seq, spec)
    keys = np.repeat(seq.k.astype(np.float32), seq.group, axis=0).transpose(0, 2, 1)
    for rows in cut(seq.q.shape[1], config.tile_m * config.q_tiles):
        tiles = masks.kv_tiles(rows, config.tile_n)
        if not tiles:
            continue
        q = np.ascontiguousarray(seq.q[:, rows.slice], np.float32)
        yield np.stack([_tile_maximum(q, keys, masks, rows, cols) for cols in tiles], axis=-1)


def _tile_maximum(
    q: np.ndarray, keys: np.ndarray, masks: TileMasks, rows: Tile, cols: Tile
) -> np.ndarray:
    scores = q @ keys[..., cols.slice]
    keep = masks.visible(rows, cols)
    return row_maximum(scores if keep is None else np.where(keep, scores, np.float32(-np.inf)))
