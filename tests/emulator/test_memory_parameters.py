"""Kernel parameters, and the calls of vprintf and __assertfail."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from fa4.emulator.errors import EmulationFailed, UnsupportedInstruction
from tests.emulator.kernels import HEADER, aligned, kinds, module_text, run_ptx

BLOCK = bytes(range(0x70, 0xB0))
KINDS = ("b8", "u8", "u16", "b32", "f32", "u64", "f64", "b64", "b128")
FORMS = [
    (vector, kind)
    for vector in ("", ".v2", ".v4")
    for kind in KINDS
    if int(vector[2:] or 1) * int(kind[1:]) <= 128
]
REGISTERS = {1: "%h", 2: "%h", 4: "%r", 8: "%rd", 16: "%q"}


@pytest.mark.parametrize("offset", [0, 16, 32])
@pytest.mark.parametrize(("vector", "kind"), FORMS)
@pytest.mark.parametrize("indirect", [False, True])
def test_every_width(offset: int, vector: str, kind: str, indirect: bool) -> None:
    size, count = int(kind[1:]) // 8, int(vector[2:] or 1)
    register = {"f32": "%f", "f64": "%fd"}.get(kind, REGISTERS[size])
    names = [f"{register}{k + 4 if register != '%q' else 1}" for k in range(count)]
    listed = "{" + ", ".join(names) + "}" if vector else names[0]
    address = f"[%rd9+{offset}]" if indirect else f"[block0+{offset}]"
    body = f"mov.b64 %rd9, block0; ld.param{vector}.{kind} {listed}, {address};"
    body += "".join(f"st.global.b{8 * size} [%rd1+{k * size}], {n};" for k, n in enumerate(names))
    out = aligned(np.zeros(2, np.uint64))
    run_ptx(body, [out], blocks=[BLOCK])
    assert out.tobytes()[: size * count] == BLOCK[offset : offset + size * count]


@pytest.mark.parametrize("kind", ["s8", "s16", "u16", "s32"])
@pytest.mark.parametrize("indirect", [False, True])
def test_signed_parameters_are_extended(kind: str, indirect: bool) -> None:
    block = struct.pack("<q", -3)
    address = "[%rd9]" if indirect else "[block0]"
    out = np.zeros(1, np.int64)
    run_ptx(
        f"mov.b64 %rd9, block0; ld.param.{kind} %rd8, {address}; st.global.b64 [%rd1], %rd8;",
        [out], blocks=[block],
    )  # fmt: skip
    assert out[0] == (-3 if kind[0] == "s" else 65533)


def test_each_lane_reads_its_own_parameter() -> None:
    block = np.arange(32, dtype=np.uint32) * 3 + 1
    out = np.zeros(32, np.uint32)
    body = """
      mov.u32 %r1, %tid.x; mov.b64 %rd9, block0; mad.wide.u32 %rd9, %r1, 4, %rd9;
      ld.param.b32 %r2, [%rd9]; mad.wide.u32 %rd10, %r1, 4, %rd1; st.global.b32 [%rd10], %r2;
    """
    run_ptx(body, [out], blocks=[block.tobytes()])
    np.testing.assert_array_equal(out, block)


def test_a_guarded_load_keeps_the_old_value() -> None:
    out = np.zeros(32, np.uint32)
    body = """
      mov.u32 %r1, %tid.x; mov.u32 %r2, 5; setp.lt.u32 %p1, %r1, 4;
      @%p1 ld.param.b32 %r2, [block0]; mad.wide.u32 %rd9, %r1, 4, %rd1; st.global.b32 [%rd9], %r2;
    """
    run_ptx(body, [out], blocks=[(9).to_bytes(8, "little")])
    assert out.tolist() == [9] * 4 + [5] * 28


def call_module(body: str, text: str) -> str:
    """A module whose kernel has the string `text` and may call vprintf and __assertfail."""
    data = text.encode() + b"\0"
    listed = ", ".join(str(byte) for byte in data)
    return f"""{HEADER}
.extern .func (.param .b32 func_retval0) vprintf (.param .b64 p0, .param .b64 p1);
.extern .func __assertfail (.param .b64 p0, .param .b64 p1, .param .b32 p2, .param .b64 p3,
  .param .b64 p4);
.global .align 1 .b8 text[{len(data)}] = {{{listed}}};
.visible .entry kernel(.param .b64 out)
{{
  .local .align 8 .b8 depot[64];
  .reg .pred %p<8>; .reg .b32 %r<32>; .reg .b64 %rd<32>; .reg .f64 %fd<8>;
  ld.param.b64 %rd1, [out];
  mov.u32 %r1, %tid.x; mov.b64 %rd2, depot; cvta.local.u64 %rd2, %rd2;
  mov.b64 %rd3, text; cvta.global.u64 %rd3, %rd3;
  {body}
  ret;
}}
"""


PRINT = """
  st.local.b32 [depot], %r1; st.local.f64 [depot+8], 0d3FF8000000000000;
  st.local.b64 [depot+16], %rd3; mov.u32 %r4, -7; st.local.b32 [depot+24], %r4;
  setp.gt.u32 %p1, %r1, 1; @%p1 bra done;
  { .param .b64 param0; st.param.b64 [param0], %rd3;
    .param .b64 param1; st.param.b64 [param1], %rd2;
    .param .b32 retval0;
    call.uni (retval0), vprintf, (param0, param1);
    ld.param.b32 %r2, [retval0]; }
  mad.wide.u32 %rd4, %r1, 4, %rd1; st.global.b32 [%rd4], %r2;
done:
"""


def test_vprintf_formats_like_c() -> None:
    form = "t=%2d %.3f|%-30s|%x%%\n"
    out = np.zeros(4, np.uint32)
    report = run_ptx(call_module(PRINT, form), [out])
    expected = [f"t={lane:2d} 1.500|{form:<30}|fffffff9%\n" for lane in range(2)]
    assert report.output == expected
    assert out.tolist() == [4, 4, 0, 0]


def test_assertfail_ends_the_run() -> None:
    body = """
      { .param .b64 a0; st.param.b64 [a0], %rd3; .param .b64 a1; st.param.b64 [a1], %rd3;
        .param .b32 a2; st.param.b32 [a2], 12; .param .b64 a3; st.param.b64 [a3], %rd3;
        .param .b64 a4; st.param.b64 [a4], 1;
        call.uni __assertfail, (a0, a1, a2, a3, a4); }
      st.global.b32 [%rd1], %r1;
    """
    out = np.zeros(1, np.uint32)
    with pytest.raises(EmulationFailed, match="x < y:12: x < y: assertion `x < y` failed"):
        run_ptx(call_module(body, "x < y"), [out])
    report = run_ptx(call_module(body, "x < y"), [out], collect=True)
    assert kinds(report) == {"assert"}


def test_other_functions_are_refused() -> None:
    text = f"""{HEADER}
    .extern .func helper ();
    .visible .entry kernel() {{ call.uni helper, (); ret; }}
    """
    with pytest.raises(UnsupportedInstruction, match="helper"):
        run_ptx(text)


def test_an_address_of_32_bits_becomes_a_generic_one() -> None:
    """As Triton passes its host tensor descriptors on."""
    out = np.zeros(1, np.uint64)
    body = """
      mov.b32 %r1, block0; add.u32 %r1, %r1, 8; cvt.u64.u32 %rd9, %r1;
      cvta.param.u64 %rd10, %rd9; ld.b64 %rd11, [%rd10]; st.global.b64 [%rd1], %rd11;
    """
    run_ptx(body, [out], blocks=[BLOCK])
    assert out.tobytes() == BLOCK[8:16]


@pytest.mark.parametrize("space", ["param", "local", "const"])
@pytest.mark.parametrize("wide", [False, True])
def test_addresses_of_32_bits(space: str, wide: bool) -> None:
    """In a register of either width, without cvta, forth with cvta and back with cvta.to."""
    where = {"param": "block0", "local": "depot", "const": "table"}[space]
    plain = "cvt.u64.u32 %rd9, %r1;" if wide else ""
    register = "%rd9" if wide else "%r1"
    body = f"""
      st.local.b32 [depot+4], 0x77767574; mov.u32 %r1, {where};
      {plain} ld.{space}.b32 %r2, [{register}+4]; st.global.b32 [%rd1], %r2;
      cvt.u64.u32 %rd9, %r1; cvta.{space}.u64 %rd10, %rd9; ld.b32 %r3, [%rd10+4];
      cvta.to.{space}.u64 %rd11, %rd10; cvt.u32.u64 %r4, %rd11; ld.{space}.b32 %r5, [%r4+4];
      st.global.v2.b32 [%rd1+8], {{%r3, %r5}};
    """
    out = np.zeros(4, np.uint32)
    declarations = ".local .align 8 .b8 other[24]; .local .align 8 .b8 depot[8];"
    text = module_text(body, 1, [len(BLOCK)], declarations).replace(
        ".visible", ".const .align 4 .b32 table[2] = {1, 0x77767574};\n.visible"
    )
    run_ptx(text, [out], blocks=[BLOCK])
    assert out.tolist() == [0x77767574, 0, 0x77767574, 0x77767574]


def test_a_local_address_of_32_bits_is_that_of_each_lane() -> None:
    """As Triton's device_print hands over its arguments."""
    print_it = PRINT.replace("%rd2;", "%rd5;").replace(
        "st.local",
        "mov.b32 %r5, depot; cvt.u64.u32 %rd6, %r5; cvta.local.u64 %rd5, %rd6; st.local",
        1,
    )
    out = np.zeros(4, np.uint32)
    report = run_ptx(call_module(print_it, "%d %f"), [out])
    assert report.output == ["0 1.500000", "1 1.500000"]


def test_beyond_the_parameters() -> None:
    body = "mov.u32 %r1, block0; ld.param.b64 %rd9, [%r1+64];"
    with pytest.raises(EmulationFailed, match="past the end of kernel parameters"):
        run_ptx(body, [np.zeros(1, np.uint64)], blocks=[BLOCK])
