"""The PTX parser: random modules with their tree, tables of forms and errors, damaged texts."""

from __future__ import annotations

import re
import struct
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.errors import PtxError
from fa4.emulator.ptx.parser import parse
from fa4.emulator.ptx.syntax import (
    Address,
    FloatBits,
    Integer,
    Kernel,
    Module,
    Pair,
    Register,
    Sink,
    Symbol,
    Variable,
    Vector,
)
from tests.emulator.ptx_texts import HEAD, kernels

SAMPLE = (
    HEAD
    + """
.extern .func  (.param .b32 func_retval0) vprintf
(
	.param .b64 vprintf_param_0,
	.param .b64 vprintf_param_1
)
;
.func (.param .align 8 .b8 result[16]) helper(.param .b32 n) .noreturn;
.global .align 1 .b8 format[4] = {37, 100, 10};
.extern .shared .align 1024 .b8 smem[];
	// .globl	k
.visible .entry k(
	.param .align 64 .b8 k_param_0[128],
	.param .u64 .ptr .global .align 8 k_param_1
)
.reqntid 128, 1, 1
.minnctapersm 1
.reqnctapercluster 2
.explicitcluster
.pragma "nounroll";
{
	.reg .pred 	%p<3>;
	.reg .b32 	%r<10>, lone;
	.reg .b64 	%rd<4>;
	.loc	1 5 0
	mov.b64 	%rd1, k_param_0;
	elect.sync 	_|%p1, -1;
	// begin inline asm
	{
		.reg .pred P1;
		LAB_WAIT:
		mbarrier.try_wait.parity.shared::cta.b64 P1, [%r1], %r2;
		@P1 bra DONE;
		bra LAB_WAIT;
		DONE:
	}
	// end inline asm
	{ .reg .pred P1; LAB_WAIT: mbarrier.try_wait.parity.shared::cta.b64 P1, [%r3 + 8], 0;
	@P1 bra DONE; bra LAB_WAIT; DONE: }
	.loc	1 9 4, function_name $L__info0, inlined_at 1 5 0
	@!%p1 bra 	$L__BB0_2;
	cp.async.bulk.tensor.2d.shared::cta.global.tile [%r1], [%rd1, {%r1, 0}], [%r2];
	{ // callseq 0, 0
	.param .b64 	param0;
	.param .b32 	retval0;
	st.param.b64 	[param0], %rd2;
	call.uni (retval0), vprintf, (param0, %rd3);
	} // callseq 0
	tcgen05.wait::ld.sync.aligned;
targets: .branchtargets $L__BB0_2, $L__BB0_3;
	brx.idx %r1, targets;
$L__BB0_2:
	bar.sync 	0;
$L__BB0_3:
	ret;

}
.file	1 "/tmp/kernel.py"
.section	.debug_str
{
$L__info0: .b8 72,0
}
"""
)


def in_kernel(body: str, module: str = "", header: str = "()") -> str:
    return f"{HEAD}{module}\n.visible .entry k{header}\n{{\n{body}\n}}\n"


def kernel_of(body: str, module: str = "", header: str = "()") -> Kernel:
    return parse(in_kernel(body, module, header)).kernels["k"]


DECLARED = """
.reg .pred P1, p; .reg .b32 %r<4>; .reg .b64 %rd<4>; .reg .f32 f;
.shared .align 8 .b8 buffer[64];
"""


def operand_of(written: str):
    """The one operand `written`, among registers, a buffer and a label."""
    body = f"{DECLARED} $L__BB0_1: mov.b32 {written};"
    (operand,) = kernel_of(body).instructions[0].operands
    return operand


# ---- whole kernels -------------------------------------------------------------------------------


@given(kernels())
@settings(max_examples=120)
def test_random_kernels_come_back_as_the_tree_they_were_written_from(drawn):
    text, expected = drawn
    kernel = parse(text).kernels["k"]
    squeezed = [
        replace(each, text=re.sub(r"\s", "", each.text), line=each.written_line, shared_line=0)
        for each in kernel.instructions
    ]
    assert replace(kernel, instructions=tuple(squeezed)) == expected
    numbers = [each.line for each in kernel.instructions]
    assert len(set(numbers)) == len(numbers)


def test_the_sample_module():
    module = parse(SAMPLE)
    assert (module.version, module.target, module.address_size) == ((8, 8), "sm_100a", 64)
    assert module.files == {1: "/tmp/kernel.py"}
    assert module.text == SAMPLE
    assert module.variables == (
        Variable("format", "global", "b8", 1, 4, initial=b"%d\n\0"),
        Variable("smem", "shared", "b8", 1024, None, extern=True),
    )
    printf, helper = module.functions["vprintf"], module.functions["helper"]
    assert [v.size_bytes for v in printf.parameters] == [8, 8]
    assert printf.results == (Variable("func_retval0", "param", "b32", 4, 4),)
    assert helper.results == (Variable("result", "param", "b8", 8, 16),)
    assert helper.directives == {"noreturn": ()}
    assert not (printf.has_body or helper.has_body or printf.is_entry)
    assert list(module.kernels) == ["k"]


def test_the_sample_kernel():
    kernel = parse(SAMPLE).kernels["k"]
    assert kernel.is_entry
    assert kernel.has_body
    assert kernel.parameters == (
        Variable("k_param_0", "param", "b8", 64, 128),
        Variable("k_param_1", "param", "u64", 8, 8),
    )
    assert kernel.directives == {
        "reqntid": (128, 1, 1),
        "minnctapersm": (1,),
        "reqnctapercluster": (2, 1, 1),
        "explicitcluster": (),
    }
    assert [v.name for v in kernel.variables] == ["param0", "retval0"]
    assert kernel.registers["%r9"] == "b32"
    assert kernel.registers["P1"] == kernel.registers["P1@2"] == "pred"
    assert len(kernel.registers) == 3 + 11 + 4 + 2
    assert kernel.labels == {
        **{"LAB_WAIT": 2, "DONE": 5, "LAB_WAIT@2": 5, "DONE@2": 8},
        **{"$L__BB0_2": 14, "$L__BB0_3": 15},
    }
    assert kernel.branch_targets == {"targets": ("$L__BB0_2", "$L__BB0_3")}
    texts = [each.text for each in kernel.instructions]
    assert texts[5] == "mbarrier.try_wait.parity.shared::cta.b64 P1, [%r3+8], 0"
    assert texts[8] == "@!%p1 bra $L__BB0_2"
    wait = kernel.instructions[2]
    assert wait.parts == ("mbarrier", "try_wait", "parity", "shared::cta", "b64")
    assert SAMPLE.split("\n")[wait.line - 1].strip().startswith("mbarrier.try_wait")
    assert kernel.instructions[6].guard == Register("P1@2")
    assert kernel.instructions[7].operands == (Symbol("LAB_WAIT@2"),)
    assert kernel.instructions[8].guard == Register("%p1", negated=True)
    assert [each.location for each in kernel.instructions[7:9]] == [
        ("/tmp/kernel.py", 5),
        ("/tmp/kernel.py", 9),
    ]
    call = kernel.instructions[11]
    assert call.operands == (
        Vector((Symbol("retval0"),)),
        Symbol("vprintf"),
        Vector((Symbol("param0"), Register("%rd3"))),
    )


def test_a_branch_binds_to_the_label_of_its_own_scope_even_before_it():
    kernel = kernel_of("L: { bra L; { bra L; L: } L: } bra L;")
    names = [each.operands[0].name for each in kernel.instructions]
    assert names == ["L@2", "L@3", "L"]
    assert kernel.labels == {"L": 0, "L@2": 2, "L@3": 2}


def test_names_of_the_module_are_shadowed_by_those_of_a_kernel():
    body = ".shared .b32 x; .reg .b32 y; st.shared.b32 [x], y; st.shared.b32 [a], y;"
    text = in_kernel(body, ".global .b32 x, y;", "(.param .u32 a)")
    kernel = parse(text).kernels["k"]
    first, second = kernel.instructions
    assert first.operands == (Address(Symbol("x@2")), Register("y@2"))
    assert second.operands[0] == Address(Symbol("a"))
    assert [v.name for v in parse(text).variables] == ["x", "y"]


def test_each_kernel_has_its_own_names():
    body = ".reg .pred P1; L: @P1 bra L;"
    text = in_kernel(body) + f".entry second {{ {body} }} .func third() {{ {body} }}"
    module = parse(text)
    for kernel in (*module.kernels.values(), *module.functions.values()):
        assert kernel.registers == {"P1": "pred"}
        assert kernel.labels == {"L": 0}


def test_a_definition_replaces_its_declaration():
    module = parse(f"{HEAD}.func f(); .func g() {{ call f; }} .func f() {{ ret; }}")
    assert module.functions["f"].has_body
    assert module.functions["g"].instructions[0].operands == (Symbol("f"),)


def test_a_parameter_may_have_the_name_of_its_function():
    text = f"{HEAD}.func (.param .b32 r) k(.param .b32 k) {{ st.param.b32 [r], 0; call k, (k); }}"
    store, call = parse(text).functions["k"].instructions
    assert store.operands[0] == Address(Symbol("r"))
    assert call.operands == (Symbol("k@2"), Vector((Symbol("k@2"),)))


@pytest.mark.parametrize(
    "opcode", ["ld .global.L2::cache_hint.b32", "ld.global .L2::cache_hint .b32"]
)
def test_an_opcode_may_be_written_with_spaces(opcode):
    (load,) = kernel_of(f".reg .b32 r; {opcode} r, [0];").instructions
    assert load.opcode == "ld.global.L2::cache_hint.b32"
    assert load.parts == ("ld", "global", "L2::cache_hint", "b32")


CALLS = {
    "call f;": (Symbol("f"),),
    "call (x), f;": (Vector((Symbol("x"),)), Symbol("f")),
    "call.uni f, (3, %rd1);": (Symbol("f"), Vector((Integer(3), Register("%rd1")))),
    "call (), f, ();": (Vector(()), Symbol("f"), Vector(())),
    "call (x), %rd1, (x), proto;": (
        *(Vector((Symbol("x"),)), Register("%rd1")),
        *(Vector((Symbol("x"),)), Symbol("proto")),
    ),
}


@pytest.mark.parametrize(("call", "operands"), CALLS.items())
def test_calls(call, operands):
    body = f".reg .b64 %rd1; .param .b32 x; proto : .callprototype (.param .b32 _) _ (); {call}"
    kernel = kernel_of(body, ".func f();")
    assert kernel.instructions[0].operands == operands
    assert kernel.labels == {}


# ---- operands and constants ----------------------------------------------------------------------

R1, RD1 = Register("%r1"), Register("%rd1")
OPERANDS = {
    "%r1": R1,
    "P1": Register("P1"),
    "!p": Register("p", negated=True),
    "! P1": Register("P1", negated=True),
    "%tid.x": Register("%tid.x"),
    "%clock64": Register("%clock64"),
    "%envreg31": Register("%envreg31"),
    "_": Sink(),
    "12": Integer(12),
    "-12": Integer(-12),
    "0xFFFFFFFFFFFFFFFF": Integer((1 << 64) - 1),
    "0X1fU": Integer(31),
    "017": Integer(15),
    "0b101": Integer(5),
    "WARP_SZ": Integer(32),
    "WARP_SZ-1": Integer(31),
    "(3+4)*2": Integer(14),
    "(.s64)5": Integer(5),
    "0f3F800000": FloatBits(0x3F800000, 32),
    "0dBFF0000000000000": FloatBits(0xBFF0000000000000, 64),
    "1.5": FloatBits(0x3FF8000000000000, 64),
    "-1.": FloatBits(0xBFF0000000000000, 64),
    "1e2": FloatBits(0x4059000000000000, 64),
    ".5E-0": FloatBits(0x3FE0000000000000, 64),
    "buffer": Symbol("buffer"),
    "buffer+8": Symbol("buffer", 8),
    "buffer+-8": Symbol("buffer", -8),
    "$L__BB0_1": Symbol("$L__BB0_1"),
    "[%rd1]": Address(RD1),
    "[%rd1+16]": Address(RD1, 16),
    "[ %rd1 + -4 ]": Address(RD1, -4),
    "[%rd1+4*3-(1<<2)]": Address(RD1, 8),
    "[buffer]": Address(Symbol("buffer")),
    "[buffer+24]": Address(Symbol("buffer"), 24),
    "[64]": Address(Integer(64)),
    "[64+8]": Address(Integer(72)),
    "[%rd1, {%r1, 0, -1}]": Address(RD1, 0, (R1, Integer(0), Integer(-1))),
    "[%rd1+64,{%r1}]": Address(RD1, 64, (R1,)),
    "{%r1, 7, _, f, 0f00000000}": Vector((R1, Integer(7), Sink(), Register("f"), FloatBits(0, 32))),
    "{%r1}": Vector((R1,)),
    "P1|p": Pair(Register("P1"), Register("p")),
    "_|p": Pair(Sink(), Register("p")),
    "%r1 | _": Pair(R1, Sink()),
}


@pytest.mark.parametrize(("written", "operand"), OPERANDS.items())
def test_operand_forms(written, operand):
    assert operand_of(written) == operand


# ---- declarations --------------------------------------------------------------------------------


def f32_bytes(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def s32_bytes(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


VARIABLES = {
    ".global .b32 x": Variable("x", "global", "b32", 4, 4),
    ".shared .align 128 .b8 x[4][8]": Variable("x", "shared", "b8", 128, 32),
    ".const .v4 .f32 x": Variable("x", "const", "f32", 16, 16),
    ".global .v2 .b32 x[2] = {{1,2},{3,4}}": Variable(
        "x", "global", "b32", 8, 16, initial=s32_bytes(1, 2, 3, 4)
    ),
    ".local .align 16 .b8 x[0x10]": Variable("x", "local", "b8", 16, 16),
    ".shared .b128 x": Variable("x", "shared", "b128", 16, 16),
    ".shared .f16x2 x": Variable("x", "shared", "f16x2", 4, 4),
    ".extern .shared .align 1024 .b8 x[]": Variable("x", "shared", "b8", 1024, None, extern=True),
    ".extern .global .b32 x": Variable("x", "global", "b32", 4, 4, extern=True),
    ".visible .global .attribute(.managed) .align 8 .b32 x": Variable("x", "global", "b32", 8, 4),
    ".weak .const .u16 x = -1": Variable("x", "const", "u16", 2, 2, initial=b"\xff\xff"),
    ".global .b8 x[3]={0xFF,-1,300}": Variable("x", "global", "b8", 1, 3, initial=b"\xff\xff,"),
    ".global .b32 x[] = {1,2,3}": Variable("x", "global", "b32", 4, 12, initial=s32_bytes(1, 2, 3)),
    ".global .s32 x[][2] = {{1,2},{3,4}}": Variable(
        "x", "global", "s32", 4, 16, initial=s32_bytes(1, 2, 3, 4)
    ),
    ".global .s32 x[3][2] = {{1,2},{3,4}}": Variable(
        "x", "global", "s32", 4, 24, initial=s32_bytes(1, 2, 3, 4, 0, 0)
    ),
    ".global .f32 x[3] = {1.1, -0f3F800000}".replace("-0f", "0f"): Variable(
        "x", "global", "f32", 4, 12, initial=f32_bytes(1.1, 1.0, 0.0)
    ),
    ".global .b32 x = -1.5": Variable("x", "global", "b32", 4, 4, initial=f32_bytes(-1.5)),
    ".global .f64 x = 1.1": Variable("x", "global", "f64", 8, 8, initial=struct.pack("<d", 1.1)),
    ".global .b32 x[2] = {}": Variable("x", "global", "b32", 4, 8, initial=bytes(8)),
    ".global .b32 x = WARP_SZ": Variable("x", "global", "b32", 4, 4, initial=s32_bytes(32)),
}


@pytest.mark.parametrize(("written", "variable"), VARIABLES.items())
def test_variables(written, variable):
    assert parse(f"{HEAD}{written};").variables == (variable,)


@given(st.data())
@settings(max_examples=40)
def test_initialisers_are_the_bytes_of_a_numpy_array(data):
    kind = data.draw(st.sampled_from(["u8", "s16", "u32", "s64", "f32", "f64"]))
    dtype = np.dtype(f"{kind[0].replace('s', 'i')}{int(kind[1:]) // 8}")
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    size = int(np.prod(shape))
    values = np.frombuffer(data.draw(st.binary(min_size=8 * size, max_size=8 * size)), np.uint64)
    array = values.astype(np.uint8 if kind[0] == "f" else dtype, casting="unsafe")
    array = (array / 7).astype(dtype) if kind[0] == "f" else array
    listed = str(array.reshape(shape).tolist()).replace("[", "{").replace("]", "}")
    extents = "".join(f"[{extent}]" for extent in shape)
    (variable,) = parse(f"{HEAD}.const .{kind} x{extents} = {listed};").variables
    assert variable.initial == array.tobytes()


@pytest.mark.parametrize("version", ["8.7", "8.8", "9.0", "9.2", "9.4", "9.5"])
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a", "sm_100f", "sm_103a", "sm_120a, debug"])
def test_versions_and_targets(version, target):
    module = parse(f".version {version} .target {target} .address_size 64")
    assert module.version == tuple(map(int, version.split(".")))
    assert module.target == target.split(",")[0]


@pytest.mark.parametrize("directive", ["", ".address_size 32", ".address_size 16"])
def test_addresses_have_64_bits(directive):
    with pytest.raises(PtxError, match=r"write \.address_size 64") as caught:
        parse(f".version 8.8\n.target sm_100a\n{directive}\n.entry k() {{ ret; }}")
    assert caught.value.line == (3 if directive else 4)
    assert (directive or ".address_size 32") in str(caught.value)


@pytest.mark.parametrize("header", ["", "()", "() .maxntid 256", "() .maxnreg 64 .maxnreg 32"])
def test_headers(header):
    directives = parse(f"{HEAD}.entry k{header} {{ ret; }}").kernels["k"].directives
    expected = {"maxntid": (256, 1, 1)} if "maxntid" in header else {}
    assert directives == ({"maxnreg": (32,)} if "maxnreg" in header else expected)


# ---- errors --------------------------------------------------------------------------------------

# Each with the line of the fault, 0 for the first one of the body, and words of the message.
BODY_ERRORS = [
    ("ret;\nmov.b32 %r9, 0;", 1, "%r9 is not declared"),
    ("mov.u32 late, 1; .reg .b32 late;", 0, "late is not declared"),
    ("bra\n NOWHERE;", 1, "NOWHERE is not declared"),
    ("bra INNER; { INNER: }", 0, "INNER is not declared"),
    ("{ .reg .b32 in; }\nmov.b32 in, 1;", 1, "in is not declared"),
    ("mov.b32 %tid, 1;", 0, "%tid is not declared"),
    ("ld.shared.b32 %r1, [buff];", 0, "buff is not declared"),
    ("ret;\n.reg .b32 %r1;", 1, "%r1 is declared already, on line"),
    (".reg .pred buffer;", 0, "buffer is declared already"),
    ("L:\nret;\nL:", 2, "L is declared already"),
    ("L: .reg .b32 L;", 0, "L is declared already"),
    ("mov.b32 %r1, %r2\nret;", 1, "expected ',' or ';', found 'ret' (in the statement that begins"),
    ("mov.b32 %r1 %r2;", 0, "expected ',' or ';', found '%r2'"),
    ("mov.b32 %r1, ;", 0, "expected an operand, found ';'"),
    ("mov.b32 %r1,, %r2;", 0, "found ','"),
    ("mov.b32 %r1, 08;", 0, "found '08'"),
    ("mov.b32 %r1, 0x1FFFFFFFFFFFFFFFF;", 0, "at most 64 bits"),
    ("mov.b32 %r1, 5/(3-3);", 0, "division by zero"),
    ("mov.b32 %r1, 5 %(0);", 0, "division by zero"),
    ("mov.f32 f, 0f3F80;", 0, "found '0f3F80'"),
    ("mov.f32 f, -0f3F800000;", 0, "a sign before the bit pattern"),
    ("mov.f32 f, 1.5+1;", 0, "floating-point expressions"),
    ("mov.f32 f, -f;", 0, "found 'f'"),
    ("mov.b32 %r1, (3;", 0, "expected ')'"),
    ("ld.b32 %r1, [%rd1-4];", 0, "expected ']', found '-'"),
    ("ld.b32 %r1, [%rd1+%r1];", 0, "found '%r1'"),
    ("ld.b32 %r1, [%rd1+1.5];", 0, "offset must be an integer"),
    ("ld.b32 %r1, [%rd1+8;", 0, "expected ']'"),
    ("ld.b32 %r1, [!p];", 0, "an address must begin with"),
    ("ld.b32 %r1, [_];", 0, "an address must begin with"),
    ("ld.b32 %r1, [%rd1, {_}];", 0, "coordinates"),
    ("ld.b32 %r1, [%rd1, %r1];", 0, "expected '{'"),
    ("ld.b32 %r1, buffer[1];", 0, "found '['"),
    ("mov.b64 {%r1, [%rd1]}, 0;", 0, "elements of a vector"),
    ("mov.b64 {}, 0;", 0, "found '}'"),
    ("setp.b32 p|buffer, 0;", 0, "second half of a pair"),
    ("setp.b32 p|1, 0;", 0, "second half of a pair"),
    ("@%r1 ret;", 0, "%r1 is no predicate register"),
    ("@buffer ret;", 0, "expected a register"),
    ("@p @p ret;", 0, "expected an opcode"),
    ("@p;", 0, "expected an opcode"),
    (";", 0, "expected an instruction"),
    ("3;", 0, "found '3'"),
    ("#x", 0, "found '#'"),
    (".wibble 3;", 0, "'.wibble'"),
    (".reg .bf16 h;", 0, "expected a type"),
    (".reg .b32 h<4+1>;", 0, "expected '>'"),
    (".reg .b32 h<99999999>;", 0, "registers, more than"),
    (".shared .b8 z[];", 0, "z has no size"),
    (".shared .align 3 .b32 z;", 0, "not a power of two"),
    (".shared .b32 z = 1;", 0, "cannot have an initialiser"),
    (".shared .pred z;", 0, "expected a type"),
    (".shared .align 8 z;", 0, "expected a type"),
    ("t: .branchtargets %r1;", 0, "expected a label"),
    (".loc 1 x 3", 0, "expected a line"),
    ("ret;\n.visible .entry k2() { ret; }", 1, "line 4 is still open"),
]

MODULE_ERRORS = [
    (".version 8.6\n.target sm_100a", 1, ".version 8.6 is not supported: allowed are 8.7 to 9.5"),
    (".version 9.6\n.target sm_100a", 1, ".version 9.6 is not supported"),
    (".version 8\n.target sm_100a", 1, "expected a version such as 8.8"),
    ("\n.target sm_100a", 2, "expected '.version'"),
    (".version 8.8\n.entry k() {}", 2, "expected '.target'"),
    ("", 1, "the text ends where '.version' was expected"),
    (HEAD + ".entry k()\n.maxfoo 3\n{ ret; }", 5, "expected a performance directive"),
    (HEAD + ".entry k()\n.maxnreg\n{ ret; }", 6, "expected a number"),
    (HEAD + ".entry k(.reg .b32 x) {}", 4, "parameters in registers are not supported"),
    (HEAD + ".entry k(.param .b32 x,\n.param .b32 x) {}", 5, "x is declared already"),
    (HEAD + ".entry k() {}\n.entry k() {}", 5, "k has a body already"),
    (HEAD + ".global .b32 k;\n.entry k() {}", 5, "k is declared already, on line 4"),
    (HEAD + ".entry k() {}\n.func k() {}", 5, "k is declared already"),
    (HEAD + ".reg .b32 x;", 4, "expected a kernel, a function, a variable or a section"),
    (HEAD + ".global .texref t;", 4, "expected a type"),
    (HEAD + ".global .u64 p = q;", 4, "an initialiser with q is not supported"),
    (HEAD + ".global .u64 p[2] = {1,\ngeneric(q)};", 5, "an initialiser with generic"),
    (HEAD + '.global .b8 s[4] = {"abc"};', 4, "is not supported"),
    (HEAD + ".global .b32 x[2] = {1,2,3};", 4, "3 values for 2 elements"),
    (HEAD + ".global .b32 x[2][2] = {{1},{2,3}};", 4, "an inner list of 1 values, not 2"),
    (HEAD + ".global .b32 x[2][2] = {1,2,3,4};", 4, "expected '{'"),
    (HEAD + ".global .b32 x[2] = {1,};", 4, "found '}'"),
    (HEAD + ".global .b32 x[2] = 1;", 4, "expected '{'"),
    (HEAD + ".global .s32 x = 1.5;", 4, "cannot initialise a .s32"),
    (HEAD + ".global .f32 x = 1;", 4, "cannot initialise a .f32"),
    (HEAD + ".global .f32 x = 1e300;", 4, "too large for 32 bits"),
    (HEAD + ".global .f64 x = 0f3F800000;", 4, "cannot initialise a .f64"),
    (HEAD + "/* ret;\n", 4, "comment without '*/'"),
    (HEAD + ".file 1 kernel.py", 4, "expected a string"),
    (HEAD + ".file one", 4, "expected the index of a file"),
    (HEAD + ".entry 3() {}", 4, "expected the name of a kernel"),
]


@pytest.mark.parametrize(("body", "offset", "words"), BODY_ERRORS)
def test_errors_in_a_body_name_the_line(body, offset, words):
    text = f"{HEAD}.entry k() {{{DECLARED}{body}\n}}"
    with pytest.raises(PtxError) as caught:
        parse(text)
    first_line = text.count("\n") - body.count("\n")
    assert words in str(caught.value)
    assert caught.value.line == first_line + offset
    assert str(caught.value).startswith(f"PTX line {first_line + offset}: ")


@pytest.mark.parametrize(("text", "line", "words"), MODULE_ERRORS)
def test_errors_in_a_module_name_the_line(text, line, words):
    with pytest.raises(PtxError) as caught:
        parse(text)
    assert words in str(caught.value)
    assert caught.value.line == line


TRUNCATED = {
    ".entry k() {\nret;": "'}' was expected, inside the '{' of line 4 in kernel k of line 4",
    ".entry k() {\n{\nret;": "inside the '{' of line 5 in the '{' of line 4 in kernel k of line 4",
    ".entry k() {\n.reg .b32 x;\nadd.s32 x,\nx": "inside the statement 'add.s32 x , x' of line 6",
    ".entry k() {\nbar.sync": "an operand was expected, inside the statement 'bar.sync' of line 5",
    ".entry k() {\nbar.sync 0": "',' or ';' was expected, inside the statement 'bar.sync 0'",
    ".entry k() {\n@": "inside the statement '@' of line 5",
    ".entry k() {\nL:\n.loc 1": "a line of the source was expected, inside the statement '.loc 1'",
    ".entry k(.param .b32 x": "inside the statement '.entry k ( .param .b32 x' of line 4",
    ".entry k()": "in kernel k of line 4",
    ".entry k() {\n.reg .b32 %r<5": "'>' was expected, inside the statement '.reg .b32 %r < 5'",
    ".global .b8 x[2] = {1": "inside the statement '.global .b8 x [ 2 ] = {' of line 4",
    ".section .debug_str\n{ .b8 1": "in the section of line 4",
    ".func f()": "in function f of line 4",
    ".global": "a type",
}


@pytest.mark.parametrize(("text", "words"), TRUNCATED.items())
def test_truncated_texts_say_what_was_open(text, words):
    with pytest.raises(PtxError) as caught:
        parse(HEAD + text)
    line = 4 + text.count("\n")
    assert str(caught.value).startswith(f"PTX line {line}: the text ends where")
    assert words in str(caught.value)


# ---- damaged texts -------------------------------------------------------------------------------


def test_every_prefix_of_a_kernel_is_refused():
    start = SAMPLE.index("elect.sync")
    end = SAMPLE.index("\n}\n.file") + 1
    for cut in range(start, end):
        with pytest.raises(PtxError) as caught:
            parse(SAMPLE[:cut])
        assert caught.value.line is not None
        assert caught.value.line <= SAMPLE.count("\n", 0, cut) + 1


@given(
    st.integers(0, len(SAMPLE) - 1),
    st.integers(0, 12),
    st.text('{}[]();,:.@!%|+-*/<>="$_ \n0123456789abfxLPU#\0é', max_size=6),
)
@settings(max_examples=400)
def test_a_damaged_text_is_read_or_refused_but_never_breaks_the_parser(at, removed, inserted):
    text = SAMPLE[:at] + inserted + SAMPLE[at + removed :]
    try:
        assert isinstance(parse(text), Module)
    except PtxError as error:
        assert error.line is not None
        assert 1 <= error.line <= text.count("\n") + 1


@pytest.mark.parametrize("nesting", ["(", "-", "{", "["])
def test_absurd_nesting_is_a_ptx_error(nesting):
    with pytest.raises(PtxError):
        parse(in_kernel(f".reg .b32 r; mov.b32 r, {nesting * 100_000};"))


def test_a_number_of_thousands_of_digits_is_a_ptx_error():
    for digits in ("9" * 5000, "0x" + "0" * 5000):
        with pytest.raises(PtxError):
            parse(in_kernel(f".reg .b32 r; mov.b32 r, {digits};"))
        with pytest.raises(PtxError):
            parse(in_kernel(f".shared .b8 x[{digits}];"))


DECLARATIONS = [
    line
    for line in SAMPLE.split("\n")
    if line.startswith((".extern .shared", "$L__BB0", "targets"))
    or line.strip().startswith(
        (".reg", ".param .b32 \tretval0", "LAB_WAIT", "DONE", ".param .b64 \t")
    )
]


@pytest.mark.parametrize("line", [line for line in DECLARATIONS if "smem" not in line])
def test_a_missing_declaration_is_found(line):
    assert SAMPLE.count(f"{line}\n") >= 1
    with pytest.raises(PtxError, match="is not declared"):
        parse(SAMPLE.replace(f"{line}\n", "\n", 1))


def test_a_deleted_instruction_leaves_the_others():
    """What a tool that plants faults relies on: one line less is one instruction less."""
    lines = SAMPLE.split("\n")
    kernel = parse(SAMPLE).kernels["k"]
    for position, instruction in enumerate(kernel.instructions):
        line = lines[instruction.written_line - 1]
        if line.count(";") != 1:
            continue
        damaged = [*lines[: instruction.line - 1], "", *lines[instruction.line :]]
        left = parse("\n".join(damaged)).kernels["k"].instructions
        assert left == kernel.instructions[:position] + kernel.instructions[position + 1 :]


# ---- speed ---------------------------------------------------------------------------------------


def calls_of_parsing(lines: int) -> int:
    """Calls of functions that a kernel of so many lines takes."""
    shapes = [
        *("mov.b64 \t{%r11, %r12}, %rd7;", "fma.rn.f32x2 \t%rd1, %rd2, %rd3, %rd4;"),
        *("@%p1 bra \t$L__BB0_1;", "ld.shared.v4.b32 \t{%r1, %r2, %r3, %r4}, [%r9+16];"),
        "add.s32 \t%r5, %r6, -1;",
    ]
    head = ".reg .pred %p<9>; .reg .b32 %r<5000>; .reg .b64 %rd<5000>;\n$L__BB0_1:\n"
    text, calls = in_kernel(head + "\n".join(shapes * (lines // len(shapes)))), Counter[str]()
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: calls.update((event,)))
    try:
        parse(text)
    finally:
        sys.setprofile(before)
    return calls["call"] + calls["c_call"]


def test_a_line_takes_sixty_calls_however_many_there_are() -> None:
    """50 of them; ten thousand lines took 0.13 s (one core of an EPYC, Python 3.11)."""
    few, more, most = (calls_of_parsing(lines) for lines in (500, 1000, 2000))
    assert (more - few) / 500 < 60
    assert (most - more) / 1000 < 60
