"""Functions that a kernel of 8-bit types calls."""

import cutlass.cute as cute


@cute.jit
def biased(score, batch, head, row, key, info, aux):
    """A bias per head and key."""
    return score + aux[0][head, key]


@cute.jit
def listed(batch, head, row, key, info, aux):
    """Documents that see themselves."""
    return aux[0][row] == aux[0][key]
