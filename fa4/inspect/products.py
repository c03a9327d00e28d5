"""Hopper's products in machine code: has ptxas left them, and what runs beside them, in place?

Where registers do not suffice for all products that are under way, ptxas waits for each of their
instructions (its message C7512), and the tensor core idles. It moves arithmetic behind a wait for
products that the PTX has beside them. And where uniform registers do not suffice for descriptors,
threads compute them and move each there, before the product that takes it. NVIDIA does not document
the encoding; that of these instructions was read beside nvdisasm's text.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fa4.emulator.elf import read_sections

_INSTRUCTION_BYTES = 16
# The lowest 12 bits: HGMMA of 16-bit types, QGMMA of 8-bit types; A in shared memory, in registers.
_OPCODES = (0x9F0, 0xDF0, 0x9F3, 0xDF3)
_NO_GROUP = 7  # in bits 84 to 86, of an instruction that does not end a group
_TO_UNIFORM = 0x2CA  # R2UR
MOST_MOVED = 0.4  # moves for a product: of kernels with uniform descriptors up to 0.3
_MUFU, _EX2 = 0x308, 2  # the function is in bits 74 to 77
_WARPGROUP, _DEPBAR = 0x9C5, 1  # bit 80: it waits for products
_PRODUCT, _WAIT, _EXPONENTIAL = "product", "wait", "exponential"
_STEPS = {"wgmma.mma_async": _PRODUCT, "wgmma.wait_group": _WAIT, "ex2.approx": _EXPONENTIAL}
_STEP = re.compile("|".join(map(re.escape, _STEPS)))
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(")


@dataclass(frozen=True)
class KernelProducts:
    """wgmma of a kernel: instructions and groups of the machine code, and those of its PTX.

    exponentials: those with products of their own warp under way, which are waited for behind them.
    moves: of words from threads' registers to uniform ones, between products of one group.
    """

    instructions: int
    groups: int
    ptx_instructions: int
    ptx_groups: int
    exponentials: int = 0
    ptx_exponentials: int = 0
    moves: int = 0

    @property
    def wait(self) -> bool:
        """Does ptxas wait for each instruction, where the PTX has groups of several?"""
        grouped = self.ptx_instructions > self.ptx_groups
        return grouped and 0 < self.instructions == self.groups

    @property
    def late(self) -> int:
        """Exponentials that ptxas has moved behind the wait for products beside which they were."""
        return max(0, self.ptx_exponentials - self.exponentials) if self.instructions else 0

    @property
    def by_threads(self) -> bool:
        """Do threads compute descriptors: do many products of a group wait for such moves?"""
        return self.moves > MOST_MOVED * (self.instructions - self.groups) > 0


def read_products(cubin: bytes, ptx: str) -> dict[str, KernelProducts]:
    """Of each kernel of a module, by name. Raises ValueError if the cubin is none."""
    try:
        sections = read_sections(cubin)
    except ValueError as error:
        raise ValueError(f"not a cubin: {error}") from None
    code = {
        x.name.removeprefix(".text."): cubin[x.offset : x.offset + x.size]
        for x in sections
        if x.name.startswith(".text.")
    }
    return {
        name: KernelProducts(
            *_count(code.get(name, b"")), text.count("wgmma.mma_async"),
            text.count("wgmma.commit_"), count_beside(_steps(code.get(name, b""))),
            count_beside(_STEPS[found[0]] for found in _STEP.finditer(text)),
            _moves(code.get(name, b"")),
        )
        for name, text in _kernels(ptx)
    }  # fmt: skip


def _kernels(ptx: str) -> Iterator[tuple[str, str]]:
    """(name, text) of each kernel, with what lies between it and the next one."""
    entries = list(_ENTRY.finditer(ptx))
    ends = [entry.start() for entry in entries[1:]] + [len(ptx)]
    for entry, end in zip(entries, ends, strict=True):
        yield entry[1], ptx[entry.end() : end]


def count_beside(steps: Iterable[str]) -> int:
    """Exponentials behind which a wait comes before the next product, in the order of the code."""
    beside = waiting = 0
    for step in steps:
        if step == _EXPONENTIAL:
            waiting += 1
        else:
            beside += waiting * (step == _WAIT)
            waiting = 0
    return beside


def _instructions(code: bytes) -> Iterator[tuple[int, int]]:
    """(opcode, bits 64 to 95) of each."""
    whole = len(code) // _INSTRUCTION_BYTES * _INSTRUCTION_BYTES
    for low, _, high, _ in struct.iter_unpack("<4I", code[:whole]):
        yield low & 0xFFF, high


def _steps(code: bytes) -> Iterator[str]:
    """Products, waits for them and exponentials of machine code."""
    for opcode, high in _instructions(code):
        if opcode in _OPCODES:
            yield _PRODUCT
        elif opcode == _WARPGROUP and high >> 16 & _DEPBAR:
            yield _WAIT
        elif opcode == _MUFU and high >> 10 & 0xF == _EX2:
            yield _EXPONENTIAL


def _moves(code: bytes) -> int:
    """Moves to uniform registers between products of one group."""
    found, within = 0, False
    for opcode, high in _instructions(code):
        if opcode in _OPCODES:
            within = high >> 20 & 7 == _NO_GROUP
        found += within and opcode == _TO_UNIFORM
    return found


def _count(code: bytes) -> tuple[int, int]:
    """(instructions, groups) in machine code."""
    products = [high for opcode, high in _instructions(code) if opcode in _OPCODES]
    return len(products), sum(high >> 20 & 7 != _NO_GROUP for high in products)
