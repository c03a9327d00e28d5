"""A vector of 32-bit registers as one array: the register operands of tcgen05.ld and .st."""

from __future__ import annotations

import numpy as np

from fa4.emulator.machine.state import Warp
from fa4.emulator.ptx.syntax import Operand, Register
from fa4.emulator.translate.context import KernelContext
from fa4.emulator.translate.table import Unsupported
from fa4.emulator.warp_lanes import FULL_MASK, Array, lane_flags

_LANES = np.arange(32)
_WORDS = 32  # of one register in the register file, one for each lane


class RegisterBlock:
    """The registers of a vector operand, bound once.

    names: of the registers, in order. count: elements, immediates and "_" included.
    """

    def __init__(self, context: KernelContext, operand: Operand, written: bool) -> None:
        elements = context.elements(operand)
        self.count = len(elements)
        self.names = tuple(e.name for e in elements if isinstance(e, Register))
        places = [context.locate(name) for name in self.names]
        self._plain = len(places) == self.count and all(bits == 32 for _, bits in places)
        if self._plain:
            starts = np.array([offset // 4 for offset, _ in places])
            self._index = starts[:, None] + _LANES
            first = int(starts[0])
            ascending = starts == first + _WORDS * np.arange(self.count)
            self._run = slice(first, first + _WORDS * self.count) if ascending.all() else None
        elif written:
            self._writers = [context.writer(element, "b32") for element in elements]
        else:
            self._readers = [context.reader(element, "b32") for element in elements]
        if written and len(set(self.names)) != len(self.names):
            raise Unsupported("a register twice among the destinations")

    def read(self, warp: Warp) -> Array:
        """uint32 (count, 32), a copy."""
        if self._plain:
            if self._run is not None:
                return warp.words[self._run].reshape(self.count, _WORDS).copy()
            return warp.words.take(self._index)
        return np.stack([read(warp) for read in self._readers])

    def write(self, warp: Warp, values: Array, mask: int) -> None:
        """Writes uint32 (count, 32) in the lanes of a mask."""
        if not self._plain:
            for write, row in zip(self._writers, values, strict=True):
                write(warp, row, mask)
        elif mask != FULL_MASK:
            lanes = lane_flags[mask]
            warp.words[self._index[:, lanes]] = values[:, lanes]
        elif self._run is not None:
            warp.words[self._run].reshape(self.count, _WORDS)[:] = values
        else:
            warp.words[self._index] = values
