"""Which work tile a CTA has: under a causal mask, the longest of some heads first.

A KV tile has the more query tiles the earlier it is. Head after head, the last head's longest tiles
begin when most SMs have nothing else left; over all heads, longest first, Q and dO of more heads
than L2 has room for would be read at a time. So it is done over as many as keep the SMs busy.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa4.sm100.backward.tiles import BackwardProblem, KeyTile, key_tile, locate

ROUNDS = 2  # CTAs of each SM, that those heads have


def place(problem: BackwardProblem) -> KeyTile:
    """The work tile of this CTA. In a fixed order of sums, and without such a mask, as `locate`."""
    spec = problem.spec
    if spec.deterministic or not spec.hides_first_rows:
        return locate(problem)
    index, blocks = cute.arch.block_idx()[0], problem.blocks
    heads = cute.arch.grid_dim()[0] // blocks
    width = cutlass.max(Int32(ROUNDS * spec.gpu.sm_count) // blocks, 1)
    first = index // (width * blocks) * width
    rest = index - first * blocks
    width = cutlass.min(width, heads - first)
    return key_tile(problem, rest // width, first + rest % width)
