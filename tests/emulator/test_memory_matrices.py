"""ldmatrix, stmatrix, movmatrix: against matrices taken apart element by element."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.errors import UnsupportedInstruction
from tests.emulator.kernels import aligned, kinds, run_ptx

COUNTS = [1, 2, 4]
# A row of 16 bytes for each lane, in an order of the test's choice.
ROWS = """
  mov.u32 %r1, %tid.x; cvt.u64.u32 %rd20, %r1; mov.u32 %r2, smem;
  mad.lo.s64 %rd21, %rd20, 4, %rd3; ld.global.b32 %r3, [%rd21]; mad.lo.u32 %r4, %r3, 16, %r2;
"""


def registers(count: int) -> str:
    return "{" + ", ".join(f"%r{10 + k}" for k in range(count)) + "}"


def fragment(matrix: np.ndarray, lane: int) -> np.ndarray:
    """The two elements of an 8x8 matrix that a lane holds (PTX ISA, ldmatrix, figure)."""
    return matrix[lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("trans", [False, True])
@settings(max_examples=4)
@given(order=st.permutations(range(32)), space=st.sampled_from([".shared", ".shared::cta", ""]))
def test_ldmatrix(count: int, trans: bool, order: list[int], space: str) -> None:
    rows = aligned(np.random.default_rng(1).integers(0, 2**16, (32, 8), np.uint16))
    out = aligned(np.zeros((32, count), np.uint32))
    generic = "" if space else "cvta.shared.u64 %rd9, %rd9;"
    body = f"""{ROWS}
      mad.lo.s64 %rd22, %rd20, 16, %rd1; mad.lo.u32 %r5, %r1, 16, %r2;
      ld.global.v2.b64 {{%rd10, %rd11}}, [%rd22]; st.shared.v2.b64 [%r5], {{%rd10, %rd11}};
      bar.warp.sync 0xffffffff; cvt.u64.u32 %rd9, %r4; {generic}
      ldmatrix.sync.aligned.m8n8.x{count}{".trans" if trans else ""}{space}.b16
        {registers(count)}, [%rd9];
      mad.lo.s64 %rd23, %rd20, {4 * count}, %rd2;
    """
    body += "".join(f"st.global.b32 [%rd23+{4 * k}], %r{10 + k};" for k in range(count))
    run_ptx(body, [rows, out, np.array(order, np.uint32)], smem=512)
    matrices = rows[order].reshape(4, 8, 8)[:count]
    for lane in range(32):
        for k, matrix in enumerate(matrices):
            expected = fragment(matrix.T if trans else matrix, lane)
            assert out[lane, k : k + 1].view(np.uint16).tolist() == expected.tolist()


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("trans", [False, True])
@settings(max_examples=4)
@given(order=st.permutations(range(32)))
def test_stmatrix(count: int, trans: bool, order: list[int]) -> None:
    matrices = np.random.default_rng(2).integers(0, 2**16, (count, 8, 8), np.uint16)
    fragments = np.array(
        [[fragment(m.T if trans else m, lane).copy().view(np.uint32)[0] for m in matrices]
         for lane in range(32)], np.uint32)  # fmt: skip
    out = aligned(np.zeros((32, 8), np.uint16))
    body = f"{ROWS} mad.lo.s64 %rd23, %rd20, {4 * count}, %rd1;"
    body += "".join(f"ld.global.b32 %r{10 + k}, [%rd23+{4 * k}];" for k in range(count))
    body += f"""
      stmatrix.sync.aligned.m8n8.x{count}{".trans" if trans else ""}.shared.b16
        [%r4], {registers(count)};
      bar.warp.sync 0xffffffff; setp.ge.u32 %p1, %r1, {8 * count}; @%p1 bra done;
      mad.lo.s64 %rd22, %rd20, 16, %rd2; ld.shared.v2.b64 {{%rd10, %rd11}}, [%r4];
      st.global.v2.b64 [%rd22], {{%rd10, %rd11}};
    done:
    """
    run_ptx(body, [fragments, out, np.array(order, np.uint32)], smem=512)
    np.testing.assert_array_equal(out[: 8 * count], matrices.reshape(-1, 8))


def test_stmatrix_of_bytes_stores_columns() -> None:
    """Lane t holds (t / 4, 2 (t % 4)), its right neighbour, and the two eight rows below."""
    matrix = np.random.default_rng(3).integers(0, 256, (16, 8), np.uint8)
    lanes = np.zeros((32, 4), np.uint8)
    for lane in range(32):
        row, column = lane // 4, 2 * (lane % 4)
        lanes[lane] = [*matrix[row, column : column + 2], *matrix[row + 8, column : column + 2]]
    out = aligned(np.zeros((8, 16), np.uint8))
    body = f"""{ROWS}
      mad.lo.s64 %rd22, %rd20, 4, %rd1; ld.global.b32 %r10, [%rd22];
      stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r4], {{%r10}};
      bar.warp.sync 0xffffffff; setp.ge.u32 %p1, %r1, 8; @%p1 bra done;
      mad.lo.s64 %rd22, %rd20, 16, %rd2; ld.shared.v2.b64 {{%rd10, %rd11}}, [%r4];
      st.global.v2.b64 [%rd22], {{%rd10, %rd11}};
    done:
    """
    run_ptx(body, [lanes, out, np.arange(32, dtype=np.uint32)], smem=512)
    np.testing.assert_array_equal(out, matrix.T)


def test_movmatrix_transposes() -> None:
    matrix = np.random.default_rng(4).integers(0, 2**16, (8, 8), np.uint16)
    data = np.array([fragment(matrix, t).copy().view(np.uint32)[0] for t in range(32)], np.uint32)
    body = """
      mov.u32 %r1, %tid.x; mad.wide.u32 %rd9, %r1, 4, %rd1; ld.global.b32 %r2, [%rd9];
      movmatrix.sync.aligned.m8n8.trans.b16 %r3, %r2; st.global.b32 [%rd9], %r3;
    """
    run_ptx(body, [data])
    for lane in range(32):
        assert data[lane : lane + 1].view(np.uint16).tolist() == fragment(matrix.T, lane).tolist()


@pytest.mark.parametrize(
    ("setup", "kind"),
    [
        ("add.u32 %r4, %r4, 8;", "misaligned"),
        ("add.u32 %r4, %r4, 512;", "out-of-bounds"),
        ("", "uninitialised"),
        ("st.shared.v2.b64 [%r4], {%rd1, %rd2};", None),
        ("xor.b32 %r6, %r4, 16; st.shared.v2.b64 [%r6], {%rd1, %rd2};", "race"),
    ],
)
def test_ldmatrix_is_checked(setup: str, kind: str | None) -> None:
    body = f"{ROWS} {setup} ldmatrix.sync.aligned.m8n8.x4.shared.b16 {registers(4)}, [%r4];"
    arrays = [np.zeros(8, np.uint32), np.zeros(8, np.uint32), np.arange(32, dtype=np.uint32)]
    assert kinds(run_ptx(body, arrays, smem=512, collect=True)) == ({kind} if kind else set())


def test_a_warp_with_missing_lanes_cannot_load_matrices() -> None:
    body = f"{ROWS} ldmatrix.sync.aligned.m8n8.x1.shared.b16 {registers(1)}, [%r4];"
    arrays = [np.zeros(8, np.uint32), np.zeros(8, np.uint32), np.arange(32, dtype=np.uint32)]
    report = run_ptx(body, arrays, block=(24, 1, 1), smem=512, collect=True)
    assert kinds(report) == {"divergence"}


@pytest.mark.parametrize(
    "text",
    [
        "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r10, %r11}, [%r4];",
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r10}, [%r4];",
        "stmatrix.sync.aligned.m16n8.x1.shared.b8 [%r4], {%r10};",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b8 {%r10}, [%r4];",
    ],
)
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        run_ptx(text, smem=512)
