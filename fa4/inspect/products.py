"""Hopper's products in machine code: has ptxas left them in the groups of the source?

Where registers do not suffice for all products that are under way, ptxas waits for each of their
instructions (its message C7512), and the tensor core idles. NVIDIA does not document the encoding;
that of these instructions was read beside nvdisasm's text.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from fa4.emulator.elf import read_sections

_INSTRUCTION_BYTES = 16
# The lowest 12 bits: HGMMA of 16-bit types, QGMMA of 8-bit types; A in shared memory, in registers.
_OPCODES = (0x9F0, 0xDF0, 0x9F3, 0xDF3)
_NO_GROUP = 7  # in bits 84 to 86, of an instruction that does not end a group
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(")


@dataclass(frozen=True)
class KernelProducts:
    """wgmma of a kernel: instructions and groups of the machine code, and those of its PTX."""

    instructions: int
    groups: int
    ptx_instructions: int
    ptx_groups: int

    @property
    def wait(self) -> bool:
        """Does ptxas wait for each instruction, where the PTX has groups of several?"""
        grouped = self.ptx_instructions > self.ptx_groups
        return grouped and 0 < self.instructions == self.groups


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
            *_count(code.get(name, b"")), text.count("wgmma.mma_async"), text.count("wgmma.commit_")
        )
        for name, text in _kernels(ptx)
    }


def _kernels(ptx: str) -> Iterator[tuple[str, str]]:
    """(name, text) of each kernel, with what lies between it and the next one."""
    entries = list(_ENTRY.finditer(ptx))
    ends = [entry.start() for entry in entries[1:]] + [len(ptx)]
    for entry, end in zip(entries, ends, strict=True):
        yield entry[1], ptx[entry.end() : end]


def _count(code: bytes) -> tuple[int, int]:
    """(instructions, groups) in machine code."""
    instructions = groups = 0
    whole = len(code) // _INSTRUCTION_BYTES * _INSTRUCTION_BYTES
    for low, _, high, _ in struct.iter_unpack("<4I", code[:whole]):
        if low & 0xFFF in _OPCODES:
            instructions += 1
            groups += high >> 20 & 7 != _NO_GROUP
    return instructions, groups
