"""Bytes through shared memory, by what moves them."""

from __future__ import annotations

import numpy as np
import pytest

from fa4.emulator.tools.traffic import SharedTraffic, kind_of
from tests.emulator.kernels import run_ptx
from tests.emulator.test_events import COPY
from tests.emulator.test_memory_atomics import ASYNC, STORES, WAIT

STORE = "st.shared.v4.b32 [%r21], {%r1, %r1, %r1, %r1};"
ACCESSES = f"""
  mov.u32 %r20, smem; mov.u32 %r1, %tid.x;
  shl.b32 %r22, %r1, 4; add.u32 %r21, %r20, %r22; setp.lt.u32 %p1, %r1, 40;
  {STORE}
  bar.sync 0;
  ld.shared.v2.u32 {{%r2, %r3}}, [%r20+64];
  @%p1 ld.shared.u16 %r4, [%r21];
"""
# Of two warps: stores of all threads, the same 8 bytes for each warp, 2 bytes of 40 threads.
EXPECTED = {0: (32 * 16, 8 + 32 * 2), 1: (32 * 16, 8 + 8 * 2)}


def count(body: str, smem: int = 1024, block: int = 64) -> SharedTraffic:
    traffic = SharedTraffic()
    source = np.zeros(64 + 256, np.uint8)
    start = -source.ctypes.data % 256
    run_ptx(body, [source[start : start + 64]], smem=smem, block=(block, 1, 1), events=traffic)
    return traffic


def test_accesses_of_threads() -> None:
    """Lanes that are switched off move nothing; one address counts once for a warp."""
    traffic = count(ACCESSES)
    found = {
        warp: tuple(
            traffic.of_warps(0, range(warp, warp + 1), kind) for kind in ("stores", "loads")
        )
        for warp in EXPECTED
    }
    assert found == EXPECTED
    assert traffic.of(0) == {"stores": 1024, "loads": 96} and traffic.of(1) == {}


def test_planted_stores_are_counted() -> None:
    """Planted: the same store twice, and with half of its bytes."""
    assert count(ACCESSES.replace(STORE, STORE + STORE)).of(0)["stores"] == 2048
    half = STORE.replace("v4", "v2").replace(", %r1, %r1}", "}")
    assert count(ACCESSES.replace(STORE, half)).of(0)["stores"] == 512


def test_copies() -> None:
    """What a bulk copy writes; barriers are left out."""
    traffic = count(COPY, 256, 32)
    assert traffic.of(0) == {"copies": 64} == {k: v for (_, k), v in traffic.by_issuer.items()}


def test_stores_into_a_peer_are_the_peers() -> None:
    """Each CTA's memory gets what the other one issues."""
    traffic, text = SharedTraffic(), ASYNC.format(store=STORES["st"], bytes=128, wait=WAIT)
    out = np.zeros(64, np.uint32)
    run_ptx(text, [out], grid=(2, 1, 1), cluster=(2, 1, 1), smem=512, events=traffic)
    kind = "stores from a peer"
    assert [traffic.of(cta)[kind] for cta in (0, 1)] == [128, 128]
    assert [traffic.by_issuer[cta, kind] for cta in (0, 1)] == [128, 128]


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("tcgen05.mma.cta_group::1.kind::f16", "products"),
        ("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group", "copies"),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32", "bulk reductions"),
        ("st.async.weak.shared::cluster.v4.b32", "stores from a peer"),
        ("stmatrix.sync.aligned", "stmatrix.sync.aligned"),
    ],
)
def test_kinds(opcode: str, kind: str) -> None:
    """The longest prefix counts; what is not named keeps its opcode."""
    assert kind_of(opcode) == kind
