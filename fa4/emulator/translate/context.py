"""How handlers reach the registers of a warp: readers and writers, bound once per instruction."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol, TypeAlias

import numpy as np

from fa4.emulator.ptx.syntax import (
    Address,
    Integer,
    Kernel,
    Module,
    Operand,
    Register,
    Sink,
    Symbol,
    Vector,
)
from fa4.emulator.translate.lanes import FloatBits, width_of
from fa4.emulator.translate.layout import FRAME, RANK_SHIFT, RegisterFile, Variables
from fa4.emulator.translate.link import Routine
from fa4.emulator.translate.table import Unsupported
from fa4.emulator.warp_lanes import FULL_MASK, Array, lane_flags, mask_of


class _Placed(Protocol):
    @property
    def rank(self) -> int: ...


class WarpRegisters(Protocol):
    """What reading and writing operands needs of a warp.

    words, views: its register file as uint32, and by width in bits. cta: knows its rank.
    """

    @property
    def words(self) -> Array:
        """uint32 (n,)."""

    @property
    def views(self) -> dict[int, Array]:
        """16, 32 and 64 bits -> unsigned integers (n,)."""

    @property
    def cta(self) -> _Placed:
        """The CTA that it belongs to."""


Reader: TypeAlias = Callable[[WarpRegisters], Array]
ScalarReader: TypeAlias = Callable[[WarpRegisters, int], int]
Writer: TypeAlias = Callable[[WarpRegisters, Array, int], None]
# (the fragment that executes, mask of its lanes) -> None, or why it does not simply go on.
Handler: TypeAlias = Callable[[Any, int], Any]

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


class KernelContext:
    """What an instruction is bound against.

    A reader returns all 32 lanes as an unsigned integer array, possibly a view of the register
    file: copy it before you keep it. A scalar reader returns one lane as a Python integer.
    """

    def __init__(
        self,
        module: Module,
        kernel: Kernel,
        registers: RegisterFile,
        variables: Variables,
        routines: tuple[Routine, ...],
    ) -> None:
        self.module = module
        self.kernel = kernel
        self.registers = registers
        self.variables = variables
        self.routines = routines
        self.sizes = {v.name: v.size_bytes or 0 for r in routines for v in r.frame}

    def locate(self, name: str) -> tuple[int, int]:
        """(byte offset, bits) of a register."""
        if name not in self.registers.offsets:
            raise Unsupported(f"register {name}")
        return self.registers.offsets[name]

    def reader(self, operand: Operand, ptx_type: str) -> Reader:
        """Reads a source operand as `ptx_type`, 32 lanes (a predicate: bool)."""
        bits = width_of(ptx_type)
        if isinstance(operand, Register):
            return self._register_reader(operand, bits)
        if isinstance(operand, Symbol):
            return self._symbol_reader(operand, bits)
        if isinstance(operand, Integer):
            value = operand.value & ((1 << bits) - 1)
        elif isinstance(operand, FloatBits) and operand.width == bits:
            value = operand.bits
        else:
            raise Unsupported(f"operand {operand}")
        if bits == 1:
            fixed: Array = np.full(32, bool(value))
        else:
            fixed = np.full(32, value, UNSIGNED[bits])
        fixed.flags.writeable = False
        return lambda warp: fixed

    def _register_reader(self, operand: Register, bits: int) -> Reader:
        offset, own_bits = self.locate(operand.name)
        if own_bits == 1:
            word, flip = offset // 4, FULL_MASK if operand.negated else 0
            return lambda warp: lane_flags[int(warp.words[word]) ^ flip]
        if own_bits < bits:
            raise Unsupported(f"{operand.name} has {own_bits} bits, {bits} are needed")
        kind, size = UNSIGNED[own_bits], own_bits // 8
        first = offset // size
        if bits == own_bits:
            return lambda warp: warp.views[own_bits][first : first + 32]
        del kind
        narrow = UNSIGNED[bits]
        return lambda warp: warp.views[own_bits][first : first + 32].astype(narrow)

    def _symbol_reader(self, operand: Symbol, bits: int) -> Reader:
        if operand.name not in self.variables.addresses:
            raise Unsupported(f"the address of {operand.name}")
        value = self.variables.addresses[operand.name] + operand.offset
        shared = operand.name in self.variables.shared
        if operand.name in self.variables.framed:
            frame = self._register_reader(Register(FRAME), bits)
            return lambda warp: frame(warp) + UNSIGNED[bits](value & ((1 << bits) - 1))

        @cache
        def at_rank(rank: int) -> Array:
            whole = (value + (rank << RANK_SHIFT)) & ((1 << bits) - 1)
            fixed: Array = np.full(32, whole, UNSIGNED[bits])
            fixed.flags.writeable = False
            return fixed

        return lambda warp: at_rank(warp.cta.rank if shared else 0)

    def scalar(self, operand: Operand, ptx_type: str) -> ScalarReader:
        """Reads one lane of an operand (for operands that must be the same in all lanes)."""
        if isinstance(operand, Integer):
            value = operand.value & ((1 << width_of(ptx_type)) - 1)
            return lambda warp, lane: value
        read = self.reader(operand, ptx_type)
        return lambda warp, lane: int(read(warp)[lane])

    def writer(self, operand: Operand, ptx_type: str) -> Writer:
        """Writes a destination in the lanes of a mask; narrower values are zero-extended, signed
        types sign-extended. A predicate takes bool (32,)."""
        if isinstance(operand, Sink):
            return lambda warp, values, mask: None
        if not isinstance(operand, Register):
            raise Unsupported(f"destination {operand}")
        offset, own_bits = self.locate(operand.name)
        if own_bits == 1:
            word = offset // 4

            def write_predicate(warp: WarpRegisters, values: Array, mask: int) -> None:
                old = int(warp.words[word])
                warp.words[word] = (mask_of(values) & mask) | (old & ~mask & FULL_MASK)

            return write_predicate
        bits = width_of(ptx_type)
        if bits > own_bits:
            raise Unsupported(f"{operand.name} has {own_bits} bits, the result {bits}")
        first = offset // (own_bits // 8)
        signed = ptx_type.startswith("s") and bits < own_bits
        target = UNSIGNED[own_bits]
        narrow = np.dtype(f"i{max(bits // 8, 1)}")

        def write(warp: WarpRegisters, values: Array, mask: int) -> None:
            if signed:
                values = values.view(narrow).astype(np.dtype(f"i{own_bits // 8}")).view(target)
            view = warp.views[own_bits][first : first + 32]
            if mask == FULL_MASK:
                view[:] = values
            else:
                np.copyto(view, values, where=lane_flags[mask], casting="unsafe")

        return write

    def elements(self, operand: Operand) -> tuple[Operand, ...]:
        """The elements of a vector operand, or the operand alone."""
        return operand.elements if isinstance(operand, Vector) else (operand,)

    def address(self, operand: Operand, bits: int | None = None) -> Reader:
        """Reads an address operand: base + offset of each lane, uint64 (32,).

        32-bit bases wrap at 32 bits. `bits` overrides the width of an immediate or symbol base.
        """
        if not isinstance(operand, Address):
            raise Unsupported(f"address {operand}")
        base, offset = operand.base, operand.offset
        if isinstance(base, Integer):
            fixed = np.full(32, base.value + offset, np.uint64)
            return lambda warp: fixed
        if isinstance(base, Symbol):
            return self._symbol_reader(Symbol(base.name, base.offset + offset), bits or 64)
        own_bits = self.locate(base.name)[1]
        read = self._register_reader(base, own_bits)
        if own_bits == 64:
            step = np.uint64(offset & 0xFFFF_FFFF_FFFF_FFFF)
            return (lambda warp: read(warp) + step) if offset else read
        step32 = np.uint32(offset & 0xFFFF_FFFF)
        return lambda warp: (read(warp) + step32).astype(np.uint64)

    def scalar_address(self, operand: Operand) -> ScalarReader:
        """One lane of an address operand."""
        read = self.address(operand)
        return lambda warp, lane: int(read(warp)[lane])
