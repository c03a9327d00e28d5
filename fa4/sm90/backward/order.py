"""Which work tile has which number, and in which order it walks its query tiles.

What CTAs need at a time should lie in L2: Q and dO, and dQ, which all KV tiles of a head add to. So
the tiles of a head come one behind the other. Under a causal mask all of them end with the last
query, and those of a group of heads begin there, too, with all heads of the group, and walk back:
CTAs that have begun together are at the same queries, though some have many and some few. A head
by itself they walk forwards, which was faster in short calls (docs/hopper.md), and so they do where
a window ends before, one head of the group behind the other: there they have as many each.

A KV tile has the more query tiles the earlier it is, and the last head's longest ones would begin
when most SMs have nothing else left. So the longest of the last heads, those that keep the SMs
busy, begin first.

In a fixed order of sums, tiles of a head come one behind the other, last ones first under such a
mask: nobody may wait for a tile of a larger number.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Int32

from fa4.plan.warpgroup_backward import LAST_ROUNDS
from fa4.sm100.backward.tiles import BackwardProblem, KeyTile, key_tile


@dataclass(frozen=True)
class WorkList:
    """All work tiles of a call, `count` of them."""

    problem: BackwardProblem
    count: Int32

    def tile(self, index: Int32) -> KeyTile:
        """The one with a number."""
        problem, blocks = self.problem, self.problem.blocks
        spec = problem.spec
        block, number = index % blocks, index // blocks
        if spec.hides_first_rows and spec.deterministic:
            block = blocks - 1 - block
        elif spec.hides_first_rows:
            width = last_heads(self.count // blocks, blocks, problem.group, spec.gpu.sm_count)
            first = self.count // blocks - width
            rest = index - first * blocks
            block = cutlass.select_(rest < 0, block, rest // width)
            number = cutlass.select_(rest < 0, number, first + rest % width)
        return key_tile(problem, block, number)

    def tile_or_last(self, index: Int32) -> KeyTile:
        """The same; the last one beyond the end, where traced code looks, too."""
        return self.tile(cutlass.min(index, self.count - 1))


def last_heads(heads: Int32, blocks: Int32, group: Int32, sm_count: cutlass.Constexpr) -> Int32:
    """Of how many heads, at the end, the longest tiles begin first. blocks: KV tiles of a head.

    group: query heads that share them. Of more than one, L2 has room for fewer.
    """
    alone, shared = (rounds * sm_count for rounds in LAST_ROUNDS)
    tiles = cutlass.select_(group > 1, Int32(shared), Int32(alone))
    return cutlass.min(heads, (tiles + blocks - 1) // blocks)


def ends_with_the_last(spec: cutlass.Constexpr) -> bool:
    """Do all KV tiles of a head end with the last query, and begin with different ones?"""
    in_order = spec.deterministic and spec.adds_up_dq
    return spec.hides_first_rows and not spec.hides_last_rows and not in_order


def first_rows(tile: KeyTile) -> tuple[Int32, Int32]:
    """What a work tile begins with: (number of a query head in its group, query tile)."""
    row_tile = tile.q_start
    if ends_with_the_last(tile.spec):
        row_tile = cutlass.select_(tile.group > 1, tile.q_stop - 1, row_tile)
    return Int32(0), row_tile


def next_rows(tile: KeyTile, member: Int32, row_tile: Int32) -> tuple[Int32, Int32]:
    """What comes behind a query tile of such a head."""
    if ends_with_the_last(tile.spec):
        ended = member + 1 == tile.group
        following = cutlass.select_(tile.group > 1, row_tile - 1, row_tile + 1)
        row_tile = cutlass.select_(ended, following, row_tile)
        return cutlass.select_(ended, Int32(0), member + 1), row_tile
    ended = row_tile + 1 == tile.q_stop
    member = cutlass.select_(ended, member + 1, member)
    return member, cutlass.select_(ended, tile.q_start, row_tile + 1)


def query_head(tile: KeyTile, member: Int32) -> Int32:
    """The query head that has a number in the tile's group."""
    return tile.head_k * tile.group + member
