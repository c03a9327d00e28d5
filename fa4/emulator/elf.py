"""Sections and symbols of a 64-bit little-endian ELF file: host objects and cubins.

The only reader of such files. It lies here because the emulator, which needs it, imports nothing
from outside itself.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

_MAGIC = b"\x7fELF\x02"  # the last byte: 64 bits
_HEADER_BYTES = 64
_SYMBOL_TABLE = 2  # SHT_SYMTAB
_GLOBAL = 1  # STB_GLOBAL
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")


class ElfSection(NamedTuple):
    """One section: where its bytes lie in the file. link: number of the section it refers to."""

    name: str
    kind: int
    offset: int
    size: int
    link: int


@dataclass(frozen=True)
class Symbols:
    """names: of all symbols, in the table's order. defined, undefined: of the global ones, those
    that the file defines and those that it needs from elsewhere."""

    names: tuple[str, ...]
    defined: frozenset[str]
    undefined: frozenset[str]


def read_sections(image: bytes) -> tuple[ElfSection, ...]:
    """The sections in order. Raises ValueError if it is not such a file."""
    if not image.startswith(_MAGIC) or len(image) < _HEADER_BYTES:
        raise ValueError(f"begins with {image[:4]!r}; expected a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", image, 40)
    entry_bytes, count, names_at = struct.unpack_from("<HHH", image, 58)
    rows = [_SECTION.unpack_from(image, table + number * entry_bytes) for number in range(count)]
    names = rows[names_at][4]
    return tuple(
        ElfSection(_text(image, names + name), kind, offset, size, link)
        for name, kind, _, _, offset, size, link, *_ in rows
    )


def read_symbols(image: bytes) -> Symbols:
    """The symbol table. Raises ValueError if it is not such a file."""
    sections = read_sections(image)
    names: list[str] = []
    defined: set[str] = set()
    undefined: set[str] = set()
    for section in sections:
        if section.kind != _SYMBOL_TABLE:
            continue
        texts = sections[section.link].offset
        table = image[section.offset : section.offset + section.size]
        for place, info, _, owner, _, _ in _SYMBOL.iter_unpack(table):
            name = _text(image, texts + place)
            names.append(name)
            if name and info >> 4 == _GLOBAL:
                (defined if owner else undefined).add(name)
    return Symbols(tuple(names), frozenset(defined), frozenset(undefined))


def _text(image: bytes, start: int) -> str:
    return image[start : image.index(b"\0", start)].decode()
