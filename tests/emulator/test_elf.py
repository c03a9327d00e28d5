"""The reader of ELF files: sections and symbols of an object, and what it refuses."""

from __future__ import annotations

import llvmlite.binding as llvm
import pytest

from fa4.emulator.elf import read_sections, read_symbols

TEXT = """
declare i32 @outside(i32)
define internal i32 @hidden(i32 %x) noinline {
  ret i32 %x
}
define i32 @shown(i32 %x) {
  %y = call i32 @hidden(i32 %x)
  %z = call i32 @outside(i32 %y)
  ret i32 %z
}
"""


@pytest.fixture(scope="module")
def image() -> bytes:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    found: bytes = machine.emit_object(llvm.parse_assembly(TEXT))
    return found


def test_symbols(image: bytes) -> None:
    """All by name and in order; global ones by who defines them; local ones by neither."""
    symbols = read_symbols(image)
    assert "shown" in symbols.defined and "outside" in symbols.undefined
    assert "hidden" not in symbols.defined | symbols.undefined
    assert symbols.names[0] == "" and {"shown", "outside"} <= set(symbols.names)


def test_sections(image: bytes) -> None:
    """Where the bytes lie: the table of names holds the symbols' names."""
    sections = {section.name: section for section in read_sections(image)}
    table = sections[".strtab"]
    assert b"\0shown\0" in image[table.offset : table.offset + table.size]
    assert any(name.endswith("text") and one.size for name, one in sections.items())


@pytest.mark.parametrize(
    "wrong", [b"", b".version 8.8", b"\x7fELF\x01" + bytes(100), b"\x7fELF\x02"]
)
def test_other_files_are_refused(wrong: bytes) -> None:
    with pytest.raises(ValueError, match="expected a 64-bit ELF file"):
        read_sections(wrong)
