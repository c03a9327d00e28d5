"""The symbols of an ELF object file: what it defines and what it needs."""

from __future__ import annotations

import struct
from dataclasses import dataclass

_SYMBOL_TABLE = 2  # SHT_SYMTAB
_GLOBAL = 1  # STB_GLOBAL
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")


@dataclass(frozen=True)
class Symbols:
    """Names of the global symbols that an object file defines, and of those it leaves undefined."""

    defined: frozenset[str]
    undefined: frozenset[str]


def read_symbols(image: bytes) -> Symbols:
    """Reads the symbol table of a 64-bit little-endian ELF object."""
    (table_offset,) = struct.unpack_from("<Q", image, 40)
    entry_bytes, count = struct.unpack_from("<HH", image, 58)
    sections = [_SECTION.unpack_from(image, table_offset + i * entry_bytes) for i in range(count)]
    defined: set[str] = set()
    undefined: set[str] = set()
    for _, kind, _, _, offset, size, link, *_ in sections:
        if kind != _SYMBOL_TABLE:
            continue
        names = sections[link][4]
        for name_offset, info, _, section, _, _ in _SYMBOL.iter_unpack(
            image[offset : offset + size]
        ):
            start = names + name_offset
            name = image[start : image.index(b"\0", start)].decode()
            if name and info >> 4 == _GLOBAL:
                (defined if section else undefined).add(name)
    return Symbols(frozenset(defined), frozenset(undefined))
