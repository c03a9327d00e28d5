"""Global memory that nobody has written: it holds a pattern, by which it is known later.

`fill` puts it there. Whatever writes the memory after that, on the host or in a kernel, changes the
pattern, so that nothing has to be watched. Places are told in words of 8 bytes: one that is written
in part counts as written.
"""

from __future__ import annotations

import ctypes

import numpy as np

from fa4.emulator.warp_lanes import Array

# A NaN in float64, and in each part that is a float32, bfloat16 or float16: what comes of it shows.
PATTERN = np.uint64(0x7FF57FB37FA97FD6)
WORD_BYTES = 8
_LEAST_BYTES = 4  # of a word at an end of an array, to be told from chance
_TILE = np.frombuffer(PATTERN.tobytes() * 2, np.uint8)

_filled = False


def fill(address: int, size_bytes: int) -> None:
    """Marks real memory of this process as unwritten."""
    global _filled
    if size_bytes:
        raw = np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))
        raw[:] = _expected(address, size_bytes)
        _filled = True


def empty(shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """An array that counts as never written."""
    array = np.empty(shape, dtype)
    fill(array.ctypes.data, array.nbytes)
    return array


def _expected(address: int, size_bytes: int) -> Array:
    """The bytes that unwritten memory has at an address."""
    first = address % WORD_BYTES
    return np.resize(np.roll(_TILE[:WORD_BYTES], -first), size_bytes)


def unwritten_granules(data: Array, granule_bytes: int) -> Array | None:
    """Which granules of a buffer nobody has written, bool (n,); None: all have been."""
    if not _filled or not len(data):
        return None
    address = int(data.ctypes.data)
    head = min(-address % WORD_BYTES, len(data))
    stop = head + (len(data) - head) // WORD_BYTES * WORD_BYTES
    words = np.asarray(data[head:stop].view(np.uint64) == PATTERN)
    edges = [(0, head), (stop, len(data))]
    found = [_is_unwritten(data, address, *edge) for edge in edges]
    if not (np.any(words) or any(found)):
        return None
    each: Array = np.zeros(-(-len(data) // granule_bytes) * granule_bytes, bool)
    each[head:stop] = np.repeat(words, WORD_BYTES)
    for (first, last), unwritten in zip(edges, found, strict=True):
        each[first:last] = unwritten
    each[len(data) :] = bool(each[len(data) - 1])
    return np.asarray(each.reshape(-1, granule_bytes).all(axis=1))


def _is_unwritten(data: Array, address: int, first: int, last: int) -> bool:
    """Whether the part of a word at an end of a buffer holds the pattern."""
    if last - first < _LEAST_BYTES:
        return False
    return bool((data[first:last] == _expected(address + first, last - first)).all())
