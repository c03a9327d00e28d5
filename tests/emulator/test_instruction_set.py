"""The instruction set is whole, and what it says of clocks."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

import numpy as np
import pytest

from fa4.emulator import isa
from fa4.emulator.errors import UnsupportedInstruction
from fa4.emulator.isa.instruction_set import MODULES, TABLE
from tests.emulator.kernels import run_ptx


def modules_with_rows(package: ModuleType) -> set[str]:
    """Names of the modules of a package that hold rows of the table, imported one after another."""
    names = {module.name for module in pkgutil.iter_modules(package.__path__)}
    modules = {name: importlib.import_module(f"{package.__name__}.{name}") for name in names}
    return {name for name, module in modules.items() if getattr(module, "ROWS", None)}


def test_no_module_with_rows_is_left_out() -> None:
    """The instruction set names each of them once, and its table has all their rows, no other."""
    listed = [module.__name__.rpartition(".")[2] for module in MODULES]
    assert sorted(listed) == sorted(modules_with_rows(isa))
    rows = [row for module in MODULES for row in module.ROWS]
    assert len(rows) > 200 and all(module.ROWS for module in MODULES)
    assert sorted(map(id, rows)) == sorted(id(row) for same in TABLE.values() for row in same)


def test_every_row_was_added_in_its_own_module() -> None:
    """A row that one module adds to another's would be there only if both are imported."""
    shared = {"fa4.emulator.isa.formula"}  # makes rows of formulas for whoever asks
    for module in MODULES:
        homes = {row.function.__module__ for row in module.ROWS}
        assert homes <= {module.__name__, *shared}, module.__name__


@pytest.mark.parametrize("name", ["%clock", "%clock64", "%globaltimer", "%globaltimer_lo"])
def test_a_clock_is_read_anew(name: str) -> None:
    """Two reads in a row differ by the one step between them; its high half is 0 in short runs."""
    wide = name in ("%clock64", "%globaltimer")
    a, b, kind = ("%rd8", "%rd9", "u64") if wide else ("%r8", "%r9", "u32")
    narrow = "cvt.u32.u64 %r8, %rd8; cvt.u32.u64 %r9, %rd9;" if wide else ""
    out = np.zeros(3, np.uint32)
    run_ptx(
        f"mov.{kind} {a}, {name}; mov.{kind} {b}, {name}; {narrow} mov.u32 %r7, %clock_hi;"
        "st.global.b32 [%rd1], %r8; st.global.b32 [%rd1+4], %r9; st.global.b32 [%rd1+8], %r7;",
        [out],
        block=(1, 1, 1),
    )
    first, second, high = out.tolist()
    assert 0 < first < second == first + 1 and high == 0


def test_a_clock_is_moved_before_it_is_used() -> None:
    """As an operand of anything else it would be read at no particular time."""
    with pytest.raises(UnsupportedInstruction, match="special register %clock"):
        run_ptx("add.u32 %r8, %clock, 1;", [])
