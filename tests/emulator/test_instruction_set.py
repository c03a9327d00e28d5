"""The instruction set is whole, and what it says of clocks."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from fa4.emulator.errors import UnsupportedInstruction
from tests.emulator.kernels import run_ptx

COUNT = """
import importlib, pkgutil
from fa4.emulator.isa.instruction_set import TABLE
import fa4.emulator.isa as isa
before = {name: len(rows) for name, rows in TABLE.items()}
for module in pkgutil.iter_modules(isa.__path__):
    importlib.import_module(f"fa4.emulator.isa.{module.name}")
print(len(before) > 100, [name for name, rows in TABLE.items() if len(rows) != before.get(name)])
"""


def test_no_module_with_rows_is_left_out() -> None:
    """Importing all of isa adds nothing to what its instruction set has brought."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout == "True []\n"


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
