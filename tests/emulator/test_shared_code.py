"""Segments that differ in nothing but their registers are compiled once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.translate import native
from tests.emulator.kernels import aligned, run_ptx

# Predicates, 16, 32 and 64 bits: what a segment reads, writes, and both.
TYPES = {"%sx": "b32", "%sy": "b32", "%sz": "b64", "%sh": "b16", "%sq": "pred"}
SEGMENT = """add.u32 {x}, {x}, {y};
mul.lo.u32 {y}, {x}, {x};
cvt.u64.u32 {z}, {y};
cvt.u16.u32 {h}, {x};
setp.lt.u32 {q}, {x}, {y};
@{q} add.u32 {y}, {y}, 5;
"""
SIZE = 4  # registers of each type


def run(choices: list[dict[str, int]], start: np.ndarray, note: str = "") -> list[bytes]:
    """What all registers hold after one segment for each choice of registers."""
    text = f"// {note}\n" + "".join(
        f".reg .{kind} {name}<{SIZE}>;\n" for name, kind in TYPES.items()
    )
    for k in range(SIZE):
        text += f"ld.global.b32 %sx{k}, [%rd1+{8 * k}]; ld.global.b32 %sy{k}, [%rd1+{8 * k + 4}];\n"
        text += f"mov.b64 %sz{k}, 0; mov.b16 %sh{k}, 0; setp.ne.u32 %sq{k}, 0, 0;\n"
    for k, choice in enumerate(choices):
        names = {name[2:]: f"{name}{choice[name]}" for name in TYPES}
        text += f"bra segment{k};\nsegment{k}:\n{SEGMENT.format(**names)}"
    text += "bra end;\nend:\n"
    for k in range(SIZE):
        text += f"selp.b32 %r1, 1, 0, %sq{k}; cvt.u32.u16 %r2, %sh{k};\n"
        text += f"st.global.v4.b32 [%rd2+{32 * k}], {{%sx{k}, %sy{k}, %r1, %r2}};\n"
        text += f"st.global.b64 [%rd2+{32 * k + 16}], %sz{k};\n"
    out = aligned(np.zeros(8 * SIZE, np.uint32))
    run_ptx(text, [aligned(start.copy()), out], block=(1, 1, 1))
    return [row.tobytes() for row in out.reshape(SIZE, 8)]


def expected(choices: list[dict[str, int]], start: np.ndarray) -> list[bytes]:
    """The same in Python."""
    word = 1 << 32
    x, y = ([int(v) for v in start[k::2]] for k in range(2))
    z, h, q = [0] * SIZE, [0] * SIZE, [0] * SIZE
    for at in choices:
        i, j = at["%sx"], at["%sy"]
        x[i] = (x[i] + y[j]) % word
        y[j] = x[i] * x[i] % word
        z[at["%sz"]], h[at["%sh"]], q[at["%sq"]] = y[j], x[i] % (1 << 16), int(x[i] < y[j])
        y[j] = (y[j] + 5 * q[at["%sq"]]) % word
    rows = zip(x, y, q, h, z, [0] * SIZE, [0] * SIZE, [0] * SIZE, strict=True)
    return [np.array(row, np.uint32).tobytes() for row in rows]


CHOICES = st.lists(
    st.fixed_dictionaries({name: st.integers(0, SIZE - 1) for name in TYPES}),
    min_size=1,
    max_size=6,
)


@settings(max_examples=20)
@given(choices=CHOICES, seed=st.integers(0, 2**32 - 1))
def test_each_segment_works_on_its_own_registers(choices: list[dict[str, int]], seed: int) -> None:
    """Whichever they are, of every width."""
    start = np.random.default_rng(seed).integers(0, 2**32, 2 * SIZE, dtype=np.uint32)
    assert run(choices, start) == expected(choices, start)


def test_other_registers_need_no_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel with four segments needs nothing but what one with one of them has compiled."""
    monkeypatch.setenv("FA4_EMULATOR_CACHE_DIR", "")
    monkeypatch.setattr(native, "_compiled", {})
    compiled: list[str] = []
    compile_module = native._compile_module

    def counted(text: str, names: list[str]) -> None:
        compiled.extend(names)
        compile_module(text, names)

    monkeypatch.setattr(native, "_compile_module", counted)
    start = np.arange(2 * SIZE, dtype=np.uint32)
    one = [dict.fromkeys(TYPES, 0)]
    assert run(one, start, "one") == expected(one, start)
    before = len(compiled)
    many = [{name: (k + n) % SIZE for n, name in enumerate(TYPES)} for k in range(SIZE)]
    assert run(many, start, "many") == expected(many, start)
    assert 0 < before == len(compiled)
