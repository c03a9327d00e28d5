"""tcgen05.mma against sums over elements, and against itself where two ways must agree."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.tcgen05.datapath import data_path
from fa4.emulator.tcgen05.descriptors import InstructionDescriptor, SmemDescriptor, Swizzle
from fa4.emulator.tcgen05.errors import DescriptorError, TmemError
from fa4.emulator.tcgen05.formats import Format
from fa4.emulator.tcgen05.mma import MmaOperation, plan_mma
from fa4.emulator.tcgen05.tmem import TmemAddress
from tests.emulator.tcgen05_support import (
    code_bits,
    code_value,
    element_address,
    packed_descriptor,
    write_code,
)

SMEM_BYTES = 64 * 1024
B_START = 32 * 1024
D_COLUMN, A_COLUMN = 64, 400


@dataclass(frozen=True)
class Form:
    """A shape of the instruction and where row r, column n of D must lie: (rank, lane, column)."""

    m: int
    n: int
    cta_group: int = 1
    ws: bool = False
    lane: int = 0

    def place(self, row: int, n: int) -> tuple[int, int, int]:
        """PTX ISA 9.7.16.10.5; the same as CuTe's fragments, e.g. ((16,4),N):((lane,32 lane),1)."""
        rank, row = divmod(row, self.m // self.cta_group)
        half, quarter = self.n // 2, self.n // 4
        if self.ws and self.m == 32:
            return rank, row + 32 * (n // quarter), n % quarter
        if (self.ws and self.m == 64) or (self.cta_group == 2 and self.m == 128):
            return rank, row + 64 * (n // half), n % half
        if self.m == 64:
            return rank, row // 16 * 32 + row % 16 + self.lane, n
        return rank, row, n


FORMS = [
    Form(128, 16),
    Form(64, 8),
    Form(64, 24, lane=16),
    Form(256, 32, cta_group=2),
    Form(128, 32, cta_group=2),
    Form(32, 64, ws=True),
    Form(64, 64, ws=True),
    Form(128, 64, ws=True),
]


@dataclass
class Setting:
    """Memories of a CTA pair with operands in them, and the operands' values."""

    form: Form
    instruction: InstructionDescriptor
    smem: list[np.ndarray]
    tmem: list[np.ndarray]
    a: np.ndarray
    b: np.ndarray
    operation: MmaOperation

    def d(self) -> np.ndarray:
        """Words of D, gathered by the form's places."""
        form = self.form
        words = np.empty((form.m, form.n), np.uint32)
        for row in range(form.m):
            for n in range(form.n):
                rank, lane, column = form.place(row, n)
                words[row, n] = self.tmem[rank][lane, D_COLUMN + column]
        return words

    def run(self, operation: MmaOperation | None = None) -> np.ndarray:
        """Executes and returns the words of D."""
        plan_mma(operation or self.operation).execute(self.smem, self.tmem)
        return self.d()


def operand(
    rng: np.random.Generator, element: Format, rows: int, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and finite values; wide types of similar magnitude, so that float64 sums exactly."""
    codes = rng.integers(0, 1 << code_bits(element), (rows, k))
    values = np.vectorize(lambda code: code_value(element, int(code)))(codes)
    spare = {Format.F16: 0x3C00, Format.BF16: 0x3F80, Format.TF32: 127 << 10}.get(element, 0)
    fine = np.isfinite(values)
    if element.bits > 8:
        fine &= (abs(values) < 2.0**6) & (abs(values) > 2.0**-6)
    codes = np.where(fine, codes, spare)
    values = np.where(fine, values, code_value(element, spare))
    return codes, values


def prepare(
    form: Form,
    instruction: InstructionDescriptor,
    *,
    seed: int = 0,
    swizzles: tuple[Swizzle, Swizzle] = (Swizzle.B128, Swizzle.B128),
    a_in_tmem: bool = False,
) -> Setting:
    """Random operands, written one element at a time where the formulas say."""
    rng = np.random.default_rng(seed)
    k = instruction.k
    smem = [rng.integers(0, 256, SMEM_BYTES, dtype=np.uint8) for _ in range(form.cta_group)]
    tmem = [rng.integers(0, 1 << 32, (128, 512), dtype=np.uint32) for _ in range(form.cta_group)]
    # B lies in shared memory, split by N; A in shared memory, split by rows.
    a_codes, a = operand(rng, instruction.a_format, form.m, k)
    b_codes, b = operand(rng, instruction.b_format, form.n, k)
    parts = [
        (b_codes, instruction.b_format, not instruction.transpose_b, B_START, swizzles[1]),
        (a_codes, instruction.a_format, not instruction.transpose_a, 0, swizzles[0]),
    ]
    descs = []
    for codes, element, k_major, start, swizzle in parts:
        share = len(codes) // form.cta_group
        size = element.container_bytes
        desc = packed_descriptor(start, swizzle, share, k, size, k_major)
        descs.append(desc)
        for row in range(len(codes)):
            for i in range(k):
                at = element_address(desc, row % share, i, size, k_major)
                write_code(smem[row // share], at, element, int(codes[row, i]))
    a_place: SmemDescriptor | TmemAddress = descs[1]
    if a_in_tmem:
        a_place = TmemAddress(form.lane, A_COLUMN)
        write_a(form, instruction, a_codes, tmem)
    operation = MmaOperation(
        form.cta_group,
        instruction,
        a_place,
        descs[0],
        TmemAddress(form.lane, D_COLUMN),
        accumulate=False,
        ws=form.ws,
    )
    return Setting(form, instruction, smem, tmem, a, b, operation)


def write_a(
    form: Form, instruction: InstructionDescriptor, codes: np.ndarray, tmem: list[np.ndarray]
) -> None:
    """A in tensor memory: in the lanes of its rows of D, a copy for each part of N."""
    element = instruction.a_format
    per_word = 4 // element.container_bytes
    for row in range(form.m):
        for rank, lane in {form.place(row, n)[:2] for n in range(form.n)}:
            for i in range(instruction.k):
                code = int(codes[row, i])
                code <<= {Format.TF32: 13, Format.E2M1: 2}.get(element, 0)
                shift = 8 * element.container_bytes * (i % per_word)
                mask = (1 << 8 * element.container_bytes) - 1
                if element is Format.TF32:  # the low bits stay what they were: random
                    mask = 0xFFFFE000
                word = int(tmem[rank][lane, A_COLUMN + i // per_word])
                tmem[rank][lane, A_COLUMN + i // per_word] = word & ~(mask << shift) | code << shift


def expected_words(setting: Setting, d: np.ndarray | None = None, shift: int = 0) -> np.ndarray:
    """Exactly summed, rounded once."""
    element = setting.instruction.d_format
    words = np.empty((setting.form.m, setting.form.n), np.uint32)
    sign = (-1.0) ** (setting.instruction.negate_a + setting.instruction.negate_b)
    for row in range(setting.form.m):
        for n in range(setting.form.n):
            addends = list(sign * setting.a[row] * setting.b[n])
            if d is not None:
                addends.append(float(d[row, n]) * 2.0**-shift)
            total = math.fsum(addends)
            if element is Format.S32:
                words[row, n] = int(total) & 0xFFFFFFFF
            elif element is Format.F16:
                with np.errstate(over="ignore"):
                    words[row, n] = np.float16(total).view(np.uint16)
            else:
                words[row, n] = np.float32(total).view(np.uint32)
    return words


def same_kind(a: Format, b: Format, d: Format = Format.F32) -> InstructionDescriptor:
    """A descriptor whose shape is filled in by the test."""
    kind = {Format.F16: "f16", Format.BF16: "f16", Format.TF32: "tf32"}.get(a, "f8f6f4")
    if a in (Format.U8, Format.S8):
        kind, d = "i8", Format.S32
    return InstructionDescriptor(kind, 0, 0, a, b, d)


TYPES = [
    same_kind(Format.F16, Format.F16),
    same_kind(Format.F16, Format.F16, Format.F16),
    same_kind(Format.BF16, Format.BF16),
    same_kind(Format.TF32, Format.TF32),
    same_kind(Format.E4M3, Format.E5M2),
    same_kind(Format.E5M2, Format.E2M1, Format.F16),
    same_kind(Format.E2M3, Format.E4M3),
    same_kind(Format.E3M2, Format.E2M3),
    same_kind(Format.E2M1, Format.E3M2),
    same_kind(Format.U8, Format.S8),
    same_kind(Format.S8, Format.U8),
]


def shaped(types: InstructionDescriptor, form: Form, **changes: object) -> InstructionDescriptor:
    """The descriptor with the form's shape."""
    return dataclasses.replace(types, m=form.m, n=form.n, **changes)  # type: ignore[arg-type]


def type_name(types: InstructionDescriptor) -> str:
    """For test ids."""
    return f"{types.a_format}-{types.b_format}-{types.d_format}"


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("a_in_tmem", [False, True], ids=["smem", "tmem"])
def test_forms(form: Form, a_in_tmem: bool) -> None:
    setting = prepare(form, shaped(TYPES[2], form), a_in_tmem=a_in_tmem)
    before = [tensor.copy() for tensor in setting.tmem]
    np.testing.assert_array_equal(setting.run(), expected_words(setting))
    plan = plan_mma(setting.operation)
    for region in plan.tmem_writes:  # nothing but the declared region has changed
        columns = slice(region.first_column, region.first_column + region.columns)
        before[region.cta_rank][region.lanes, columns] = setting.tmem[region.cta_rank][
            region.lanes, columns
        ]
    for old, new in zip(before, setting.tmem, strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize(("form", "layout"), list(zip(FORMS, "DFFABGED", strict=True)), ids=str)
def test_layout_letters(form: Form, layout: str) -> None:
    """PTX ISA 9.7.16.10.5: lanes in the order of the parts of N, rows within."""
    path = data_path(form.m, form.cta_group, form.ws, form.lane)
    width = form.n // path.splits
    places = [
        form.place(row, part * width) for part in range(path.splits) for row in range(path.rows)
    ]
    assert path.layout == layout
    assert places == [(0, int(lane), 0) for lane in path.lanes]


@pytest.mark.parametrize("types", TYPES, ids=type_name)
@pytest.mark.parametrize("a_in_tmem", [False, True], ids=["smem", "tmem"])
def test_types(types: InstructionDescriptor, a_in_tmem: bool) -> None:
    form = Form(64, 16)
    setting = prepare(form, shaped(types, form), a_in_tmem=a_in_tmem)
    np.testing.assert_array_equal(setting.run(), expected_words(setting))
    assert len(np.unique(setting.d())) > 100


LAYOUTS = [
    (swizzle, transposed)
    for transposed in (False, True)
    for swizzle in Swizzle
    if swizzle is not Swizzle.B128_BASE32
]


@pytest.mark.parametrize(("swizzle", "transposed"), LAYOUTS)
@pytest.mark.parametrize("types", [TYPES[2], TYPES[4]], ids=type_name)
def test_layouts(swizzle: Swizzle, transposed: bool, types: InstructionDescriptor) -> None:
    form = Form(64, 16)
    other = Swizzle.B64 if swizzle is not Swizzle.B64 else Swizzle.NONE
    instruction = shaped(types, form, transpose_a=transposed, transpose_b=not transposed)
    setting = prepare(form, instruction, swizzles=(swizzle, other))
    np.testing.assert_array_equal(setting.run(), expected_words(setting))


def test_transposed_tf32_needs_32_byte_atoms() -> None:
    form = Form(64, 16)
    instruction = shaped(TYPES[3], form, transpose_a=True, transpose_b=True)
    both = (Swizzle.B128_BASE32, Swizzle.B128_BASE32)
    setting = prepare(form, instruction, swizzles=both)
    np.testing.assert_array_equal(setting.run(), expected_words(setting))
    with pytest.raises(DescriptorError, match="32B atoms"):
        prepare(form, instruction).run()
    with pytest.raises(DescriptorError, match="32B atoms"):
        prepare(form, shaped(TYPES[2], form, transpose_b=True), swizzles=both).run()


def test_major_ness_is_only_a_way_of_storing() -> None:
    form = Form(64, 32)
    results = [
        prepare(form, shaped(TYPES[0], form, transpose_a=a, transpose_b=b)).run()
        for a in (False, True)
        for b in (False, True)
    ]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("shift", [0, 1, 15])
@pytest.mark.parametrize("d_format", [Format.F32, Format.F16])
def test_accumulation_and_its_scale(shift: int, d_format: Format) -> None:
    form = Form(64, 16)
    setting = prepare(form, shaped(TYPES[0], form, d_format=d_format))
    rng = np.random.default_rng(1)
    for tensor in setting.tmem:
        start = rng.integers(-1000, 1000, tensor.shape)
        if d_format is Format.F32:
            tensor[:] = start.astype(np.float32).view(np.uint32)
        else:  # the high half is not part of D
            tensor[:] = start.astype(np.float16).view(np.uint16).astype(np.uint32) | 0xABCD0000
    old = setting.d()
    typed = (
        old.view(np.float32) if d_format is Format.F32 else old.astype(np.uint16).view(np.float16)
    )
    operation = dataclasses.replace(setting.operation, accumulate=True, scale_input_d=shift)
    expected = expected_words(setting, typed, shift)
    np.testing.assert_array_equal(setting.run(operation), expected)


@pytest.mark.parametrize(("negate_a", "negate_b"), [(True, False), (False, True), (True, True)])
def test_negation(negate_a: bool, negate_b: bool) -> None:
    form = Form(64, 16)
    for a_in_tmem in (False, True):
        instruction = shaped(TYPES[2], form, negate_a=negate_a, negate_b=negate_b)
        setting = prepare(form, instruction, a_in_tmem=a_in_tmem)
        np.testing.assert_array_equal(setting.run(), expected_words(setting))


@pytest.mark.parametrize("saturate", [False, True])
def test_integers_wrap_or_saturate(saturate: bool) -> None:
    form = Form(64, 16)
    setting = prepare(form, shaped(TYPES[10], form, saturate=saturate))
    old = np.where(np.arange(128 * 512).reshape(128, 512) % 2, 2**31 - 5, -(2**31) + 5)
    setting.tmem[0][:] = old.astype(np.int32).view(np.uint32)
    start = setting.d().view(np.int32).astype(np.int64)
    exact = setting.a.astype(np.int64) @ setting.b.astype(np.int64).T + start
    clipped = np.clip(exact, -(2**31), 2**31 - 1)
    assert (exact != clipped).any()
    result = setting.run(dataclasses.replace(setting.operation, accumulate=True))
    expected = clipped if saturate else exact
    np.testing.assert_array_equal(result, (expected & 0xFFFFFFFF).astype(np.uint32))


def test_special_values() -> None:
    form = Form(64, 8)
    setting = prepare(form, shaped(TYPES[2], form))
    k = setting.instruction.k
    desc = setting.operation.a
    assert isinstance(desc, SmemDescriptor)
    rows = {0: 0x7F80, 1: 0xFF80, 2: 0x7F81, 3: 0x7F7F}  # inf, -inf, signalling NaN, largest
    for row, code in rows.items():
        for i in range(k):
            write_code(setting.smem[0], element_address(desc, row, i, 2, True), Format.BF16, code)
    for n in range(form.n):
        for i in range(k):
            at = element_address(setting.operation.b, n, i, 2, True)
            write_code(setting.smem[0], at, Format.BF16, 0x7F7F if n else 0)
    d = setting.run()
    assert d[0, 1] == 0x7F800000 and d[1, 1] == 0xFF800000 and d[3, 1] == 0x7F800000
    # inf * 0, and NaN in any column: the canonical NaN.
    assert d[0, 0] == d[1, 0] == d[2, 0] == d[2, 5] == 0x7FFFFFFF


@settings(max_examples=10)
@given(st.integers(0, 1000), st.sampled_from(FORMS))
def test_k_in_two_instructions(seed: int, form: Form) -> None:
    """A1 B1, then + A2 B2, equals the exact sum over both K (all sums are small integers)."""
    first = prepare(form, shaped(TYPES[9], form), seed=seed)
    second = prepare(form, shaped(TYPES[9], form), seed=seed + 1)
    first.run()
    second.tmem = first.tmem
    result = second.run(dataclasses.replace(second.operation, accumulate=True))
    exact = first.a @ first.b.T + second.a @ second.b.T
    np.testing.assert_array_equal(result.view(np.int32), exact)


def test_n_in_two_instructions() -> None:
    """The same A with each half of B's rows gives each half of D's columns."""
    form, half = Form(128, 64), Form(128, 32)
    whole = prepare(form, shaped(TYPES[0], form))
    expected = whole.run()
    width = whole.operation.b.stride_byte_offset * half.n // 8
    for part in range(2):
        whole.tmem[0][:] = 0
        operation = dataclasses.replace(
            whole.operation,
            instruction=shaped(TYPES[0], half),
            b=dataclasses.replace(whole.operation.b, start_address=B_START + part * width),
        )
        plan_mma(operation).execute(whole.smem, whole.tmem)
        columns = slice(half.n * part, half.n * part + half.n)
        got = whole.tmem[0][:, D_COLUMN : D_COLUMN + half.n]
        np.testing.assert_array_equal(got, expected[:, columns])


def test_a_pair_equals_one_cta_on_assembled_operands() -> None:
    pair_form = Form(256, 32, cta_group=2)
    pair = prepare(pair_form, shaped(TYPES[0], pair_form))
    expected = pair.run()
    one = Form(128, 32)
    instruction = shaped(TYPES[0], one)
    assert isinstance(pair.operation.a, SmemDescriptor)
    for rank in range(2):
        # One CTA with this rank's half of A, and both halves of B one after the other.
        smem = pair.smem[rank].copy()
        share = pair.operation.b.stride_byte_offset * 16 // 8
        for other in range(2):
            part = pair.smem[other][B_START : B_START + share]
            smem[B_START + other * share : B_START + (other + 1) * share] = part
        tmem = np.zeros((128, 512), np.uint32)
        operation = MmaOperation(
            1, instruction, pair.operation.a, pair.operation.b, TmemAddress(0, 0), False
        )
        plan_mma(operation).execute([smem], [tmem])
        np.testing.assert_array_equal(tmem[:, :32], expected[128 * rank : 128 * rank + 128])


@pytest.mark.parametrize("form", [f for f in FORMS if not f.ws], ids=str)
def test_disabled_lanes_keep_their_words(form: Form) -> None:
    setting = prepare(form, shaped(TYPES[2], form))
    masks = [int(w) for w in np.random.default_rng(7).integers(0, 1 << 32, 4 * form.cta_group)]
    before = [tensor.copy() for tensor in setting.tmem]
    operation = dataclasses.replace(setting.operation, disable_lanes=tuple(masks))
    result = setting.run(operation)
    expected = expected_words(setting)
    for row in range(form.m):
        for n in range(form.n):
            rank, lane, column = form.place(row, n)
            disabled = masks[4 * rank + lane // 32] >> lane % 32 & 1
            old = before[rank][lane, D_COLUMN + column]
            assert result[row, n] == (old if disabled else expected[row, n])
    written = {(w.cta_rank, int(lane)) for w in plan_mma(operation).tmem_writes for lane in w.lanes}
    for rank, lane in written:
        assert not masks[4 * rank + lane // 32] >> lane % 32 & 1


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("a_in_tmem", [False, True], ids=["smem", "tmem"])
def test_the_plan_names_every_byte_read(form: Form, a_in_tmem: bool) -> None:
    """Destroying whatever the plan does not name changes nothing."""
    setting = prepare(form, shaped(TYPES[2], form), a_in_tmem=a_in_tmem)
    operation = dataclasses.replace(setting.operation, accumulate=True)
    for tensor in setting.tmem:
        tensor[:, D_COLUMN : D_COLUMN + 64] = 0
    plan = plan_mma(operation)
    smem = [np.full_like(memory, 0xFF) for memory in setting.smem]
    tmem = [np.full_like(tensor, 0xFFFFFFFF) for tensor in setting.tmem]
    for read in plan.smem_reads:
        at = (read.addresses[:, None] + np.arange(read.unit_bytes)).ravel()
        smem[read.cta_rank][at] = setting.smem[read.cta_rank][at]
    for region in plan.tmem_reads:
        columns = slice(region.first_column, region.first_column + region.columns)
        old = setting.tmem[region.cta_rank]
        tmem[region.cta_rank][region.lanes, columns] = old[region.lanes, columns]
    expected = setting.run(operation)
    setting.smem, setting.tmem = smem, tmem
    np.testing.assert_array_equal(setting.run(operation), expected)


def test_a_corrupted_byte_is_seen() -> None:
    form = Form(64, 16)
    setting = prepare(form, shaped(TYPES[2], form))
    expected = expected_words(setting)
    np.testing.assert_array_equal(setting.run(), expected)
    read = plan_mma(setting.operation).smem_reads[0]
    setting.smem[0][read.addresses[17] + 1] ^= 0x80  # the sign of one element of A
    changed = (setting.run() != expected).any(axis=1)
    assert changed.sum() == 1


BASE = prepare(Form(64, 16), shaped(TYPES[2], Form(64, 16))).operation


@pytest.mark.parametrize(
    ("changes", "error", "why"),
    [
        ({"scale_input_d": 16}, DescriptorError, "0 to 15"),
        ({"disable_lanes": (0,) * 8}, DescriptorError, "must have 4"),
        ({"ws": True}, DescriptorError, "this N"),
        ({"d": TmemAddress(8, 0)}, TmemError, "0 or 16"),
        ({"d": TmemAddress(0, 500)}, TmemError, "column 511"),
        ({"a": TmemAddress(16, 0)}, DescriptorError, "lane alignment"),
        ({"a": TmemAddress(0, 508)}, TmemError, "matrix A"),
        ({"cta_group": 2}, DescriptorError, "M must be"),
        (
            {
                "a": TmemAddress(0, 0),
                "instruction": shaped(TYPES[2], Form(64, 16), transpose_a=True),
            },
            DescriptorError,
            "transposed",
        ),
        (
            {"instruction": shaped(TYPES[4], Form(64, 16)), "scale_input_d": 1},
            DescriptorError,
            "f16 and tf32",
        ),
        (
            {"instruction": shaped(TYPES[2], Form(128, 64)), "ws": True, "disable_lanes": (1,) * 4},
            DescriptorError,
            "neither",
        ),
        (
            {"instruction": shaped(TYPES[2], Form(128, 16)), "d": TmemAddress(16, 0)},
            TmemError,
            "layout D",
        ),
    ],
)
def test_refused(changes: dict[str, object], error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        plan_mma(dataclasses.replace(BASE, **changes))  # type: ignore[arg-type]


def test_outside_shared_memory() -> None:
    far = dataclasses.replace(BASE, b=dataclasses.replace(BASE.b, start_address=SMEM_BYTES))
    memory, tensor = np.zeros(SMEM_BYTES, np.uint8), np.zeros((128, 512), np.uint32)
    with pytest.raises(IndexError):
        plan_mma(far).execute([memory], [tensor])
