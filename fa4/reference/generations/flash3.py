"""FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608): overlap of products and softmax.

A CTA's query rows are split between two consumer warpgroups (ping-pong, section 3.1): while one
runs its softmax, the other's products run. Within a warpgroup the two-stage pipeline of Algorithm 2
issues S_next = Q K_j^T before O += P_cur V_(j-1), so that the softmax of block j overlaps that
product; O is rescaled after it. Each row's operations are those of FA2 in the same order.

`ping_pong` is the order in which the kernel below executes, on one core and hence without overlap.
Backward (Algorithm 3, appendix B.1): FA2's loops, with a warp of its own that adds dQ to HBM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fa4.config import require, require_int
from fa4.reference.generations import flash2
from fa4.reference.generations.common import SequenceTiles
from fa4.reference.online_softmax import Partial, RowState, add_sink, finish, online_step
from fa4.reference.sequences import Sequence, SequenceGradients, SequenceOutput, Upstream
from fa4.reference.spec import Attention
from fa4.reference.tiles import Tile, cut

WARPGROUPS = 2  # consumer warpgroups that take turns: the paper, section 3.1


@dataclass(frozen=True, kw_only=True)
class Flash3Config:
    """tile_m rows of a CTA's Q tile, half of them per warpgroup; tile_n rows of a KV tile."""

    tile_m: int = 128
    tile_n: int = 128

    def __post_init__(self) -> None:
        """Check ranges and types, and that two warpgroups share the rows evenly."""
        require_int("tile_m", self.tile_m, 2)
        require_int("tile_n", self.tile_n, 1)
        require(self.tile_m % WARPGROUPS == 0, "tile_m must be even", self.tile_m)


class Op(NamedTuple):
    """One operation of a warpgroup on KV tile `tile`.

    stage "scores": S = Q K^T. "softmax": P and the rescale of O. "values": O += P V.
    """

    stage: str
    tile: int


Phase = tuple[Op, ...]


def two_stage_phases(tiles: int) -> list[Phase]:
    """Algorithm 2 over `tiles` KV tiles: phases of products and of softmax in turn.

    scores 0 | softmax 0 | scores 1, values 0 | softmax 1 | ... | values of the last tile
    """
    phases: list[Phase] = []
    for tile in range(tiles):
        products = (Op("scores", tile),)
        phases.append(products if tile == 0 else (*products, Op("values", tile - 1)))
        phases.append((Op("softmax", tile),))
    return [*phases, (Op("values", tiles - 1),)] if tiles else []


def ping_pong(tiles: int, warpgroups: int = WARPGROUPS) -> list[list[tuple[int, Phase]]]:
    """Time slots of (warpgroup, phase): warpgroup w runs w phases behind warpgroup 0.

    With two warpgroups, no slot holds products of both, nor softmax of both.
    """
    phases = two_stage_phases(tiles)
    slots = []
    for time in range(len(phases) + warpgroups - 1 if phases else 0):
        active = [(w, time - w) for w in range(warpgroups) if 0 <= time - w < len(phases)]
        slots.append([(w, phases[index]) for w, index in active])
    return slots


class Warpgroup:
    """Registers of one consumer warpgroup: its rows' S_next, P_cur, O, m and l."""

    def __init__(self, kernel: Flash3Forward, rows: Tile, tiles: list[Tile]) -> None:
        """Start from O = 0, m = -inf, l = 0."""
        self.kernel, self.rows, self.tiles = kernel, rows, tiles
        self.state = RowState.empty((kernel.heads, rows.size), kernel.work)
        self.o = np.zeros((kernel.heads, rows.size, kernel.dv), kernel.work)
        self.p: np.ndarray | None = None
        self.keep: dict[int, np.ndarray | None] = {}
        self.next_scores: np.ndarray | None = None

    def execute(self, phase: Phase) -> None:
        """Run the operations of a phase in order."""
        for op in phase:
            getattr(self, op.stage)(op.tile)

    def scores(self, tile: int) -> None:
        """S_next = Q K_j^T, masked."""
        scores = self.kernel.scores(self.rows, self.tiles[tile])
        self.next_scores, self.keep[tile] = scores.masked, scores.keep

    def softmax(self, tile: int) -> None:
        """P_cur, m and l from S_next; then O, to which P_(j-1) V_(j-1) has been added, rescaled."""
        assert self.next_scores is not None
        if self.state.started:
            self.kernel.count_rescale(self.rows)
        step = online_step(self.state, self.next_scores, self.kernel.rule)
        self.p, self.next_scores = step.p, None
        if step.alpha is not None:  # the product with alpha = 1 changes nothing
            self.o *= step.alpha[..., None]
        self.kernel.count_pairs(self.rows, self.tiles[tile], 2 * (self.kernel.d + self.kernel.dv))

    def values(self, tile: int) -> None:
        """O += P_cur V_j."""
        assert self.p is not None
        cols, keep = self.tiles[tile], self.keep.pop(tile)
        self.o += self.kernel.weighted_values(self.p, self.rows, cols, keep)

    def finish(self) -> Partial:
        """Sink, the division by l and the LSE."""
        kernel = self.kernel
        if kernel.spec.sink is not None:
            self.o *= add_sink(self.state, kernel.spec.sink[:, None], kernel.rule)[..., None]
        factor, lse = finish(self.state, kernel.rule)
        self.o *= factor[..., None]
        kernel.counters.other_flops += self.o.size
        return Partial(self.o, lse)


class Flash3Forward(SequenceTiles):
    """The forward pass of one sequence."""

    kv_itemsize: int

    def __init__(
        self, seq: Sequence, spec: Attention, config: Flash3Config, offset_log2: float = 0.0
    ) -> None:
        """P is computed times 2^offset_log2, which cancels in O and LSE."""
        super().__init__(seq, spec)
        self.config = config
        self.rule = self.softmax_rule(offset_log2)
        self.kv_itemsize = self.itemsize

    def row_block(self, rows: Tile) -> list[tuple[Tile, Partial]]:
        """O and LSE of a CTA's rows, warpgroup by warpgroup; both read the same KV tiles."""
        tiles = self.masks.kv_tiles(rows, self.config.tile_n)
        halves = cut(rows.size, self.config.tile_m // WARPGROUPS)
        own = [Tile(rows.start + half.start, rows.start + half.stop) for half in halves]
        warpgroups = [Warpgroup(self, part, tiles) for part in own]
        for slot in ping_pong(len(tiles), len(warpgroups)):
            for index, phase in slot:
                warpgroups[index].execute(phase)
        self.count_block(rows, tiles)
        return [(group.rows, group.finish()) for group in warpgroups]

    def count_block(self, rows: Tile, tiles: list[Tile]) -> None:
        """Charge a CTA: Q once, each KV tile once for both warpgroups, O and LSE."""
        elements, keys = self.heads * rows.size, sum(cols.size for cols in tiles)
        kv_bytes = self.heads * keys * (self.d + self.dv) * self.kv_itemsize
        out_bytes = elements * (self.dv * self.itemsize + self.work.itemsize)
        self.charge(read=elements * self.d * self.kv_itemsize + kv_bytes, write=out_bytes)

    def run(self) -> SequenceOutput:
        """All CTAs."""
        out, lse = self.empty_output()
        for rows in cut(self.seqlen_q, self.config.tile_m):
            for part_rows, part in self.row_block(rows):
                out[:, part_rows.slice] = self.round_output(part.out, out.dtype)
                lse[:, part_rows.slice] = part.lse
        return SequenceOutput(out, lse, self.counters)


def forward_sequence(seq: Sequence, spec: Attention, config: Flash3Config) -> SequenceOutput:
    """FA3 forward of one sequence: O in the output type, LSE, and counters."""
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        return Flash3Forward(seq, spec, config).run()


def backward_sequence(
    seq: Sequence, up: Upstream, spec: Attention, config: Flash3Config
) -> SequenceGradients:
    """FA3 gradients of one sequence: FA2's order of sums and traffic, with FA3's tiles."""
    same_loops = flash2.Flash2Config(tile_m=config.tile_m, tile_n=config.tile_n)
    return flash2.backward_sequence(seq, up, spec, same_loops)
