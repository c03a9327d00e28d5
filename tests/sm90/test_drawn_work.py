"""Drawn work tiles, boxes that begin earlier and O from registers: planted faults are seen."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cutlass")

import fa4
from fa4.compiled.artifact import compile_artifact
from fa4.compiled.forward import compile_warpgroup
from fa4.config import ForwardConfig
from fa4.emulator.host.session import Session
from fa4.sm90.forward import direct, load, output, schedule, transpose
from fa4.sm90.forward.spec import WarpgroupSpec
from fa4.testing import assert_within_budget
from fa4.testing.budget import Outputs
from fa4.testing.inputs import dense_inputs
from tests.sm90.test_split import draw
from tests.sm100.altered import Edit, put_in_place
from tests.sm100.forward_kernel import Options, arguments, as_numpy, as_torch

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

DIM = 40  # every other head begins within a sector
SPEC = WarpgroupSpec(head_dim=DIM, head_dim_v=DIM, causal=True, tile_n=48, consumers=2,
                     kv_stages=4, scheduler="queue", ahead=True)  # fmt: skip
ADVERSARIAL = {"schedule": "adversarial", "seed": 3, "resident_clusters": 2}
FEW = {**ADVERSARIAL, "keys": 40}  # a KV tile for each work tile, loaded far ahead
FAULTS = {
    "a number is told over one that is not read": Edit(
        schedule, '    signals.wait("work_empty", queue.ring)\n', ""
    ),
    "a number is read before it is told": Edit(
        schedule, '    signals.wait("work_full", queue.ring)\n', ""
    ),
    "work tiles are passed over": Edit(
        schedule, "    index = cute.arch.grid_dim()[0] + cute", "    index = 9 + cute"
    ),
    "nobody counts": Edit(schedule, "[{place}], 1;", "[{place}], 0;"),
    "Q begins where K does not": Edit(
        load, "    shift = shift_of(query.halves, tile)\n", "    shift = 0\n"
    ),
    "O begins where V does not": Edit(
        output, "        shift = shift_of(output.halves, tile)\n", "        shift = 0\n"
    ),
    "threads do not exchange": Edit(
        direct, 'code.do("shfl.sync.bfly.b32", given, str(distance), "31", FULL_MASK, kind="b32")',
        'code.do("mov.b32", given, kind="b32")',
    ),
    "columns before O's first are stored": Edit(
        direct, 'code.do("setp.lt.u32", at, str(runs), kind="pred")',
        'code.do("setp.lt.s32", at, str(runs), kind="pred")',
    ),
    "rows beyond the sequence are stored": Edit(
        direct, "    if tile.has_row(row):\n", "    if row >= 0:\n"
    ),
}  # fmt: skip


def launch(spec: WarpgroupSpec, keys: int = 170, **options: Any) -> tuple[Any, Outputs]:
    """(inputs, outputs) of a call with 24 work tiles on 3 SMs, compiled now.

    Tensors are as narrow as they can be, so that heads begin within sectors.
    """
    arrays = draw(2, min(keys, 150), keys, (6, 6) if keys > 100 else (20, 20), DIM)
    inputs = dense_inputs(*arrays, causal=True)
    given = list(arguments(spec, inputs, 3))  # type: ignore[arg-type]
    given[:4] = [as_torch(np.ascontiguousarray(as_numpy(x))) for x in given[:4]]
    assert all(x.data_ptr() % 16 == 0 for x in given[:4]) and given[1].stride(2) == DIM
    session = Session(None, (), {})
    session._options = Options(max_steps=200_000, **options)
    session.call(compile_artifact(spec, "sm_90a", compile_warpgroup), given, {})
    return inputs, Outputs(as_numpy(given[3]), given[4].numpy())


@pytest.mark.parametrize("how", [{}, ADVERSARIAL, FEW], ids=["in order", "adversarial", "few"])
def test_without_a_fault_the_result_is_right(how: dict[str, Any]) -> None:
    """Under each schedule; the same bits, whoever has drawn what."""
    _, first = launch(SPEC, keys=how.get("keys", 170))
    inputs, found = launch(SPEC, **how)
    assert_within_budget(inputs, found)
    assert np.array_equal(first.out.view(np.int16), found.out.view(np.int16))


NARROW = WarpgroupSpec(head_dim=32, head_dim_v=32, dtype="e4m3", causal=True, tile_n=32,
                       consumers=1, kv_stages=2, scheduler="queue", ahead=True,
                       numerics=ForwardConfig(rescale_threshold_log2=0.0,
                                              p_offset_log2=8.0))  # fmt: skip
FOLLOWS = "        index, queue = follow(signals, problem, queue, index)\n"
STRIDES = FOLLOWS.replace("index, queue", "_, queue") + (
    "        index = index + cute.arch.grid_dim()[0]\n"
)


def launch_narrow(**options: Any) -> None:
    """A call with 24 work tiles of one to eight KV tiles on 3 SMs. Raises AssertionError if O is
    further from the oracle's than P in 8 bits is."""
    arrays = [(x * 1.0).astype(ml_dtypes.float8_e4m3fn) for x in draw(1, 250, 250, (6, 6), 32)]
    out = np.full(arrays[0].shape, 7.0, ml_dtypes.bfloat16)
    lse = np.full((1, 6, 250), 7.0, np.float32)
    session = Session(None, (), {})
    session._options = Options(max_steps=200_000, **options)
    artifact = compile_artifact(NARROW, "sm_90a", compile_warpgroup)
    session.call(artifact, (*arrays, out, lse, 32**-0.5, *(None,) * 3, 250, *(None,) * 6, 3,
                            *(None,) * 3, np.zeros(1, np.int32)), {})  # fmt: skip
    exact = fa4.flash_attn_func(*arrays, causal=True, impl="oracle")
    assert np.abs(out.astype(np.float64) - exact).max() < 0.2


@pytest.mark.parametrize("fault", ["", "V is transposed of other work tiles"])
@pytest.mark.parametrize("how", [{}, ADVERSARIAL], ids=["in order", "adversarial"])
def test_who_transposes_values_follows(
    how: dict[str, Any], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8-bit types: not the number of the work tile alone decides how many V there are."""
    if fault:
        put_in_place([Edit(transpose, FOLLOWS, STRIDES)], tmp_path, monkeypatch)
        with pytest.raises((AssertionError, fa4.emulator.EmulationFailed)):
            launch_narrow(**how)
    else:
        launch_narrow(**how)


def alone(array: np.ndarray) -> np.ndarray:
    """The same with nothing of other arrays within 64 KiB."""
    room = np.zeros((1 << 17) // array.itemsize, array.dtype)
    start = (1 << 16) // array.itemsize
    place = room[start : start + array.size].reshape(array.shape)
    place[...] = array
    return place


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("dim", [40, 72])
def test_boxes_of_ragged_keys_begin_no_earlier(
    dim: int, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their map begins in front of the tensor, which TMA touches for a box that begins before."""
    if early:
        monkeypatch.setattr(WarpgroupSpec, "shifts", property(lambda spec: (True, True)))
    monkeypatch.setattr(
        "fa4.backends.kernel.remembered", lambda call, key, find, *x: find(call, *x)
    )
    monkeypatch.setattr("fa4.compiled.build._made", {})
    monkeypatch.setenv("FA4_CACHE", "0")
    q, k, v = (alone(x[0]) for x in draw(1, 30, 50, (2, 2), dim))
    lengths = {"cu_seqlens_q": np.array([0, 10, 30]), "cu_seqlens_k": np.array([0, 0, 50])}
    with (
        nullcontext()
        if not early
        else pytest.raises(
            fa4.emulator.EmulationFailed, match="begins before its tensor, so that TMA touches"
        )
    ):
        fa4.flash_attn_varlen_func(q, k, v, **lengths, impl="emulator_sm90")


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(name: str, tmp_path: Path) -> None:
    """By the result or by the emulator's checks."""
    with pytest.MonkeyPatch.context() as patch:
        put_in_place([FAULTS[name]], tmp_path, patch)
        with pytest.raises((AssertionError, fa4.emulator.EmulationFailed)):
            for how in ({}, ADVERSARIAL, FEW):
                assert_within_budget(*launch(SPEC, **how))
