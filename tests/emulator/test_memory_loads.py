"""ld and st: every width and space against NumPy, faults, races and flags."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.errors import EmulationFailed, UnsupportedInstruction
from tests.emulator.kernels import aligned, kinds, run_ptx

FEW = settings(max_examples=12)
SCHEDULES = ("fifo", "random", "adversarial")

# PTX type -> (register prefix, NumPy dtype of the memory).
TYPES = {
    "b8": ("%h", "u1"), "u8": ("%r", "u1"), "s8": ("%r", "i1"),
    "b16": ("%h", "u2"), "u16": ("%r", "u2"), "s16": ("%rd", "i2"),
    "b32": ("%r", "u4"), "u32": ("%rd", "u4"), "s32": ("%rd", "i4"), "f32": ("%f", "u4"),
    "b64": ("%rd", "u8"), "u64": ("%rd", "u8"), "s64": ("%rd", "u8"), "f64": ("%fd", "u8"),
}  # fmt: skip
REGISTER_BYTES = {"%h": 2, "%r": 4, "%f": 4, "%rd": 8, "%fd": 8}
LANE = "mov.u32 %r1, %tid.x; cvt.u64.u32 %rd20, %r1;\n"


def element(array: int, register: str, size: int, offset: int = 0) -> str:
    """register = address of unit %tid.x of an array, `size` bytes each."""
    return (
        f"mad.lo.s64 {register}, %rd20, {size}, %rd{array};"
        f"add.s64 {register}, {register}, {offset};\n"
    )


FORMS = [
    (vector, kind)
    for vector in ("", ".v2", ".v4")
    for kind in TYPES
    if int(vector[2:] or 1) * np.dtype(TYPES[kind][1]).itemsize <= 32
]


@pytest.mark.parametrize(("vector", "kind"), FORMS)
def test_loads_extend_and_stores_truncate(vector: str, kind: str) -> None:
    prefix, dtype = TYPES[kind]
    count = int(vector[2:] or 1)
    memory = np.dtype(dtype)
    source = np.random.default_rng(1).integers(0, 256, 32 * count * memory.itemsize, np.uint8)
    width = REGISTER_BYTES[prefix]
    registers, copied = np.zeros(32 * count * width, np.uint8), np.zeros_like(source)
    names = [f"{prefix}{30 + k}" for k in range(count)]
    listed = "{" + ", ".join(names) + "}" if vector else names[0]
    body = LANE + element(1, "%rd21", count * memory.itemsize)
    body += f"ld.global{vector}.{kind} {listed}, [%rd21];\n"
    body += element(3, "%rd22", count * memory.itemsize)
    body += f"st.global{vector}.{kind} [%rd22], {listed};\n"
    body += element(2, "%rd23", count * width)
    body += "".join(
        f"st.global.b{8 * width} [%rd23+{k * width}], {name};\n" for k, name in enumerate(names)
    )
    source, copied = aligned(source), aligned(copied)
    run_ptx(body, [source, registers, copied])
    np.testing.assert_array_equal(copied, source)
    signed = "i" if memory.kind == "i" else "u"
    expected = source.view(dtype).astype(f"{signed}{width}").view(np.uint8)
    np.testing.assert_array_equal(registers, expected)


@pytest.mark.parametrize(
    ("text", "registers", "lane_bytes"),
    [
        ("v8.b32", [f"%r{30 + k}" for k in range(8)], 32),
        ("v4.b64", [f"%rd{30 + k}" for k in range(4)], 32),
        ("v2.b64", ["%rd30", "%rd31"], 16),
        ("v8.b16", [f"%h{30 + k}" for k in range(8)], 16),
        ("L1::no_allocate.L2::128B.v4.f32", [f"%f{30 + k}" for k in range(4)], 16),
        ("cs.b128", ["%q1"], 16),
    ],
)
def test_wide_accesses(text: str, registers: list[str], lane_bytes: int) -> None:
    source = aligned(np.arange(32 * lane_bytes, dtype=np.int64).astype(np.uint8))
    target = aligned(np.zeros_like(source))
    listed = registers[0] if len(registers) == 1 else "{" + ", ".join(registers) + "}"
    body = LANE + element(1, "%rd21", lane_bytes) + element(2, "%rd22", lane_bytes)
    store = text.replace(".L2::128B", "")
    body += f"ld.global.{text} {listed}, [%rd21];\nst.global.{store} [%rd22], {listed};"
    run_ptx(body, [source, target])
    np.testing.assert_array_equal(target, source)


@pytest.mark.parametrize("text", ["shared.v8.b32", "shared.v4.b64"])
def test_vectors_of_32_bytes_are_for_global_memory(text: str) -> None:
    count = int(text.split(".v")[1][0])
    registers = ", ".join(f"%{'r' if 'b32' in text else 'rd'}{k}" for k in range(30, 30 + count))
    with pytest.raises(UnsupportedInstruction, match="at most 16"):
        run_ptx(f"mov.u32 %r2, smem; ld.{text} {{{registers}}}, [%r2];", smem=1024)


@FEW
@given(
    places=st.permutations(range(32)),
    mask=st.integers(1, 2**32 - 1),
    space=st.sampled_from(["shared", "shared::cta", "shared::cluster", "generic", "local"]),
    size=st.sampled_from([1, 2, 4, 8]),
    schedule=st.sampled_from(SCHEDULES),
)
def test_masked_stores_at_scattered_places(
    places: list[int], mask: int, space: str, size: int, schedule: str
) -> None:
    """Lanes of a mask store through a permutation; all lanes read back after a barrier."""
    register = {1: "%h5", 2: "%h5", 4: "%r5", 8: "%rd5"}[size]
    values = np.random.default_rng(mask).integers(0, 256, 32 * size, np.uint8)
    order = np.array(places, np.uint32)
    target = np.zeros_like(values)
    dot = "" if space == "generic" else f".{space}"
    if space == "local":
        base = "mov.b64 %rd9, depot;"
        order = np.zeros(32, np.uint32)  # every thread has a depot of its own
    else:
        window = "cvta.shared.u64 %rd9, %rd9;" if space == "generic" else ""
        base = f"mov.u64 %rd9, smem; {window}"
    body = LANE + element(1, "%rd21", size) + element(2, "%rd22", 4) + element(3, "%rd23", size)
    body += f"""
      {base}
      ld.global.b32 %r4, [%rd22];
      mad.wide.u32 %rd10, %r4, {size}, %rd9;
      mov.b{8 * max(size, 2)} {register}, 0;
      st{dot}.b{8 * size} [%rd10], {register};
      bar.warp.sync 0xffffffff;
      mov.u32 %r6, {mask}; shr.u32 %r6, %r6, %r1; and.b32 %r6, %r6, 1; setp.eq.u32 %p1, %r6, 1;
      @%p1 ld.global.b{8 * size} {register}, [%rd21];
      @%p1 st{dot}.b{8 * size} [%rd10], {register};
      bar.warp.sync 0xffffffff;
      ld{dot}.b{8 * size} {register}, [%rd10];
      st.global.b{8 * size} [%rd23], {register};
    """
    local = ".local .align 8 .b8 depot[8];"
    report = run_ptx(body, [values, order, target], smem=512, declarations=local, schedule=schedule)
    active = np.array([mask >> lane & 1 for lane in range(32)], bool)
    expected = np.where(active[:, None], values.reshape(32, size), 0)
    np.testing.assert_array_equal(target.reshape(32, size), expected)
    assert report.ok


def test_generic_addresses_of_each_lane_on_their_own() -> None:
    """One ld reads shared, global, parameter, local and constant memory, by lane."""
    source, target = np.arange(32, dtype=np.uint32) + 100, np.zeros(32, np.uint32)
    body = LANE + element(1, "%rd21", 4) + element(2, "%rd22", 4)
    body += """
      mov.u32 %r2, smem; shl.b32 %r3, %r1, 2; add.u32 %r2, %r2, %r3;
      add.u32 %r4, %r1, 1000; st.shared.b32 [%r2], %r4;
      mov.b64 %rd10, depot; add.u32 %r4, %r1, 2000; st.local.b32 [%rd10], %r4;
      cvt.u64.u32 %rd11, %r2; cvta.shared.u64 %rd11, %rd11;
      mov.b64 %rd12, block0; cvta.param.u64 %rd12, %rd12;
      mov.b64 %rd13, table; add.s64 %rd13, %rd13, 4;
      rem.u32 %r5, %r1, 5;
      setp.eq.u32 %p1, %r5, 1; selp.b64 %rd21, %rd11, %rd21, %p1;
      setp.eq.u32 %p1, %r5, 2; selp.b64 %rd21, %rd12, %rd21, %p1;
      setp.eq.u32 %p1, %r5, 3; selp.b64 %rd21, %rd10, %rd21, %p1;
      setp.eq.u32 %p1, %r5, 4; selp.b64 %rd21, %rd13, %rd21, %p1;
      ld.b32 %r6, [%rd21];
      st.b32 [%rd22], %r6;
    """
    declarations = ".local .align 8 .b8 depot[8]; .const .align 4 .b32 table[2] = {7, 77};"
    text_block = (555).to_bytes(4, "little") + bytes(4)
    run_ptx(body, [source, target], smem=512, blocks=[text_block], declarations=declarations)
    lane = np.arange(32)
    expected = np.choose(lane % 5, [lane + 100, lane + 1000, 555, lane + 2000, 77])
    np.testing.assert_array_equal(target, expected)


def test_a_range_of_shared_memory_is_cleared() -> None:
    """st.bulk by one lane; the bytes beside the range stay."""
    out = np.zeros(32, np.uint64)
    body = """
      mov.u32 %r1, %tid.x; mov.u32 %r2, smem; mad.lo.u32 %r3, %r1, 8, %r2; mov.b64 %rd9, 7;
      st.shared.b64 [%r3], %rd9; bar.warp.sync 0xffffffff; setp.eq.u32 %p1, %r1, 3;
      cvt.u64.u32 %rd11, %r2; mov.b64 %rd10, {size};
      @%p1 st.bulk.weak.shared::cta [%rd11+32], %rd10, 0; bar.warp.sync 0xffffffff;
      ld.shared.b64 %rd9, [%r3]; mad.wide.u32 %rd12, %r1, 8, %rd1; st.global.b64 [%rd12], %rd9;
    """
    assert run_ptx(body.replace("{size}", "80"), [out], smem=256).ok
    assert out.tolist() == [7] * 4 + [0] * 10 + [7] * 18
    for size, kind in (("76", "misaligned"), ("256", "out-of-bounds")):
        report = run_ptx(body.replace("{size}", size), [out], smem=256, collect=True)
        assert kinds(report) == {kind}


def test_shared_addresses_are_no_global_ones() -> None:
    body = "mov.u64 %rd9, smem; cvta.shared.u64 %rd9, %rd9; st{space}.b32 [%rd9], 1;"
    assert run_ptx(body.format(space=""), smem=64).ok
    for space in (".global", ".local"):
        report = run_ptx(body.format(space=space), smem=64, collect=True)
        assert kinds(report) == {"out-of-bounds"}


def test_a_float_literal_is_stored_in_its_type() -> None:
    target = np.zeros(2, np.float32)
    run_ptx("st.global.f32 [%rd1], 1.5; st.global.f32 [%rd1+4], 0f40490FDB;", [target])
    np.testing.assert_array_equal(target, np.array([1.5, np.float32(np.pi)], np.float32))


FAULTS = {
    "misaligned": "ld.global.b32 %r2, [%rd1+2];",
    "misaligned vector": "ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%rd1+8];",
    "past the end": "ld.global.b32 %r2, [%rd1+256];",
    "half past the end": "st.global.v2.b32 [%rd1+256], {%r2, %r3};",
    "before the start": "ld.global.b32 %r2, [%rd1+-16];",
    "read-only": "st.global.b32 [%rd2], %r2;",
    "nowhere": "mov.u64 %rd9, 64; ld.global.b32 %r2, [%rd9];",
    "shared address 0": "mov.u32 %r9, 0; ld.shared.b32 %r2, [%r9];",
    "past shared memory": "mov.u32 %r9, smem; ld.shared.b32 %r2, [%r9+1024];",
    "no such CTA": "mov.u32 %r9, smem; or.b32 %r9, %r9, 0x3000000; ld.shared.b32 %r2, [%r9];",
    "uninitialised": "mov.u32 %r9, smem; ld.shared.b32 %r2, [%r9+8];",
    "past local memory": "mov.b64 %rd9, depot; st.local.b32 [%rd9+16], %r2;",
    "parameter written": "mov.b64 %rd9, pointer0; st.b32 [%rd9], %r2;",
}


@pytest.mark.parametrize("what", FAULTS)
def test_faults_have_their_kind(what: str) -> None:
    kind = "misaligned" if "misaligned" in what else "out-of-bounds"
    kind = "uninitialised" if what == "uninitialised" else kind
    arrays = {"data": np.zeros(64, np.uint32), "constant": np.zeros(64, np.uint32)}
    report = run_ptx(
        FAULTS[what], arrays, smem=1024, read_only=["constant"], collect=True,
        declarations=".local .align 8 .b8 depot[16];",
    )  # fmt: skip
    assert kinds(report) == {kind}
    assert report.findings[0].line > 0
    with pytest.raises(EmulationFailed, match=kind):
        run_ptx(FAULTS[what], arrays, smem=1024, read_only=["constant"],
                declarations=".local .align 8 .b8 depot[16];")  # fmt: skip


@pytest.mark.parametrize(("value", "races"), [("%r1", True), ("%r3", False)])
@pytest.mark.parametrize("space", ["global", "shared"])
def test_lanes_that_write_one_place(value: str, races: bool, space: str) -> None:
    body = "mov.u32 %r1, %tid.x; mov.u32 %r3, 9; mov.u64 %rd9, smem;"
    body += f"st.{space}.b32 [{'%rd1' if space == 'global' else '%rd9'}], {value};"
    report = run_ptx(body, [np.zeros(8, np.uint32)], smem=64, collect=True)
    assert kinds(report) == ({"race"} if races else set())


EXCHANGE = """
  mov.u32 %r1, %tid.x; mov.u32 %r2, smem; shl.b32 %r3, %r1, 2; add.u32 %r4, %r2, %r3;
  st.shared.b32 [%r4], %r1;
  {barrier}
  xor.b32 %r5, %r3, 128; add.u32 %r4, %r2, %r5; ld.shared.b32 %r6, [%r4];
  mul.wide.u32 %rd9, %r1, 4; add.s64 %rd9, %rd1, %rd9; st.global.b32 [%rd9], %r6;
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(3))
def test_a_barrier_orders_shared_memory(schedule: str, seed: int) -> None:
    target = np.zeros(64, np.uint32)
    options: dict[str, Any] = {"block": (64, 1, 1), "smem": 256, "schedule": schedule, "seed": seed}
    assert run_ptx(EXCHANGE.format(barrier="bar.sync 0;"), [target], **options).ok
    np.testing.assert_array_equal(target, np.arange(64) ^ 32)
    report = run_ptx(EXCHANGE.format(barrier=""), [target], collect=True, **options)
    assert kinds(report) & {"race", "uninitialised"}


# Warp 0 writes data and raises a flag; warp 1 polls the flag and reads the data.
FLAG = """
  mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; and.b32 %r3, %r1, 31; {base}
  setp.eq.u32 %p1, %r2, 1; setp.eq.u32 %p2, %r3, 0;
  @%p1 bra consumer;
  @%p2 st.{space}.b32 [%rd9+64], 41;
  {before}
  @%p2 st.{release}.{space}.b32 [%rd9], 1;
  bra done;
consumer:
  ld.{acquire}.{space}.b32 %r4, [%rd9];
  setp.ne.u32 %p3, %r4, 1;
  @%p3 bra consumer;
  {after}
  ld.{space}.b32 %r5, [%rd9+64];
  @%p2 st.global.b32 [%rd1+128], %r5;
done:
"""
START = "@%p2 st.shared.b32 [%rd9], 0; bar.sync 0;"
PATTERNS = {
    "release, acquire": ("release.cta", "acquire.cta", "", "", True),
    "gpu scope": ("release.gpu", "acquire.gpu", "", "", True),
    "fences": ("relaxed.gpu", "relaxed.gpu", "fence.acq_rel.gpu;", "fence.acq_rel.gpu;", True),
    "membar, volatile": ("volatile", "volatile", "membar.gl;", "membar.gl;", True),
    "release, fence": ("release.gpu", "relaxed.gpu", "", "fence.acq_rel.gpu;", True),
    "relaxed": ("relaxed.gpu", "relaxed.gpu", "", "", False),
    "only release": ("release.gpu", "relaxed.gpu", "", "", False),
    "only acquire": ("relaxed.gpu", "acquire.gpu", "", "", False),
    "fence on one side": ("relaxed.gpu", "relaxed.gpu", "fence.acq_rel.gpu;", "", False),
    "volatile": ("volatile", "volatile", "", "", False),
}


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_message_passing_through_a_flag(name: str, space: str, schedule: str) -> None:
    release, acquire, before, after, ordered = PATTERNS[name]
    base = "mov.b64 %rd9, %rd1;"
    if space == "shared":
        base = "mov.u64 %rd9, smem; setp.eq.u32 %p2, %r1, 0;" + START
    body = FLAG.format(
        space=space, release=release, acquire=acquire, before=before, after=after, base=base
    )
    data = np.zeros(64, np.uint32)
    report = run_ptx(body, [data], block=(64, 1, 1), smem=128, collect=True, schedule=schedule)
    assert data[32] == 41
    assert kinds(report) == (set() if ordered else {"race"})


@pytest.mark.parametrize(("scope", "ordered"), [("gpu", True), ("cta", False)])
@pytest.mark.parametrize("side", ["release", "acquire"])
def test_a_scope_must_include_the_other_cta(scope: str, ordered: bool, side: str) -> None:
    body = """
      mov.u32 %r2, %ctaid.x; setp.eq.u32 %p1, %r2, 1; mov.b64 %rd9, %rd1;
      mov.u32 %r1, %tid.x; setp.eq.u32 %p2, %r1, 0;
      @%p1 bra consumer;
    """ + FLAG.split("@%p1 bra consumer;")[1]
    scopes = {"release": "gpu", "acquire": "gpu", side: scope}
    body = body.format(
        space="global", before="", after="",
        release=f"release.{scopes['release']}", acquire=f"acquire.{scopes['acquire']}",
    )  # fmt: skip
    data = np.zeros(64, np.uint32)
    report = run_ptx(body, [data], grid=(2, 1, 1), collect=True)
    assert data[32] == 41
    assert kinds(report) == (set() if ordered else {"race"})


def test_a_flag_that_nobody_raises_is_a_livelock() -> None:
    body = "again: ld.acquire.gpu.global.b32 %r2, [%rd1]; setp.eq.u32 %p1, %r2, 0; @%p1 bra again;"
    report = run_ptx(body, [np.zeros(4, np.uint32)], collect=True)
    assert kinds(report) == {"livelock"}


def test_another_launch_may_read_without_synchronisation() -> None:
    """A store of one CTA races with an unordered load of another, not with its own."""
    body = """
      mov.u32 %r2, %ctaid.x; setp.eq.u32 %p1, %r2, 0; mov.u32 %r1, %tid.x;
      setp.eq.u32 %p2, %r1, 0; and.pred %p1, %p1, %p2;
      @%p1 st.global.b32 [%rd1], 5;
      ld.global.b32 %r3, [%rd1{offset}];
    """
    data = np.zeros(16, np.uint32)
    alone = run_ptx(body.replace("{offset}", "+32"), [data], grid=(4, 1, 1), collect=True)
    shared = run_ptx(body.replace("{offset}", ""), [data], grid=(4, 1, 1), collect=True)
    assert alone.ok
    assert kinds(shared) == {"race"}
