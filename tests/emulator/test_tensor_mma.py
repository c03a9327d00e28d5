"""tcgen05.mma, commit, cp and shift, executed: results under every schedule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.errors import UnsupportedInstruction
from fa4.emulator.tcgen05.descriptors import SmemDescriptor, Swizzle
from fa4.emulator.tcgen05.formats import Format
from tests.emulator.kernels import kinds, run_ptx
from tests.emulator.tensor_kernels import (
    DATA,
    DECLARATIONS,
    LANE_ADDRESS,
    SCHEDULES,
    TensorKernel,
    load_values,
    own_row,
    read_out,
    registers,
    wait,
)
from tests.emulator.tensor_operands import DTYPES, Operands, commit, mma, move, operands

LANES = 128
TYPES = [
    ("f16", Format.F16), ("f16", Format.BF16), ("tf32", Format.TF32), ("f8f6f4", Format.E4M3),
    ("f8f6f4", Format.E5M2), ("i8", Format.S8), ("i8", Format.U8),
]  # fmt: skip


def fill(columns: int, value: int = 0) -> str:
    """Every warp writes `value` to its lanes of the first columns."""
    text = LANE_ADDRESS + "".join(f"  mov.b32 %v{k}, {value};\n" for k in range(32))
    for first in range(0, columns, 32):
        text += f"  tcgen05.st.sync.aligned.32x32b.x32.b32 [%r22+{first}], {registers(32)};\n"
    return text + "  tcgen05.wait::st.sync.aligned;\n  bar.sync 0;\n"


def run(
    problem: Operands, kernel: TensorKernel, columns: int, extra: tuple[np.ndarray, ...] = (),
    **options: object,
) -> np.ndarray:  # fmt: skip
    """(CTAs * 128, columns) words of tensor memory, behind a run without findings."""
    out = np.zeros((kernel.group * LANES, columns), np.uint32)
    kernel = kernel.but(image_bytes=problem.image.shape[1])
    kernel = kernel.but(after=kernel.after + read_out("%rd2", columns))
    report = kernel.run([problem.image.copy(), out, *extra], **options)
    assert report.ok, str(report)
    return out


def numbers(words: np.ndarray, kind: str) -> np.ndarray:
    """Words of matrix D as numbers."""
    return words.view(np.int32 if kind == "i8" else np.float32).astype(np.float64)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("kind", "element"), TYPES)
def test_product(kind: str, element: Format, schedule: str) -> None:
    problem = operands(kind, element, 128, 32)
    kernel = TensorKernel(work=mma(problem, kind) + commit(), after=wait())
    words = run(problem, kernel, 32, schedule=schedule, seed=2)
    np.testing.assert_array_equal(numbers(words, kind), problem.product)


@settings(max_examples=12)
@given(
    n=st.sampled_from([8, 16, 24, 48, 64]),
    m=st.sampled_from([64, 128]),
    swizzle=st.sampled_from([Swizzle.NONE, Swizzle.B32, Swizzle.B64, Swizzle.B128]),
    accumulations=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_shapes_swizzles_and_accumulation(n, m, swizzle, accumulations, seed) -> None:
    problem = operands("f16", Format.F16, m, n, swizzle=swizzle, seed=seed)
    work = mma(problem, "f16")
    work += mma(problem, "f16", accumulate="1") * (accumulations - 1) + commit()
    kernel = TensorKernel(before=fill(64, 7), work=work, after=wait())
    words = run(problem, kernel, 64, schedule="random", seed=seed)
    rows = np.arange(m)
    lanes = rows if m == 128 else rows % 16 + 32 * (rows // 16)
    np.testing.assert_array_equal(numbers(words[lanes, :n], ""), accumulations * problem.product)
    others = np.ones_like(words, bool)
    others[lanes, :n] = False
    assert (words[others] == 7).all()


def test_f16_result_lies_in_the_low_halves() -> None:
    problem = operands("f16", Format.F16, 128, 16, result=Format.F16)
    words = run(problem, TensorKernel(work=mma(problem, "f16") + commit(), after=wait()), 16)
    halves = words.astype(np.uint16).view(np.float16).astype(np.float64)
    np.testing.assert_array_equal(halves, problem.product)


@pytest.mark.parametrize(("m", "lanes_per_part"), [(32, 32), (64, 64), (128, 128)])
def test_weight_stationary_form_splits_n_over_the_lanes(m: int, lanes_per_part: int) -> None:
    problem = operands("f16", Format.F16, m, 64)
    work = mma(problem, "f16", form="mma.ws") + commit()
    parts = LANES // lanes_per_part
    words = run(problem, TensorKernel(work=work, after=wait()), 64 // parts)
    got = np.concatenate(np.split(numbers(words, ""), parts), axis=1)
    np.testing.assert_array_equal(got, problem.product)


@pytest.mark.parametrize(("kind", "element"), [("f16", Format.F16), ("f8f6f4", Format.E4M3)])
def test_a_in_tensor_memory(kind: str, element: Format) -> None:
    """A comes from registers by tcgen05.st, ordered by wait::st and a barrier."""
    problem = operands(kind, element, 128, 32, seed=4)
    a_words = np.ascontiguousarray(problem.a.astype(DTYPES[element])).view(np.uint32)
    before = own_row("%rd3", 8) + load_values(8) + LANE_ADDRESS
    before += f"  tcgen05.st.sync.aligned.32x32b.x8.b32 [%r22+32], {registers(8)};\n"
    before += "  tcgen05.wait::st.sync.aligned;\n  bar.sync 0;\n"
    work = mma(problem, kind, a="[%r21+32]") + commit()
    for schedule in SCHEDULES:
        kernel = TensorKernel(before=before, work=work, after=wait())
        words = run(problem, kernel, 32, (a_words,), schedule=schedule)
        np.testing.assert_array_equal(numbers(words, kind), problem.product)


def test_scale_and_disabled_lanes() -> None:
    problem = operands("f16", Format.F16, 128, 16)
    one = np.float32(1.0).view(np.uint32)
    rest = ", 2"
    masked = mma(problem, "f16", accumulate="1", rest=rest).replace(
        "%r25, %p5", "%r25, {%r26, %r27, %r27, %r27}, %p5"
    )
    work = "  mov.b32 %r26, 0xffff;\n  mov.b32 %r27, 0;\n" + masked + commit()
    words = run(problem, TensorKernel(before=fill(32, int(one)), work=work, after=wait()), 16)
    expected = problem.product + 0.25
    expected[:16] = 1.0
    np.testing.assert_array_equal(numbers(words, ""), expected)


# Pairs and clusters.

LEADER = "  mov.u32 %r5, %cluster_ctarank;\n  setp.ne.u32 %p6, %r5, 0;\n  @%p6 bra JOIN;\n"
CLUSTER_SYNC = "  barrier.cluster.arrive.release;\n  barrier.cluster.wait.acquire;\n"
MULTICAST = """
  mov.b16 %h1, {mask};
  tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r20], %h1;
"""  # noqa: E501


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("m", [128, 256])
def test_pair_multiplies_together(m: int, schedule: str) -> None:
    problem = operands("f16", Format.F16, m, 64, group=2)
    work = LEADER + mma(problem, "f16", group=2) + MULTICAST.format(mask=3, group=2)
    kernel = TensorKernel(group=2, before=CLUSTER_SYNC, work=work, after=wait())
    kernel = kernel.but(sync_end=CLUSTER_SYNC)
    columns = 64 if m == 256 else 32
    words = run(problem, kernel, columns, schedule=schedule, seed=1).reshape(2, LANES, columns)
    if m == 128:  # each CTA has 64 rows; N is split over the halves of its lanes
        words = np.concatenate(np.split(words, 2, axis=1), axis=2)
    np.testing.assert_array_equal(numbers(words.reshape(m, 64), ""), problem.product)


def test_commit_of_one_cta_reaches_others() -> None:
    """cta_group::1 multicast: CTA 0 signals CTAs 0 and 1 of a cluster of two."""
    text = """
  mov.u32 %r20, smem;
  mov.u32 %r1, %cluster_ctarank;
  mbarrier.init.shared::cta.b64 [%r20], 1;
  barrier.cluster.arrive.release;
  barrier.cluster.wait.acquire;
  setp.ne.u32 %p1, %r1, 0;
  @%p1 bra JOIN;
""" + MULTICAST.format(mask=3, group=1) + "JOIN:\n" + wait() + CLUSTER_SYNC  # fmt: skip
    options = {"grid": (2, 1, 1), "cluster": (2, 1, 1), "block": (1, 1, 1), "smem": 64}
    assert run_ptx(text, collect=True, **options).ok
    alone = text.replace("mov.b16 %h1, 3", "mov.b16 %h1, 1")
    assert kinds(run_ptx(alone, collect=True, **options)) == {"deadlock"}


@pytest.mark.parametrize(
    "address",
    ["cvta.shared.u64 %rd30, %rd30;", "", "cvta.shared.u64 %rd30, %rd30;\n"
     "  cvta.to.shared::cluster.u64 %rd30, %rd30;"],
)  # fmt: skip
def test_commit_takes_64_bit_addresses(address: str) -> None:
    problem = operands("f16", Format.F16, 128, 16)
    signal = f"  cvt.u64.u32 %rd30, %r20;\n  {address}\n" + commit().replace("%r20", "%rd30")
    words = run(problem, TensorKernel(work=mma(problem, "f16") + signal, after=wait()), 16)
    np.testing.assert_array_equal(numbers(words, ""), problem.product)


def test_asynchronous_fill_needs_no_fence() -> None:
    """cp.async.bulk writes through the async proxy; the issuing thread waits for the bytes."""
    problem = operands("f16", Format.F16, 128, 16)
    size = problem.image.shape[1]
    work = f"""
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20+8], {size};
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r20+1024], [%rd1], {size}, [%r20+8];
""" + wait(8, name="FULL") + mma(problem, "f16") + commit()  # noqa: E501  # fmt: skip
    fence = "fence.mbarrier_init.release.cluster;"  # for the mbarriers, not for the data
    kernel = TensorKernel(barriers=(1, 1), fence=fence, work=work)
    for schedule in SCHEDULES:
        out = np.zeros((LANES, 16), np.uint32)
        report = run_ptx(
            kernel.but(after=wait() + read_out("%rd2", 16)).text(),
            [problem.image.copy(), out], block=(LANES, 1, 1), smem=1024 + size, collect=True,
            declarations=DECLARATIONS, schedule=schedule,
        )  # fmt: skip
        assert report.ok, str(report)
        np.testing.assert_array_equal(numbers(out, ""), problem.product)


# Copies.


def copy_kernel(instruction: str) -> str:
    """Moves with the descriptor of a packed K-major source; LBO between 16-byte columns."""
    desc = SmemDescriptor(DATA, 128 * 16, 128, 0, Swizzle.NONE)
    return move("%rd22", desc.encode()) + f"  {instruction}\n"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("shape", "rows", "columns"),
    [("128x256b", 128, 8), ("128x128b", 128, 4), ("32x128b.warpx4", 32, 4),
     ("64x128b.warpx2::02_13", 64, 4)],
)  # fmt: skip
def test_copy_to_tensor_memory(shape: str, rows: int, columns: int, schedule: str) -> None:
    image = np.random.default_rng(1).integers(0, 256, (1, 4096), np.uint8)
    # 16-byte units: 8 rows together, then the next rows; the second 16 bytes of a row LBO later.
    units = image[0].view(np.uint32).reshape(-1, 4)
    source = np.concatenate([units[:128], units[128:256]], axis=1)[:rows, :columns]
    problem = Operands(np.zeros(0), np.zeros(0), image, 0, 0, 0)
    work = copy_kernel(f"tcgen05.cp.cta_group::1.{shape} [%r21], %rd22;") + commit()
    words = run(problem, TensorKernel(work=work, after=wait()), columns, schedule=schedule)
    np.testing.assert_array_equal(words, np.tile(source, (LANES // rows, 1)))


def test_shift_moves_lanes_down() -> None:
    image = np.random.default_rng(2).integers(0, 256, (1, 4096), np.uint8)
    units = image[0].view(np.uint32).reshape(-1, 4)
    expected = np.concatenate([units[:128], units[128:256]], axis=1)
    expected[32:63] = expected[33:64].copy()
    problem = Operands(np.zeros(0), np.zeros(0), image, 0, 0, 0)
    work = copy_kernel("tcgen05.cp.cta_group::1.128x256b [%r21], %rd22;")
    work += "  add.u32 %r26, %r21, 0x200000;\n  tcgen05.shift.cta_group::1.down [%r26];\n"
    words = run(problem, TensorKernel(work=work + commit(), after=wait()), 8)
    np.testing.assert_array_equal(words, expected)


@pytest.mark.parametrize(
    "text",
    [
        "tcgen05.mma.cta_group::1.kind::mxf4 [%r1], %rd1, %rd2, %r2, [%r3], [%r4], %p1;",
        "tcgen05.mma.sp.cta_group::1.kind::tf32 [%r1], %rd1, %rd2, [%r3], %r2, %p1;",
        "tcgen05.mma.cta_group::1.kind::f16.ashift [%r1], [%r5], %rd2, %r2, %p1;",
        "tcgen05.mma.cta_group::2.kind::f16 [%r1], %rd1, %rd2, %r2, {%r3, %r3, %r3, %r3}, %p1;",
        "tcgen05.mma.ws.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, %p1, %rd3;",
        "tcgen05.cp.cta_group::1.32x128b [%r1], %rd1;",
        "tcgen05.commit.cta_group::1.b64 [%r1];",
        "tcgen05.shift.cta_group::1 [%r1];",
    ],
)
def test_forms_without_support_are_refused(text: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        run_ptx(text)
