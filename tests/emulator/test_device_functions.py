"""Calls of a module's own functions: arguments, frames, recursion, addresses, divergence."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from fa4.emulator.errors import EmulationFailed, UnsupportedInstruction
from tests.emulator.kernels import HEADER, kinds, run_ptx

SOURCES = Path(__file__).with_name("device_functions.cu")

# Each lane calls f with its input and its lane number, and stores what comes back.
MAIN = """
.visible .entry kernel(.param .b64 input, .param .b64 output)
{
  .reg .pred %p<4>; .reg .b32 %r<16>; .reg .b64 %rd<16>;
  ld.param.b64 %rd1, [input]; ld.param.b64 %rd2, [output]; mov.u32 %r1, %tid.x;
  mad.wide.u32 %rd3, %r1, 4, %rd1; mad.wide.u32 %rd4, %r1, 4, %rd2; ld.global.u32 %r2, [%rd3];
  CALL
  st.global.u32 [%rd4], %r3;
  ret;
}
"""
CALL = """
  { .param .b32 a; .param .b32 b; .param .b32 r;
    st.param.b32 [a], %r2; st.param.b32 [b], %r1;
    call.uni (r), f, (a, b);
    ld.param.b32 %r3, [r]; }
"""


def called(functions: str, values: np.ndarray, call: str = CALL, **options: object) -> np.ndarray:
    """What f gives for each lane."""
    out = np.full_like(values, 0xDEAD)
    text = HEADER + functions + MAIN.replace("CALL", call)
    run_ptx(text, {"input": values, "output": out}, block=(len(values), 1, 1), **options)
    return out


def drawn(most: int, lanes: int = 64, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, most, lanes).astype(np.uint32)


HEAD = ".func (.param .b32 r) f(.param .b32 a, .param .b32 b)"
REGISTERS = ".reg .pred %p<4>; .reg .b32 %r<16>; .reg .b64 %rd<16>;"

# f(n, x) = x for n < 2, else f(n - 1, x) * 3 + f(n - 2, x + 1) + n: n and the first sum outlive
# calls, in a register and in a local variable.
RECURSIVE = f"""
{HEAD}
{{
  {REGISTERS} .local .align 4 .b32 kept[2];
  ld.param.b32 %r1, [a]; ld.param.b32 %r2, [b];
  mov.b32 %r9, %r2; setp.lt.u32 %p1, %r1, 2; @%p1 bra done;
  {{ .param .b32 x; .param .b32 y; .param .b32 z;
    sub.u32 %r3, %r1, 1; st.param.b32 [x], %r3; st.param.b32 [y], %r2;
    call.uni (z), f, (x, y); ld.param.b32 %r4, [z]; }}
  mul.lo.u32 %r4, %r4, 3; st.local.b32 [kept+4], %r4;
  {{ .param .b32 x; .param .b32 y; .param .b32 z;
    sub.u32 %r3, %r1, 2; st.param.b32 [x], %r3; add.u32 %r5, %r2, 1; st.param.b32 [y], %r5;
    call.uni (z), f, (x, y); ld.param.b32 %r6, [z]; }}
  ld.local.b32 %r7, [kept+4]; add.u32 %r9, %r6, %r7; add.u32 %r9, %r9, %r1;
done:
  st.param.b32 [r], %r9;
  ret;
}}
"""


def recursive(n: int, x: int) -> int:
    return x if n < 2 else recursive(n - 1, x) * 3 + recursive(n - 2, x + 1) + n


@pytest.mark.parametrize("schedule", ["fifo", "random", "adversarial"])
def test_recursion_to_another_depth_in_each_lane(schedule: str) -> None:
    values = drawn(9)
    out = called(RECURSIVE, values, schedule=schedule, seed=3)
    expected = [recursive(int(n), lane) for lane, n in enumerate(values)]
    assert out.tolist() == [value & 0xFFFFFFFF for value in expected]


def test_functions_that_call_one_another() -> None:
    """Whether n is even or odd, with n - 1 asked of the other one; each adds its own sign."""
    part = """
    .func (.param .b32 r) {name}(.param .b32 a, .param .b32 b)
    {{
      .reg .pred %p<4>; .reg .b32 %r<16>;
      ld.param.b32 %r1, [a]; ld.param.b32 %r2, [b];
      setp.eq.u32 %p1, %r1, 0; @%p1 st.param.b32 [r], %r2; @%p1 ret;
      {{ .param .b32 x; .param .b32 y; .param .b32 z;
        sub.u32 %r3, %r1, 1; st.param.b32 [x], %r3; st.param.b32 [y], %r2;
        call (z), {other}, (x, y); ld.param.b32 %r4, [z]; }}
      mad.lo.u32 %r4, %r4, {factor}, %r1; st.param.b32 [r], %r4;
      ret;
    }}
    """
    text = ".func (.param .b32 r) g(.param .b32 a, .param .b32 b);"
    text += part.format(name="f", other="g", factor=3) + part.format(name="g", other="f", factor=5)
    values = drawn(12)
    expected = []
    for lane, n in enumerate(values):
        total = lane
        for left in range(1, int(n) + 1):
            total = total * (3 if (int(n) - left) % 2 == 0 else 5) + left
        expected.append(total & 0xFFFFFFFF)
    assert called(text, values).tolist() == expected


BY_ADDRESS = """
  { .param .b32 a; .param .b32 b; .param .b32 r;
    and.b32 %r4, %r2, 3; mad.wide.u32 %rd5, %r4, 8, table; ld.global.b64 %rd6, [%rd5];
    setp.ne.u32 %p1, %r4, 3; mov.u32 %r3, 77;
    st.param.b32 [a], %r2; st.param.b32 [b], %r1; st.param.b32 [r], %r3;
    prototype: .callprototype (.param .b32 _) _ (.param .b32 _, .param .b32 _);
    @%p1 call (r), %rd6, (a, b), prototype;
    ld.param.b32 %r3, [r]; }
"""
SIMPLE = (
    "{{ .reg .b32 %r<9>; ld.param.b32 %r1, [a]; ld.param.b32 %r2, [b]; {} st.param.b32 [r], %r1; }}"
)


def test_addresses_of_functions() -> None:
    """In a table; each lane calls its own, some none, and all go on together."""
    text = f"""
    {HEAD} {SIMPLE.format("add.u32 %r1, %r1, %r2;")}
    {HEAD.replace("f(", "g(")} {SIMPLE.format("mul.lo.u32 %r1, %r1, %r2;")}
    {HEAD.replace("f(", "h(")} {SIMPLE.format("xor.b32 %r1, %r1, %r2;")}
    .global .align 8 .u64 table[4] = {{f, g, h}};
    """
    values = drawn(1000)
    call = BY_ADDRESS + "activemask.b32 %r5; setp.ne.u32 %p2, %r5, -1; @%p2 trap;"
    lanes = np.arange(64, dtype=np.uint32)
    choices = [values + lanes, values * lanes, values ^ lanes, np.full_like(values, 77)]
    assert called(text, values, call).tolist() == np.choose(values & 3, choices).tolist()
    wrong = BY_ADDRESS.replace("setp.ne", "setp.ge")
    with pytest.raises(EmulationFailed, match="a call of 0x0, no function"):
        called(text, values, wrong)
    other = text.replace("g(.param .b32 a,", "g(.param .b64 a,")
    with pytest.raises(EmulationFailed, match="a call of g with arguments or results of other"):
        called(other, values, call)


def test_arguments_of_many_bytes() -> None:
    """A struct there and back, in pieces of other widths, and through addresses of its parts."""
    text = (
        """
    .func (.param .align 16 .b8 r[24]) g(.param .align 16 .b8 a[24], .param .b8 b)
    {
      .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .b16 %h<5>; .local .align 8 .b8 copy[24];
      ld.param.v2.b64 {%rd1, %rd2}, [a]; ld.param.b32 %r1, [a+20]; ld.param.u8 %h1, [b];
      cvt.u32.u16 %r2, %h1; add.u32 %r1, %r1, %r2;
      mov.u64 %rd4, copy; cvta.local.u64 %rd5, %rd4; st.b64 [%rd5+8], %rd1;
      st.local.b64 [%rd4], %rd2;
      ld.local.b64 %rd6, [copy]; st.param.b64 [r], %rd6; ld.b64 %rd7, [%rd5+8];
      st.param.v2.b64 [r], {%rd6, %rd7}; st.param.b32 [r+16], %r1;
      ret;
    }
    """
        + f"""
    {HEAD}
    {{
      {REGISTERS} .reg .b16 %h<3>;
      ld.param.b32 %r1, [a]; ld.param.b32 %r2, [b]; add.u32 %r3, %r1, %r2; mul.lo.u32 %r4, %r3, %r3;
      {{ .param .align 16 .b8 x[24]; .param .b8 y; .param .align 16 .b8 z[24];
        st.param.v4.b32 [x], {{%r1, %r2, %r3, %r4}}; st.param.b32 [x+20], %r1; st.param.b8 [y], 200;
        call.uni (z), g, (x, y);
        ld.param.v4.b32 {{%r5, %r6, %r7, %r8}}, [z]; ld.param.b32 %r9, [z+16]; }}
      mad.lo.u32 %r5, %r5, 2, %r6; mad.lo.u32 %r5, %r7, 3, %r5; mad.lo.u32 %r5, %r8, 5, %r5;
      mad.lo.u32 %r5, %r9, 7, %r5; st.param.b32 [r], %r5; ret;
    }}
    """
    )
    n, x = drawn(1000), np.arange(64, dtype=np.uint32)
    s = n + x
    expected = s * 2 + s * s + 3 * n + 5 * x + 7 * (n + 200)
    assert called(text, n).tolist() == expected.tolist()


def test_all_lanes_meet_behind_a_call_in_a_branch() -> None:
    """A barrier in a function; lanes that left the kernel in it are not waited for."""
    text = f"""
    {HEAD}
    {{
      {REGISTERS} ld.param.b32 %r1, [a];
      setp.eq.u32 %p1, %r1, 0; @%p1 exit;
      setp.gt.u32 %p2, %r1, 2; @%p2 bra big;
      add.u32 %r1, %r1, 10; bra join;
    big: add.u32 %r1, %r1, 20;
    join: activemask.b32 %r2; st.param.b32 [r], %r2; bar.sync 0; ret;
    }}
    """
    values = drawn(5, 32)
    out = called(text, values)
    alive = sum(1 << lane for lane in range(32) if values[lane])
    assert out.tolist() == [alive if value else 0xDEAD for value in values]


SHARED = f"""
.shared .align 4 .b32 tile[64];
{HEAD}
{{
  {REGISTERS} ld.param.b32 %r1, [a]; ld.param.b32 %r2, [b];
  mov.u32 %r3, tile; mad.lo.u32 %r4, %r2, 4, %r3; st.shared.b32 [%r4], %r1;
  bar.sync 0;
  xor.b32 %r5, %r2, 63; mad.lo.u32 %r4, %r5, 4, %r3; ld.shared.b32 %r6, [%r4];
  st.param.b32 [r], %r6; ret;
}}
"""


def test_a_fault_in_a_function_names_its_line() -> None:
    values = drawn(1000)
    assert called(SHARED, values).tolist() == values[::-1].tolist()
    text = HEADER + SHARED.replace("bar.sync 0;", "") + MAIN.replace("CALL", CALL)
    arrays = {"input": values, "output": np.zeros_like(values)}
    report = run_ptx(text, arrays, block=(64, 1, 1), collect=True)
    race = next(one for one in report.findings if one.kind == "race")
    assert race.text == "st.shared.b32 [%r4], %r1"
    assert race.text in text.split("\n")[race.line - 1]


def test_recursion_without_end_is_a_finding() -> None:
    text = RECURSIVE.replace("@%p1 bra done;", "")
    with pytest.raises(EmulationFailed, match=r"stack overflow: the call of f inside 3.. others"):
        called(text, drawn(9))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (CALL.replace("(a, b)", "(a, %r1)"), "%r1 as an argument: only .param variables"),
        (CALL.replace("(a, b)", "(a)"), "arguments of 4 bytes, where f has others"),
        (CALL.replace(".param .b32 r", ".param .b64 r"), "results of 8 bytes"),
        (CALL.replace("f,", "malloc,"), "a call of malloc, of which the module has no body"),
    ],
)
def test_what_is_refused(call: str, reason: str) -> None:
    text = ".extern .func (.param .b64 r) malloc(.param .b64 a);" + RECURSIVE
    with pytest.raises(UnsupportedInstruction, match=reason):
        called(text, drawn(9), call)


def test_functions_that_no_kernel_calls_are_not_looked_at() -> None:
    text = RECURSIVE + ".func unused() { tex.1d.v4.s32.s32 {%r1, %r2, %r3, %r4}, [x, {%r5}]; }"
    text = text.replace("{ tex", "{ .reg .b32 %r<9>; .reg .b64 x; tex")
    values = drawn(2)
    assert called(text, values).tolist() == list(range(64))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_what_nvcc_makes_of_noinline_functions(tmp_path: Path) -> None:
    """Structs by value, recursion with a pointer to the caller's variable, tables of functions."""
    target = tmp_path / "functions.ptx"
    command = ["nvcc", "-arch=sm_90a", "-ptx", "-o", str(target), str(SOURCES)]
    subprocess.run(command, check=True)
    floats, integers = np.zeros(64, np.float32), np.zeros(64, np.int32)
    report = run_ptx(target.read_text(), {"o": floats, "d": integers}, block=(64, 1, 1))
    assert not kinds(report)

    def factorial(n: int, depth: list[int]) -> int:
        here = [n]
        depth[0] += 1
        if n < 2:
            return 1
        return factorial(n - 1, here) * n + here[0]

    for t in range(64):
        depth = [0]
        assert integers[t] == factorial(t % 7, depth) * 100 + depth[0]
        parts = [(t & 3) + k for k in range(3)]
        assert floats[t] == 3 * t + parts[t % 3] + (t + 1 if t & 1 else t * t)
