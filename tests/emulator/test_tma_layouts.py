"""What TMA loads tell the tensor pipe, and what they do to tf32 elements."""

from __future__ import annotations

import numpy as np
import pytest

from fa4.emulator.machine import grid
from fa4.emulator.machine.state import Cta
from fa4.emulator.tma.descriptor import TensorMap
from tests.emulator.kernels import aligned, run_ptx

LOAD = """
  mov.u32 %r20, smem; add.u32 %r21, %r20, 8192;
  mbarrier.init.shared::cta.b64 [%r21], 1;
  fence.mbarrier_init.release.cluster;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r21], {bytes};
  mov.b64 %rd9, block0; cvta.param.u64 %rd9, %rd9;
  mov.u32 %r1, 0;
  cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
    [%r20], [%rd9, {{%r1, %r1}}], [%r21];
WAIT:
  mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r21], 0;
  @!%p1 bra WAIT;
  ld.shared.b32 %r2, [%r20];
  st.global.b32 [%rd2], %r2;
"""


def load(element: str, data: np.ndarray, swizzle: int) -> np.ndarray:
    """The first 4 bytes that a TMA load of an 8 x 16-byte box writes."""
    pitch = data.shape[1] * data.itemsize
    tensor_map = TensorMap(
        data.ctypes.data, element, (data.shape[1], data.shape[0]), (pitch,),
        (data.shape[1], data.shape[0]), (1, 1), swizzle,
    )  # fmt: skip
    out = np.zeros(1, np.uint32)
    run_ptx(
        LOAD.format(bytes=data.nbytes), [data, out], block=(1, 1, 1), smem=16384,
        blocks=[tensor_map.encode()],
    )  # fmt: skip
    return out


def test_tf32_loads_round() -> None:
    """1 + 2^-11 + 2^-20 lies above the middle of two tf32 numbers; f32 maps keep it."""
    data = aligned(np.full((8, 32), 1 + 2.0**-11 + 2.0**-20, np.float32))
    assert load("tf32", data, 128).view(np.float32)[0] == 1 + 2.0**-10
    assert load("f32", data, 128).view(np.float32)[0] == data[0, 0]


@pytest.mark.parametrize(("swizzle", "columns"), [(0, 8), (32, 8), (64, 16), (128, 32)])
def test_the_swizzle_of_a_load_is_noted(
    swizzle: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    ended = grid.check_cta_exit

    def look(cta: Cta) -> None:
        seen.append(cta.swizzles.at(1024))
        ended(cta)

    monkeypatch.setattr(grid, "check_cta_exit", look)
    data = aligned(np.zeros((8, columns), np.float32))
    load("f32", data, swizzle)
    assert seen == [(swizzle, 16)]
