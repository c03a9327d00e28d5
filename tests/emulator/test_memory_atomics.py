"""atom and red against a Python loop over the lanes; locks, flags and asynchronous stores."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.errors import UnsupportedInstruction
from tests.emulator.kernels import aligned, kinds, run_ptx

FEW = settings(max_examples=10)
SCHEDULES = ("fifo", "random", "adversarial")
LANE = "mov.u32 %r1, %tid.x; cvt.u64.u32 %rd20, %r1;\n"


def wrap(value: int, dtype: str) -> int:
    """An exact integer modulo the type's range."""
    bits = 8 * np.dtype(dtype).itemsize
    value &= (1 << bits) - 1
    return value - (1 << bits) if dtype[0] == "i" and value >> (bits - 1) else value


# (operation, type) -> (NumPy dtype, old, operand -> new), on exact Python numbers.
RULES: dict[tuple[str, str], tuple[str, Callable[[int, int], int]]] = {
    ("add", "u32"): ("u4", lambda a, b: wrap(a + b, "u4")),
    ("add", "s32"): ("i4", lambda a, b: wrap(a + b, "i4")),
    ("add", "u64"): ("u8", lambda a, b: wrap(a + b, "u8")),
    ("min", "s32"): ("i4", min), ("max", "s32"): ("i4", max),
    ("min", "u32"): ("u4", min), ("max", "u64"): ("u8", max), ("min", "s64"): ("i8", min),
    ("inc", "u32"): ("u4", lambda a, b: 0 if a >= b else a + 1),
    ("dec", "u32"): ("u4", lambda a, b: b if a == 0 or a > b else a - 1),
    ("and", "b32"): ("u4", lambda a, b: a & b), ("or", "b64"): ("u8", lambda a, b: a | b),
    ("xor", "b32"): ("u4", lambda a, b: a ^ b), ("exch", "b64"): ("u8", lambda a, b: b),
    ("exch", "b32"): ("u4", lambda a, b: b),
}  # fmt: skip


def kernel(instruction: str, size: int, register: str, space: str, third: str = "") -> str:
    """Each lane applies an instruction to place index[lane] and stores what it returned.

    Arrays: memory (32 places), operands, indices, results.
    """
    bits = 8 * size
    copy_in = f"ld.global.b{bits} {register}1, [%rd21]; st.shared.b{bits} [%rd9], {register}1;"
    copy_out = f"ld.shared.b{bits} {register}1, [%rd9]; st.global.b{bits} [%rd21], {register}1;"
    shared = space != "global"
    window = "cvta.shared.u64 %rd10, %rd10;" if space == "" else ""
    dot = f".{space}" if space else ""
    opcode, modifiers = instruction.split(".", 1)
    result = "" if opcode == "red" else f"{register}3,"
    store = "" if opcode == "red" else f"st.global.b{bits} [%rd24], {register}3;"
    return f"""{LANE}
      mov.u64 %rd8, smem; mad.lo.s64 %rd9, %rd20, {size}, %rd8;
      mad.lo.s64 %rd21, %rd20, {size}, %rd1; mad.lo.s64 %rd22, %rd20, {size}, %rd2;
      mad.lo.s64 %rd23, %rd20, 4, %rd3; mad.lo.s64 %rd24, %rd20, {size}, %rd4;
      {copy_in if shared else ""} bar.warp.sync 0xffffffff;
      ld.global.b{bits} {register}2, [%rd22]; ld.global.u32 %r5, [%rd23];
      mad.wide.u32 %rd10, %r5, {size}, {"%rd8" if shared else "%rd1"}; {window}
      {opcode}{dot}.{modifiers} {result} [%rd10], {register}2{third};
      bar.warp.sync 0xffffffff;
      {copy_out if shared else ""} {store}
    """


def numbers(rule: tuple[str, str]) -> st.SearchStrategy[np.ndarray]:
    info = np.iinfo(RULES[rule][0])
    edge = st.sampled_from([int(info.min), int(info.max), 0, 1, 2])
    one = edge | st.integers(int(info.min), int(info.max)) | st.integers(0, 5)
    return st.lists(one, min_size=64, max_size=64).map(lambda x: np.array(x, info.dtype))


@pytest.mark.parametrize("rule", RULES, ids=".".join)
@FEW
@given(data=st.data())
def test_lanes_apply_one_after_the_other(rule: tuple[str, str], data: st.DataObject) -> None:
    apply = RULES[rule][1]
    values = data.draw(numbers(rule))
    memory, operands = values[:32].copy(), values[32:].copy()
    places = data.draw(st.lists(st.integers(0, 3) | st.integers(0, 31), min_size=32, max_size=32))
    index, results = np.array(places, np.uint32), np.zeros_like(memory)
    expected, returned = memory.tolist(), []
    for lane, place in enumerate(places):
        returned.append(expected[place])
        expected[place] = apply(expected[place], int(operands[lane]))
    space = data.draw(st.sampled_from(["global", "shared", ""]))
    opcode = "atom" if rule[0] == "exch" else data.draw(st.sampled_from(["atom", "red"]))
    size = memory.itemsize
    text = kernel(f"{opcode}.{'.'.join(rule)}", size, "%r4" if size == 4 else "%rd4", space)
    run_ptx(text, [memory, operands, index, results], smem=256)
    assert memory.tolist() == expected
    if opcode == "atom":
        assert results.tolist() == returned


@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize("space", ["global", "shared", ""])
def test_compare_and_swap(width: int, space: str) -> None:
    """Lane t swaps place t / 2 if it holds the lane's operand."""
    dtype = np.dtype(f"u{width // 8}")
    memory = np.arange(32).astype(dtype)
    operands = (np.arange(32) // 2 + np.arange(32) % 3 % 2).astype(dtype)
    index, results = np.arange(32, dtype=np.uint32) // 2, np.zeros(32, dtype)
    expected, returned = memory.tolist(), []
    for lane in range(32):
        place = lane // 2
        returned.append(expected[place])
        if expected[place] == operands[lane]:
            expected[place] = 99
    register = {16: "%h4", 32: "%r4", 64: "%rd4"}[width]
    text = kernel(f"atom.acq_rel.gpu.cas.b{width}", width // 8, register, space, ", 99")
    text = text.replace(".acq_rel.gpu", "").replace("atom.", "atom.acq_rel.gpu.")
    run_ptx(text, [memory, operands, index, results], smem=256)
    assert memory.tolist() == expected
    assert results.tolist() == returned


def test_128_bits_are_exchanged_and_swapped() -> None:
    memory, out = aligned(np.array([1, 2, 3, 4], np.uint64)), aligned(np.zeros(4, np.uint64))
    body = """
      mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, 0;
      mov.b64 %rd4, 7; mov.b64 %rd5, 8; mov.b128 %q1, {%rd4, %rd5};
      mov.b64 %rd4, 3; mov.b64 %rd5, 4; mov.b128 %q2, {%rd4, %rd5};
      @%p1 atom.global.exch.b128 %q3, [%rd1], %q1;
      @%p1 atom.global.cas.b128 %q4, [%rd1+16], %q2, %q1;
      @%p1 atom.global.cas.b128 _, [%rd1+16], %q2, %q2;
      @%p1 st.global.b128 [%rd2], %q3;
      @%p1 st.global.b128 [%rd2+16], %q4;
    """
    run_ptx(body, [memory, out])
    assert out.tolist() == [1, 2, 3, 4]
    assert memory.tolist() == [7, 8, 7, 8]


FLOATS = {
    "f16": (np.float16, "noftz.f16", "%h2"),
    "bf16": (ml_dtypes.bfloat16, "noftz.bf16", "%h2"),
    "f32": (np.float32, "f32", "%f2"),
    "f64": (np.float64, "f64", "%fd2"),
}


@pytest.mark.parametrize("name", FLOATS)
def test_floats_round_after_every_addition(name: str) -> None:
    """All lanes add to one place: the sum in lane order, each step rounded to nearest."""
    dtype, suffix, register = FLOATS[name]
    operands = np.random.default_rng(3).normal(size=32).astype(dtype)
    memory = np.array([0.125], dtype)
    expected = memory[0]
    for value in operands:
        expected = (expected + value).astype(dtype)
    size = operands.itemsize
    body = (
        f"{LANE} mad.lo.s64 %rd21, %rd20, {size}, %rd2; ld.global.b{8 * size} {register}, [%rd21];"
    )
    run_ptx(body + f"red.relaxed.gpu.global.add.{suffix} [%rd1], {register};", [memory, operands])
    assert memory[0] == expected


@pytest.mark.parametrize(
    ("text", "registers", "dtype"),
    [
        ("add.v4.f32", ["%f1", "%f2", "%f3", "%f4"], np.float32),
        ("add.v2.f32", ["%f1", "%f2"], np.float32),
        ("add.noftz.v8.bf16", [f"%h{k}" for k in range(1, 9)], ml_dtypes.bfloat16),
        ("v4.f16.max.noftz", [f"%h{k}" for k in range(1, 5)], np.float16),
        ("min.noftz.v2.bf16x2", ["%r2", "%r3"], ml_dtypes.bfloat16),
        ("add.noftz.f16x2", ["%r2"], np.float16),
    ],
)
@pytest.mark.parametrize("opcode", ["red", "atom"])
def test_vectors_and_packed_halves(
    opcode: str, text: str, registers: list[str], dtype: type
) -> None:
    register_bytes = {"%f": 4, "%h": 2, "%r": 4}[registers[0][:2]]
    lane_bytes = register_bytes * len(registers)
    count = 32 * lane_bytes // np.dtype(dtype).itemsize
    random = np.random.default_rng(4)
    memory, operands = (aligned(random.normal(size=count).astype(dtype)) for _ in range(2))
    old, results = memory.copy(), aligned(np.zeros(count, dtype))
    combine = {"add": np.add, "max": np.maximum, "min": np.minimum}
    name = next(part for part in text.split(".") if part in combine)
    expected = combine[name](old, operands)
    listed = "{" + ", ".join(registers) + "}" if len(registers) > 1 else registers[0]
    vector = f".v{len(registers)}" if len(registers) > 1 else ""
    access = f"{vector}.b{8 * register_bytes}"
    body = LANE + "".join(
        f"mad.lo.s64 %rd{30 + k}, %rd20, {lane_bytes}, %rd{k};" for k in (1, 2, 3)
    )
    result = f"{listed}, " if opcode == "atom" else ""
    body += (
        f"ld.global{access} {listed}, [%rd32]; {opcode}.global.{text} {result}[%rd31], {listed};"
    )
    body += f"st.global{access} [%rd33], {listed};"
    run_ptx(body, [memory, operands, results])
    np.testing.assert_array_equal(memory, expected)
    np.testing.assert_array_equal(results, old if opcode == "atom" else operands)


@pytest.mark.parametrize(("space", "flushed"), [("global", True), ("shared", False)])
def test_subnormal_sums_are_flushed_in_global_memory_only(space: str, flushed: bool) -> None:
    tiny = np.float32(1e-40)
    memory = np.zeros(2, np.float32)
    body = f"""
      mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, 0; mov.u64 %rd9, smem; mov.f32 %f1, 0f{
        int(tiny.view(np.uint32)):08X};
      @%p1 st.shared.f32 [%rd9], 0f00000000;
      @%p1 red.{space}.add.f32 [{"%rd1" if space == "global" else "%rd9"}], %f1;
      @%p1 ld.shared.f32 %f2, [%rd9];
      @%p1 st.global.f32 [%rd1+4], %f2;
    """
    run_ptx(body, [memory], smem=64)
    assert memory[0 if space == "global" else 1] == (0 if flushed else tiny)


@pytest.mark.parametrize(
    "text",
    [
        "atom.global.add.f16 %h1, [%rd1], %h2;",
        "atom.shared.add.v2.f32 {%f1, %f2}, [%rd1], {%f1, %f2};",
        "red.global.exch.b32 [%rd1], %r1;",
        "red.acquire.gpu.global.add.u32 [%rd1], %r1;",
        "atom.global.min.f32 %f1, [%rd1], %f2;",
        "atom.volatile.global.add.u32 %r1, [%rd1], %r2;",
        "atom.global.add.b32 %r1, [%rd1], %r2;",
        "multimem.red.relaxed.gpu.global.add.f32 [%rd1], %f1;",
    ],
)
def test_forms_that_ptx_excludes(text: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        run_ptx(text, [np.zeros(8, np.uint32)])


LOCK = """
  mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 31; setp.ne.u32 %p1, %r2, 0; @%p1 bra done;
spin: atom.{acquire}.gpu.global.cas.b32 %r3, [%rd1], 0, 1; setp.ne.u32 %p2, %r3, 0; @%p2 bra spin;
  ld.global.u32 %r4, [%rd1+64]; add.u32 %r4, %r4, 1; st.global.u32 [%rd1+64], %r4;
  {unlock}
done:
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("acquire", "unlock", "ordered"),
    [
        ("acquire", "st.release.gpu.global.b32 [%rd1], 0;", True),
        ("acq_rel", "atom.release.gpu.global.exch.b32 %r5, [%rd1], 0;", True),
        ("relaxed", "st.release.gpu.global.b32 [%rd1], 0;", False),
        ("acquire", "st.relaxed.gpu.global.b32 [%rd1], 0;", False),
        ("acquire", "fence.acq_rel.gpu; st.relaxed.gpu.global.b32 [%rd1], 0;", True),
    ],
)
def test_a_spin_lock(schedule: str, acquire: str, unlock: str, ordered: bool) -> None:
    data = np.zeros(32, np.uint32)
    report = run_ptx(
        LOCK.format(acquire=acquire, unlock=unlock), [data], grid=(3, 1, 1), block=(128, 1, 1),
        collect=True, schedule=schedule, seed=5,
    )  # fmt: skip
    assert data[16] == 12
    assert kinds(report) == (set() if ordered else {"race"})


@pytest.mark.parametrize(("second", "ordered"), [("red.relaxed", True), ("st.relaxed", False)])
def test_an_atomic_continues_a_release_sequence(second: str, ordered: bool) -> None:
    """CTA 0 releases 1, CTA 1 makes it 2 by a relaxed access, CTA 2 acquires the 2."""
    value = "[%rd1], 1" if second.startswith("red") else "[%rd1], 2"
    operation = "global.add.u32" if second.startswith("red") else "global.b32"
    body = f"""
      mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; setp.ne.u32 %p1, %r1, 0; @%p1 bra done;
      setp.eq.u32 %p2, %r2, 1; @%p2 bra second; setp.eq.u32 %p3, %r2, 2; @%p3 bra third;
      st.global.b32 [%rd1+64], 5; st.release.gpu.global.b32 [%rd1], 1; bra done;
    second: ld.relaxed.gpu.global.b32 %r3, [%rd1]; setp.ne.u32 %p4, %r3, 1; @%p4 bra second;
      {second}.gpu.{operation} {value}; bra done;
    third: ld.acquire.gpu.global.b32 %r3, [%rd1]; setp.ne.u32 %p4, %r3, 2; @%p4 bra third;
      ld.global.b32 %r4, [%rd1+64]; st.global.b32 [%rd1+128], %r4;
    done:
    """
    data = np.zeros(64, np.uint32)
    report = run_ptx(body, [data], grid=(3, 1, 1), collect=True, resident_clusters=3)
    assert data[32] == 5
    assert kinds(report) == (set() if ordered else {"race"})


def test_an_atomic_races_with_a_plain_store() -> None:
    body = """
      mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; setp.eq.u32 %p1, %r2, 0;
      @%p1 red.global.add.u32 [%rd1], 1;
      @!%p1 {other} [%rd1], {value};
    """
    data = np.zeros(8, np.uint32)
    for other, value, races in (
        ("st.global.b32", "7", True),
        ("red.global.max.u32", "7", False),
        ("st.relaxed.gpu.global.b32", "7", False),
    ):
        text = body.format(other=other, value=value)
        report = run_ptx(text, [data], block=(64, 1, 1), collect=True)
        assert kinds(report) == ({"race"} if races else set()), other


WAIT = "again: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0; @!%p2 bra again;"
ASYNC = """
  mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, 0; mov.u32 %r2, smem; mov.u32 %r9, %cluster_ctarank;
  @%p1 mbarrier.init.shared.b64 [%r2], 1;
  @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], {bytes};
  shl.b32 %r3, %r1, 2; add.u32 %r3, %r2, %r3; st.shared.b32 [%r3+256], 100;
  fence.mbarrier_init.release.cluster;
  barrier.cluster.arrive; barrier.cluster.wait;
  xor.b32 %r8, %r9, 1; mapa.shared::cluster.u32 %r5, %r2, %r8;
  mapa.shared::cluster.u32 %r4, %r3, %r8;
  mad.lo.u32 %r6, %r9, 1000, %r1;
  {store}
  {wait}
  ld.shared.b32 %r7, [%r3+256];
  mad.lo.u32 %r8, %r9, 32, %r1; mul.wide.u32 %rd9, %r8, 4; add.s64 %rd9, %rd1, %rd9;
  st.global.b32 [%rd9], %r7;
  barrier.cluster.arrive; barrier.cluster.wait;
"""
STORES = {
    "st": "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r4+256], %r6, [%r5];",
    "red": "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 "
    "[%r4+256], %r6, [%r5];",
}


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_asynchronous_stores_to_the_other_cta(kind: str, schedule: str) -> None:
    out = np.zeros(64, np.uint32)
    text = ASYNC.format(store=STORES[kind], bytes=128, wait=WAIT)
    report = run_ptx(text, [out], grid=(2, 1, 1), cluster=(2, 1, 1), smem=512, schedule=schedule)
    lane = np.arange(32)
    sent = np.concatenate([lane + 1000, lane])
    np.testing.assert_array_equal(out, sent + (100 if kind == "red" else 0))
    assert report.ok


@pytest.mark.parametrize(
    ("planted", "kind"),
    [
        (lambda text: text.replace(WAIT, ""), "race"),
        (lambda text: text.replace("[%r5];", "[%r2];"), "out-of-bounds"),
        (lambda text: text.replace("[%r5];", "[%r5+8];"), "mbarrier"),
    ],
)
def test_faults_of_asynchronous_stores(planted: Callable[[str], str], kind: str) -> None:
    text = planted(ASYNC.format(store=STORES["st"], bytes=128, wait=WAIT))
    report = run_ptx(
        text, [np.zeros(64, np.uint32)], grid=(2, 1, 1), cluster=(2, 1, 1), smem=512, collect=True,
        schedule="adversarial",
    )  # fmt: skip
    assert kind in kinds(report)


@pytest.mark.parametrize(
    ("kind", "place", "finding"),
    [("f32", "%rd1", "race"), ("f32", "%rd21", None), ("u32", "%rd1", None)],
)
def test_sums_whose_bits_depend_on_their_order(kind: str, place: str, finding: str | None) -> None:
    """Two CTAs add to one place, or each to places of its own; reported only where asked for."""
    text = (
        f"{LANE} mov.u32 %r2, %ctaid.x; mad.lo.u32 %r1, %r2, 32, %r1; "
        f"mad.wide.u32 %rd21, %r1, 4, %rd1; mov.b32 %r3, 0x3f800000; mov.b32 %f1, %r3; "
        f"red.global.add.{kind} [{place}], {'%f1' if kind == 'f32' else '%r3'};"
    )
    for strict in (False, True):
        data = np.zeros(64, np.float32)
        report = run_ptx(text, [data], grid=(2, 1, 1), collect=True, ordered_sums=strict)
        assert kinds(report) == ({finding} if strict and finding else set())
