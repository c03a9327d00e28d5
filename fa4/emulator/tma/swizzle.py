"""Swizzle modes: how a tensor copy permutes chunks of shared memory (PTX ISA 5.5.7)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# The longest pattern (128-byte swizzle) repeats after this many bytes; the others divide it.
PERIOD_BYTES = 1024

# (span, atom) in bytes -> (shift, mask): address ^= address >> shift & mask. In words, the index of
# an atom within its span ^= the index of its 128-byte line.
PATTERNS = {
    (0, 16): (0, 0),
    (32, 16): (3, 0x10),
    (64, 16): (3, 0x30),
    (128, 16): (3, 0x70),
    (128, 32): (2, 0x60),
    (128, 64): (1, 0x40),
}


def swizzle_addresses(
    addresses: NDArray[np.int64], swizzle: int, atom_bytes: int = 16
) -> NDArray[np.int64]:
    """Absolute shared addresses (bytes, any shape) after swizzling.

    swizzle: span in bytes, 0 (none), 32, 64 or 128. atom_bytes: what stays together, 16, or with
    the 128-byte span also 32 and 64. Every mode is an involution and keeps the bytes of an atom
    adjacent. Raises KeyError for other modes (`TensorMap` has refused them before).
    """
    shift, mask = PATTERNS[swizzle, atom_bytes]
    return addresses ^ ((addresses >> shift) & mask)
