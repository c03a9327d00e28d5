"""At which addresses kernels see arrays: aligned like those of cudaMalloc, whatever they are here.

NumPy starts arrays at multiples of 16 bytes, torch of 64; kernels may rely on 256. Nothing is
copied: an array is seen at another address than its own, which is a multiple of 256 if the memory
that it is the first part of starts there. Of a view of something larger the offset stays.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fa4.emulator.host.dlpack import is_torch_tensor

ALIGNMENT_BYTES = 256  # of cudaMalloc (CUDA programming guide, "Device Memory Accesses")
# Real addresses have 47 bits; those seen instead have 56, of the 57 that a tensor map holds.
_SEEN = 1 << 55


def shift_of(array: Any) -> int:
    """What to add to an array's own addresses for those that kernels see; 0 for most other things.

    The same for all views of a piece of memory, unless a view is better aligned where it is.
    """
    if isinstance(array, np.ndarray):
        start = array.ctypes.data
    elif is_torch_tensor(array) and array.device.type == "cpu":
        start = _torch_start(array)
    else:
        return 0
    storage = _storage_start(array)
    if not storage % ALIGNMENT_BYTES:  # or empty, at address 0
        return 0
    # Pieces that do not overlap stay apart, since they start `size` apart or more.
    shift = _SEEN + storage * (ALIGNMENT_BYTES - 1)
    return shift if _alignment(start + shift) >= _alignment(start) else 0


def no_shift(array: Any) -> int:
    """For those who read real memory at the addresses that kernels get."""
    return 0


def _alignment(address: int) -> int:
    return min(address & -address, ALIGNMENT_BYTES)


def _torch_start(tensor: Any) -> int:
    """As data_ptr, which `emulate` takes note of."""
    offset = tensor.storage_offset() * tensor.element_size()
    return int(tensor.untyped_storage().data_ptr()) + int(offset)


def _storage_start(array: Any) -> int:
    """The first address of the memory that an array is a part of."""
    while isinstance(array, np.ndarray) and (
        isinstance(array.base, np.ndarray) or is_torch_tensor(array.base)
    ):
        array = array.base
    if isinstance(array, np.ndarray):
        return int(array.ctypes.data)
    return int(array.untyped_storage().data_ptr())
