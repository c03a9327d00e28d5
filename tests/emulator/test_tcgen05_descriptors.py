"""Descriptors: bit fields, what is refused, and the values that CuTe-DSL compiles."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.tcgen05.descriptors import InstructionDescriptor, SmemDescriptor, Swizzle
from fa4.emulator.tcgen05.errors import DescriptorError
from fa4.emulator.tcgen05.formats import Format
from tests.emulator.tcgen05_support import instruction_bits

FIELDS_14 = st.integers(0, (1 << 14) - 1)


@settings(max_examples=50)
@given(FIELDS_14, FIELDS_14, FIELDS_14, st.integers(0, 7), st.sampled_from(list(Swizzle)))
def test_smem_descriptor_fields(
    start: int, leading: int, stride: int, base_offset: int, swizzle: Swizzle
) -> None:
    text = f"{swizzle:03b}" + "0" * 8 + "0" + f"{base_offset:03b}" + "001"
    text += f"{stride:014b}" + "00" + f"{leading:014b}" + "00" + f"{start:014b}"
    assert len(text) == 64
    desc = SmemDescriptor.decode(int(text, 2))
    assert desc == SmemDescriptor(start * 16, leading * 16, stride * 16, base_offset, swizzle)
    assert desc.encode() == int(text, 2)
    assert SmemDescriptor.decode(int(text, 2) - (1 << 64)) == desc  # a register read as signed


GOOD_SMEM = SmemDescriptor(0x2000, 16, 1024, 0, Swizzle.B128).encode()


@pytest.mark.parametrize(
    ("flipped_bits", "why"),
    [
        (1 << 46, "0b001"),
        (1 << 47, "0b001"),
        (1 << 48, "0b001"),
        (1 << 52, "sm_103a"),
        (1 << 53, "53-60"),
        (1 << 60, "53-60"),
        (1 << 14, "reserved"),
        (1 << 31, "reserved"),
        (1 << 61, "mode 3"),
        (5 << 61, "mode 7"),
    ],
)
def test_smem_descriptor_refuses(flipped_bits: int, why: str) -> None:
    with pytest.raises(DescriptorError, match=why):
        SmemDescriptor.decode(GOOD_SMEM ^ flipped_bits)


OPERANDS = {
    "f16": (Format.F16, Format.BF16),
    "tf32": (Format.TF32,),
    "f8f6f4": (Format.E4M3, Format.E5M2, Format.E2M3, Format.E3M2, Format.E2M1),
    "i8": (Format.U8, Format.S8),
}


@st.composite
def instructions(draw: st.DrawFn) -> InstructionDescriptor:
    kind = draw(st.sampled_from(list(OPERANDS)))
    a_format, b_format = (draw(st.sampled_from(OPERANDS[kind])) for _ in range(2))
    d_format = Format.S32 if kind == "i8" else Format.F32
    if kind in ("f16", "f8f6f4") and Format.BF16 not in (a_format, b_format):
        d_format = draw(st.sampled_from((Format.F16, Format.F32)))
    return InstructionDescriptor(
        kind=kind,
        m=draw(st.sampled_from((32, 64, 128, 256))),
        n=draw(st.integers(1, 32)) * 8,
        a_format=a_format,
        b_format=b_format,
        d_format=d_format,
        saturate=kind == "i8" and draw(st.booleans()),
        negate_a=kind != "i8" and draw(st.booleans()),
        negate_b=kind != "i8" and draw(st.booleans()),
        transpose_a=a_format.bits >= 8 and draw(st.booleans()),
        transpose_b=b_format.bits >= 8 and draw(st.booleans()),
        max_shift=draw(st.sampled_from((0, 8, 16, 32))),
    )


@settings(max_examples=80)
@given(instructions())
def test_instruction_descriptor_fields(instruction: InstructionDescriptor) -> None:
    decoded = InstructionDescriptor.decode(instruction_bits(instruction), instruction.kind)
    assert decoded == instruction
    assert decoded.k * decoded.a_format.container_bytes == 32


# What CuTe-DSL 4.8.1 emits for these MMA operations on sm_100a.
COMPILED = [
    (136316048, "f16", 128, 128, Format.BF16, False, False),
    (136414352, "f16", 128, 128, Format.BF16, True, True),
    (138510352, "f8f6f4", 128, 256, Format.E4M3, True, True),
    (135366928, "tf32", 128, 64, Format.TF32, True, True),
    (270599312, "f16", 256, 128, Format.BF16, False, True),
]


@pytest.mark.parametrize(("value", "kind", "m", "n", "element", "trans_a", "trans_b"), COMPILED)
def test_instruction_descriptor_of_cute(
    value: int, kind: str, m: int, n: int, element: Format, trans_a: bool, trans_b: bool
) -> None:
    expected = InstructionDescriptor(
        kind, m, n, element, element, Format.F32, transpose_a=trans_a, transpose_b=trans_b
    )
    assert InstructionDescriptor.decode(value, kind) == expected
    expected.check_shape(2 if m == 256 else 1, ws=False)


PLAIN = InstructionDescriptor("f16", 128, 128, Format.F16, Format.F16, Format.F32)


@pytest.mark.parametrize(
    ("value", "kind", "why"),
    [
        (instruction_bits(PLAIN) | 1 << 3, "f16", "saturate"),
        (instruction_bits(PLAIN) | 1 << 6, "f16", "reserved"),
        (instruction_bits(PLAIN) | 1 << 23, "f16", "reserved"),
        (instruction_bits(PLAIN) | 1 << 29, "f16", "reserved"),
        (instruction_bits(PLAIN) | 2 << 7, "f16", "A type 2"),
        (instruction_bits(PLAIN) | 3 << 10, "f16", "B type 3"),
        (instruction_bits(PLAIN) | 3 << 4, "f16", "D type 3"),
        (instruction_bits(PLAIN), "tf32", "A type 0"),
        (instruction_bits(PLAIN), "mxf8f6f4", "supported"),
        (instruction_bits(PLAIN) & ~(1 << 4) | 1 << 7, "f16", "bf16"),
        (2 << 4 | 1 << 13 | 16 << 17 | 8 << 24, "i8", "negated"),
        (1 << 4 | 5 << 7 | 1 << 15 | 16 << 17 | 8 << 24, "f8f6f4", "e2m1.*K-major"),
    ],
)
def test_instruction_descriptor_refuses(value: int, kind: str, why: str) -> None:
    with pytest.raises(DescriptorError, match=why):
        InstructionDescriptor.decode(value, kind)


def _allowed(kind: str, m: int, n: int, cta_group: int, ws: bool) -> bool:
    """PTX ISA Table 39, its dense rows, as sets."""
    if ws:
        return cta_group == 1 and m in (32, 64, 128) and n in (64, 128, 256)
    if cta_group == 1:
        columns = set(range(8, 257, 8))
        if kind == "i8":
            columns = {8, 16, 24, *range(32, 257, 16)}
        return m in (64, 128) and n in columns
    columns = set(range(32, 257, 32)) if kind == "i8" else set(range(16, 257, 16))
    return m in (128, 256) and n in columns


@pytest.mark.parametrize("kind", list(OPERANDS))
@pytest.mark.parametrize("cta_group", [1, 2])
@pytest.mark.parametrize("ws", [False, True])
def test_shapes(kind: str, cta_group: int, ws: bool) -> None:
    element = OPERANDS[kind][0]
    base = InstructionDescriptor(kind, 64, 8, element, element, Format.F32)
    accepted = set()
    for m in range(0, 512, 16):
        for n in range(0, 512, 8):
            try:
                dataclasses.replace(base, m=m, n=n).check_shape(cta_group, ws)
            except DescriptorError:
                continue
            accepted.add((m, n))
    expected = {
        (m, n)
        for m in range(0, 512, 16)
        for n in range(0, 512, 8)
        if _allowed(kind, m, n, cta_group, ws)
    }
    assert accepted == expected


@pytest.mark.parametrize(("cta_group", "step"), [(1, 16), (2, 32)])
def test_transposed_8_bit_b_needs_wider_n(cta_group: int, step: int) -> None:
    base = InstructionDescriptor(
        "f8f6f4", 128, 8, Format.E4M3, Format.E4M3, Format.F32, transpose_b=True
    )
    for n in range(8, 257, 8):
        instruction = dataclasses.replace(base, n=n)
        if n % step:
            with pytest.raises(DescriptorError):
                instruction.check_shape(cta_group, ws=False)
        else:
            instruction.check_shape(cta_group, ws=False)


def test_maximum_shift_is_for_ws() -> None:
    shifted = dataclasses.replace(PLAIN, max_shift=16)
    shifted.check_shape(1, ws=True)
    with pytest.raises(DescriptorError, match="shift"):
        shifted.check_shape(1, ws=False)
