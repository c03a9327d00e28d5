"""Reads of global memory that nothing has written: by threads, atomics and copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fa4 import emulator
from fa4.emulator.host import torch_empty
from fa4.emulator.machine.unwritten import empty, fill, unwritten_granules
from tests.emulator.kernels import aligned, kinds, run_ptx
from tests.emulator.test_memory_copies import LANE, LOAD
from tests.emulator.test_memory_tensor_copies import load_kernel, tensor_map

COPY = LANE + "\n".join([
    "mad.lo.s64 %rd22, %rd20, 4, %rd1; ld.global.b32 %r3, [%rd22];",
    "mad.lo.s64 %rd22, %rd20, 4, %rd2; st.global.b32 [%rd22], %r3;",
])  # fmt: skip


def unwritten_words(count: int) -> np.ndarray:
    """So many 32-bit words that nobody has written."""
    return aligned(empty((count,), np.dtype(np.uint32)))


@given(
    st.integers(0, 40), st.integers(0, 8), st.sampled_from([1, 2, 4, 8, 16]),
    st.lists(st.tuples(st.integers(0, 39), st.integers(1, 9)), max_size=4),
)  # fmt: skip
def test_granules(size: int, shift: int, granule: int, writes: list[tuple[int, int]]) -> None:
    """Of a buffer at any address: a word of 8 bytes that is written in part counts as written."""
    raw = np.zeros(64, np.uint8)
    start = -raw.ctypes.data % 16 + shift
    data = raw[start : start + size]
    fill(data.ctypes.data, size)
    words = {k: (shift + k) // 8 for k in range(size)}
    held = {w: sum(1 for k in words if words[k] == w) for w in set(words.values())}
    lost = {words[k] for a, n in writes for k in range(a, min(a + n, size))}
    for k in range(size):
        if words[k] in lost:
            data[k] ^= 0xFF
    expected = [
        all(
            words[k] not in lost and held[words[k]] >= 4
            for k in range(first, min(first + granule, size))
        )
        for first in range(0, size, granule)
    ]
    found = unwritten_granules(data, granule)
    assert (found.tolist() if found is not None else [False] * len(expected)) == expected


def test_what_was_made_is_none_of_the_numbers() -> None:
    """What comes of unwritten memory shows in the results."""
    for kind in (np.float16, np.float32, np.float64):
        assert np.isnan(empty((16,), np.dtype(kind))).all()


def test_threads_that_read_it() -> None:
    """A hazard, with the buffer; none for what the host wrote, or a kernel before."""
    source, out = unwritten_words(32), np.zeros(32, np.uint32)
    report = run_ptx(COPY, {"x": source, "y": out}, collect=True)
    (finding,) = report.findings
    assert (finding.kind, finding.severity) == ("uninitialised", "hazard")
    assert "reads what nothing has written (at bytes 0..3); x byte 0" in finding.message
    source[:30] = 7
    assert "x byte 120" in run_ptx(COPY, {"x": source, "y": out}, collect=True).findings[0].message
    source[:] = 7
    assert run_ptx(COPY, [source, out]).ok
    target = unwritten_words(32)
    assert run_ptx(COPY, [source, target]).ok
    assert run_ptx(COPY, [target, out]).ok
    assert run_ptx(COPY, [unwritten_words(32), out], checks=False).ok


ADD = LANE + "red.global.add.u32 [%rd1], 1;"
POLL = LANE + "ld.acquire.gpu.global.b32 %r3, [%rd1];"
READ_OWN = (
    LANE
    + """mad.lo.s64 %rd22, %rd20, 4, %rd1; st.global.b32 [%rd22], %r1;
  ld.global.b32 %r3, [%rd22];"""
)


@pytest.mark.parametrize("text", [ADD, POLL], ids=["counter", "flag"])
def test_counters_and_flags(text: str) -> None:
    """Have to be set before they are used."""
    assert kinds(run_ptx(text, [unwritten_words(4)], collect=True)) == {"uninitialised"}
    assert run_ptx(text, [np.zeros(4, np.uint32)]).ok


def test_what_the_kernel_itself_has_written() -> None:
    """Is written."""
    assert run_ptx(READ_OWN, [unwritten_words(32)]).ok


THREAD_COPY = (
    LANE
    + """
  mad.lo.u32 %r3, %r1, 16, %r2; mad.lo.s64 %rd22, %rd20, 16, %rd1;
  cp.async.cg.shared.global [%r3+128], [%rd22], 16; cp.async.wait_all;
  ld.shared.v2.b64 {%rd10, %rd11}, [%r3+128];
  mad.lo.s64 %rd22, %rd20, 16, %rd2; st.global.v2.b64 [%rd22], {%rd10, %rd11};
"""
)


@pytest.mark.parametrize("text", [LOAD, THREAD_COPY], ids=["cp.async.bulk", "cp.async"])
def test_copies_pass_it_on(text: str) -> None:
    """Not the copy is reported, but who uses what it brought."""
    source, out = unwritten_words(128), np.zeros(128, np.uint32)
    report = run_ptx(text, [source, out], smem=1024, collect=True)
    assert kinds(report) == {"uninitialised"} and "shared address" in report.findings[0].message
    assert report.findings[0].text.startswith("ld.shared")
    unused = text.replace("ld.shared.v2.b64 {%rd10, %rd11}, [%r3+128];", "")
    assert run_ptx(unused, [source, out], smem=1024).ok
    source[:64] = 1
    report = run_ptx(text, [source, out], smem=1024, collect=True)
    assert "lane 16" in report.findings[0].message
    source[:] = 1
    assert run_ptx(text, [source, out], smem=1024).ok and (out == 1).all()


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_tensor_copies_pass_it_on(swizzle: int) -> None:
    """To where the swizzle puts it: of 8 rows the last is unwritten, and read or left alone."""
    array = aligned(empty((32, 8), np.dtype(np.float32))).T  # innermost first, as maps have it
    table = tensor_map(array.T.T, "f32", (8, 8), swizzle=32 if swizzle else 0)
    rows = array.T
    rows[:7] = 3
    text, out = load_kernel((0, 0), 256, 2), np.zeros(64, np.float32)
    report = run_ptx(text, [rows, out], smem=2048, blocks=[table.encode()], collect=True)
    assert kinds(report) == {"uninitialised"}, str(report)
    rows[7] = 3
    assert run_ptx(text, [rows, out], smem=2048, blocks=[table.encode()]).ok and (out == 3).all()


def run_on(tensor: Any) -> emulator.Report:
    """Copies 32 words of a tensor."""
    return run_ptx(COPY, [tensor.numpy(), np.zeros(32, np.uint32)], collect=True)


MADE: dict[str, Any] = {
    "empty": lambda: torch.empty(32),
    "empty_like": lambda: torch.empty_like(torch.ones(32)),
    "empty_strided": lambda: torch.empty_strided((32,), (1,)),
    "new_empty": lambda: torch.ones(2).new_empty(32),
    "a view": lambda: torch.empty(64)[32:],
    "a copy": lambda: torch.empty(32).clone(),
    "on the GPU": lambda: torch.empty(32, device="cuda").cuda(),
}


@pytest.mark.parametrize("what", MADE)
def test_tensors_of_torch(what: str) -> None:
    """Made inside; what is written there by torch counts."""
    with emulator.emulate(cuda=True):
        x = MADE[what]()
    assert kinds(run_on(x)) == {"uninitialised"}
    x.fill_(1)
    assert run_on(x).ok


def test_other_tensors_count_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other functions, of outside, and large ones; torch has its functions back."""
    before = torch.empty, torch.Tensor.new_empty
    monkeypatch.setattr(torch_empty, "MOST_BYTES", 1024)
    with emulator.emulate():
        assert torch.empty is not before[0]
        made = [torch.zeros(32), torch.ones(32), torch.empty(300)]
        torch.empty(3, device="meta"), torch.empty(0), torch.empty(2, 2).to_sparse()
    made.append(torch.empty(32).zero_())
    assert all(run_on(x).ok for x in made)
    assert (torch.empty, torch.Tensor.new_empty) == before


def test_the_command_line_has_a_source_for_it() -> None:
    """x:f32[32]=empty."""
    from fa4.emulator.host.ptx_arguments import parse_arguments

    values = parse_arguments(["x:u32[32]=empty", "y:u32[32]=zeros"], 0)
    assert kinds(run_ptx(COPY, list(values.values()), collect=True)) == {"uninitialised"}


# Shared memory that threads of another CTA use while its own may have left.

NEIGHBOUR = """
  mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, smem; st.shared.b32 [%r2], %r1;
  barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
  setp.ne.u32 %p1, %r1, OWNER; mapa.shared::cluster.u32 %r4, %r2, OWNER;
  @%p1 ACCESS
  mov.u32 %r6, 300;
LATER:
  sub.u32 %r6, %r6, 1; setp.ne.and.u32 %p2, %r6, 0, !%p1;
  @%p2 bra LATER;
  END
"""
READ, WRITE = "ld.shared::cluster.b32 %r5, [%r4];", "st.shared::cluster.b32 [%r4+4], %r1;"
SYNC = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"


@pytest.mark.parametrize("access", [READ, WRITE], ids=["reads", "writes"])
def test_memory_of_a_cta_that_may_have_left(access: str) -> None:
    """Found if it has left, and if it happens to stay though nothing keeps it. A cluster barrier
    behind the access keeps it, even a relaxed one."""

    def run(owner: int, end: str) -> emulator.Report:
        text = NEIGHBOUR.replace("ACCESS", access).replace("OWNER", str(owner))
        text = text.replace("END", end)
        return run_ptx(text, [], (2, 1, 1), (1, 1, 1), (2, 1, 1), smem=64, collect=True)

    messages = []
    for owner in (0, 1):
        (finding,) = run(owner, "").findings
        assert finding.kind == "exit"
        messages.append(finding.message)
        assert run(owner, SYNC).ok and run(owner, SYNC.replace(".release", ".relaxed")).ok
    assert any("which has exited" in message for message in messages)
    assert any("nothing keeps that CTA from exiting" in message for message in messages)
