"""Whether Hopper's backward kernels divide a call's sums over CTAs: what its CTAs would do else.

The kernel of the keys divides query heads that share them (`warpgroup_key_parts`), that of wide
heads' queries divides keys (`warpgroup_query_parts`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fa4.config import WARPGROUP_ROWS, Window
from fa4.plan.warpgroup_key_parts import BESIDE_STEP, KeyCtas, key_parts, seen_tiles
from fa4.plan.warpgroup_query_parts import QueryCtas, query_parts
from fa4.plan.warpgroup_wide import CONSUMERS

TILE_ROWS = 2 * WARPGROUP_ROWS


@dataclass(frozen=True, kw_only=True)
class GradientSizes:
    """rows_q, rows_k: of all sequences together; longest_q, longest_k: of one. wide: are there a
    kernel of dK and dV and one of dQ? window: as the kernel's, (left, right)."""

    batch: int
    heads_q: int
    heads_k: int
    rows_q: int
    rows_k: int
    longest_q: int
    longest_k: int
    window: Window
    wide: bool


def choose_key_parts(sizes: GradientSizes, sm_count: int) -> int:
    """Into how many parts the query heads that share keys are divided."""
    if sizes.heads_q == sizes.heads_k:
        return 1
    return key_parts(key_work(sizes, choose_query_parts(sizes, sm_count)), sm_count)


def choose_query_parts(sizes: GradientSizes, sm_count: int) -> int:
    """Into how many parts the keys are divided in a kernel of dQ alone; 1 where there is none."""
    return query_parts(query_work(sizes), sm_count) if sizes.wide else 1


def query_work(sizes: GradientSizes) -> QueryCtas:
    """What the CTAs of the dQ kernel do."""
    left, right = sizes.window
    steps, longest = seen_tiles(sizes.longest_k, sizes.longest_q, (right, left), TILE_ROWS)
    return QueryCtas(
        ctas=_blocks(sizes.batch, sizes.rows_q, sizes.longest_q, TILE_ROWS) * sizes.heads_q,
        steps=steps * sizes.rows_k / sizes.batch / max(sizes.longest_k, 1),
        longest=longest,
    )


def key_work(sizes: GradientSizes, parts_of_keys: int = 1) -> KeyCtas:
    """What CTAs that have the keys do. parts_of_keys: of the kernel that runs beside them."""
    keys = WARPGROUP_ROWS if sizes.wide else TILE_ROWS
    tiles, longest = seen_tiles(sizes.longest_q, sizes.longest_k, sizes.window, keys)
    work = KeyCtas(
        ctas=_blocks(sizes.batch, sizes.rows_k, sizes.longest_k, keys) * sizes.heads_k,
        group=sizes.heads_q // sizes.heads_k,
        tiles=tiles * sizes.rows_q / sizes.batch / max(sizes.longest_q, 1),
        longest=longest,
    )
    if not sizes.wide:
        return work
    steps = BESIDE_STEP / CONSUMERS * work.ctas * work.tiles * work.group
    longest = -(-sizes.longest_k // keys) / parts_of_keys
    return replace(work, beside=steps, longest_beside=BESIDE_STEP * longest)


def _blocks(batch: int, rows: int, longest: int, each: int) -> int:
    """Blocks of all sequences, at most."""
    return min(-(-longest // each) * batch, rows // each + batch)
