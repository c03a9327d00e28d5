"""Which work tile has which number: under a causal mask, the longest of some heads first.

A KV tile has the more query tiles the earlier it is. Head after head, the last head's longest tiles
begin when most SMs have nothing else left; over all heads, longest first, Q and dO of more heads
than L2 has room for would be read at a time. So it is done over as many as keep the SMs busy, in
sections of about one size: a small last one would begin as late as a single head.

In a fixed order of sums, tiles of a head come one behind the other, last ones first under such a
mask: nobody may wait for a tile of a larger number.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Int32

from fa4.plan.warpgroup_backward import SECTION_ROUNDS
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
        if spec.hides_first_rows and not spec.deterministic:
            first, width = section(index // blocks, self.count // blocks, blocks, spec)
            rest = index - first * blocks
            return key_tile(problem, rest // width, first + rest % width)
        block = index % blocks
        if spec.hides_first_rows:
            block = blocks - 1 - block
        return key_tile(problem, block, index // blocks)

    def tile_or_last(self, index: Int32) -> KeyTile:
        """The same; the last one beyond the end, where traced code looks, too."""
        return self.tile(cutlass.min(index, self.count - 1))


def section(
    head: Int32, heads: Int32, blocks: Int32, spec: cutlass.Constexpr
) -> tuple[Int32, Int32]:
    """The first head of the section that `head` is in, and how many it has.

    blocks: KV tiles of a head. The first sections have one head more where heads do not divide.
    """
    least = (SECTION_ROUNDS * spec.gpu.sm_count + blocks - 1) // blocks
    sections = cutlass.max(heads // least, 1)
    width, longer = heads // sections, heads % sections
    behind = longer * (width + 1)
    shorter_first = behind + (head - behind) // width * width
    longer_first = head // (width + 1) * (width + 1)
    is_longer = head < behind
    return (
        cutlass.select_(is_longer, longer_first, shorter_first),
        cutlass.select_(is_longer, width + 1, width),
    )
