"""Which work tile a CTA has: under a causal mask, the longest of some heads first.

A KV tile has the more query tiles the earlier it is. Head after head, the last head's longest tiles
begin when most SMs have nothing else left; over all heads, longest first, Q and dO of more heads
than L2 has room for would be read at a time. So it is done over as many as keep the SMs busy, in
sections of about one size: a small last one would begin as late as a single head.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa4.plan.warpgroup_backward import SECTION_ROUNDS
from fa4.sm100.backward.tiles import BackwardProblem, KeyTile, key_tile, locate


def place(problem: BackwardProblem) -> KeyTile:
    """The work tile of this CTA. In a fixed order of sums, and without such a mask, as `locate`."""
    spec = problem.spec
    if spec.deterministic or not spec.hides_first_rows:
        return locate(problem)
    index, blocks = cute.arch.block_idx()[0], problem.blocks
    first, width = section(index // blocks, cute.arch.grid_dim()[0] // blocks, blocks, spec)
    rest = index - first * blocks
    return key_tile(problem, rest // width, first + rest % width)


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
