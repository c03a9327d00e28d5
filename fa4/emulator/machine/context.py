"""How handlers reach the registers of a warp: readers and writers, bound once per instruction."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from fa4.emulator.isa.lanes import FloatBits, width_of
from fa4.emulator.isa.table import Unsupported
from fa4.emulator.layout import CLOCKS, RANK_SHIFT, RegisterFile, Variables
from fa4.emulator.ptx.syntax import (
    Address,
    Instruction,
    Integer,
    Kernel,
    Module,
    Operand,
    Register,
    Sink,
    Symbol,
    Vector,
)

if TYPE_CHECKING:
    from fa4.emulator.machine.state import Fragment, Warp

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Reader: TypeAlias = "Callable[[Warp], Array]"
ScalarReader: TypeAlias = "Callable[[Warp, int], int]"
Writer: TypeAlias = "Callable[[Warp, Array, int], None]"
Handler: TypeAlias = "Callable[[Fragment, int], Any]"

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_LANE_BITS = np.uint32(1) << np.arange(32, dtype=np.uint32)


class _LaneTable(dict[int, Array]):
    def __missing__(self, mask: int) -> Array:
        lanes = (_LANE_BITS & np.uint32(mask)) != 0
        lanes.flags.writeable = False
        if len(self) < 4096:
            self[mask] = lanes
        return lanes


lanes_of = _LaneTable()  # mask -> bool (32,)


def lowest(mask: int) -> int:
    """The lowest lane of a mask that is not empty."""
    return (mask & -mask).bit_length() - 1


class KernelContext:
    """What an instruction is bound against.

    A reader returns all 32 lanes as an unsigned integer array, possibly a view of the register
    file: copy it before you keep it. A scalar reader returns one lane as a Python integer.
    """

    def __init__(
        self, module: Module, kernel: Kernel, registers: RegisterFile, variables: Variables
    ) -> None:
        self.module = module
        self.kernel = kernel
        self.registers = registers
        self.variables = variables

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
            word, flip = offset // 4, 0xFFFFFFFF if operand.negated else 0
            return lambda warp: lanes_of[int(warp.words[word]) ^ flip]
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

            def write_predicate(warp: Warp, values: Array, mask: int) -> None:
                bits = int(np.packbits(values, bitorder="little").view(np.uint32)[0])
                old = int(warp.words[word])
                warp.words[word] = (bits & mask) | (old & ~mask & 0xFFFFFFFF)

            return write_predicate
        bits = width_of(ptx_type)
        if bits > own_bits:
            raise Unsupported(f"{operand.name} has {own_bits} bits, the result {bits}")
        first = offset // (own_bits // 8)
        signed = ptx_type.startswith("s") and bits < own_bits
        target = UNSIGNED[own_bits]
        narrow = np.dtype(f"i{max(bits // 8, 1)}")

        def write(warp: Warp, values: Array, mask: int) -> None:
            if signed:
                values = values.view(narrow).astype(np.dtype(f"i{own_bits // 8}")).view(target)
            view = warp.views[own_bits][first : first + 32]
            if mask == 0xFFFFFFFF:
                view[:] = values
            else:
                np.copyto(view, values, where=lanes_of[mask], casting="unsafe")

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

    def bind_clock(self, instruction: Instruction) -> Handler:
        """mov of %clock, %clock64, %globaltimer: the machine's count of executed steps."""
        source, kind = instruction.operands[1], instruction.parts[-1]
        if instruction.parts[0] != "mov" or not isinstance(source, Register):
            raise Unsupported("clocks can only be moved to a register")
        write = self.writer(instruction.operands[0], kind)
        high, bits = source.name.endswith("_hi"), width_of(kind)
        if source.name not in CLOCKS:
            raise Unsupported(f"special register {source.name}")

        def handler(fragment: Fragment, mask: int) -> None:
            now = fragment.warp.cta.machine.ticks >> (32 if high else 0)
            write(fragment.warp, np.full(32, now & ((1 << bits) - 1), UNSIGNED[bits]), mask)

        return handler
