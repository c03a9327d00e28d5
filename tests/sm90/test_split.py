"""Packed query heads of any group and divided keys of the Hopper kernel, in the emulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cutlass")

import fa4
from fa4.backends import emulator_sm90
from fa4.call.checked import make_call
from fa4.compiled.artifact import compile_artifact
from fa4.compiled.forward import compile_warpgroup
from fa4.compiled.launch import part_shapes
from fa4.compiled.support import ForwardCall
from fa4.compiled.variants import choose_sm90_spec, count_splits, warpgroup_problem
from fa4.emulator.host.session import Session
from fa4.hardware import H200
from fa4.kit import tiles
from fa4.plan.warpgroup_tuned import tuned_warpgroups
from fa4.sm90.forward import combine, output
from fa4.sm90.forward.spec import WarpgroupSpec
from fa4.testing import assert_within_budget
from fa4.testing.budget import Outputs
from fa4.testing.inputs import dense_inputs
from tests.sm100.altered import Edit, put_in_place
from tests.sm100.forward_kernel import Options, arguments, as_numpy

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def draw(batch: int, rows: int, keys: int, heads: tuple[int, int], dim: int = 32) -> list[Any]:
    """q, k and v."""
    rng = np.random.default_rng(0)
    shapes = ((batch, rows, heads[0], dim), *[(batch, keys, heads[1], dim)] * 2)
    return [rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in shapes]


def check(arrays: list[Any], **options: Any) -> None:
    """The public function's result is within the budget."""
    out, lse = fa4.flash_attn_func(*arrays, **options, impl="emulator_sm90", return_lse=True)
    for name in ("num_splits", "pack_gqa"):
        options.pop(name, None)
    assert_within_budget(dense_inputs(*arrays, **options), Outputs(out, lse))


@pytest.mark.parametrize(
    ("rows", "heads", "group"),
    [(1, (10, 2), 5), (3, (6, 2), 3), (2, (128, 1), 128), (1, (96, 1), 96), (5, (24, 2), 12)],
)
def test_heads_of_any_group_are_packed(rows: int, heads: tuple[int, int], group: int) -> None:
    """One position in several tiles, or several in one; equal parts of the group."""
    call = ForwardCall(dtype="bf16", head_dim=32, head_dim_v=32, heads_q=heads[0],
                       heads_k=heads[1], batch=1, rows_q=rows, rows_k=90)  # fmt: skip
    packed = choose_sm90_spec(call).group
    assert group % packed == 0 and packed > 1
    check(draw(1, rows, 90, heads), causal=True)


def test_packing_takes_least_time() -> None:
    """By the costs of tiles: all of the group, equal parts of it, or none."""

    def group_of(rows: int, heads: tuple[int, int], pack: bool | None = None, dim: int = 64) -> int:
        call = ForwardCall(
            dtype="bf16",
            head_dim=dim,
            head_dim_v=dim,
            heads_q=heads[0],
            heads_k=heads[1],
            batch=1,
            rows_q=rows,
            rows_k=90,
            pack_gqa=pack,
        )
        return choose_sm90_spec(call).group  # fmt: skip

    assert group_of(1, (10, 2)) == 5
    # Where heads that straddle tiles would cost O its way through shared memory.
    assert group_of(2 * 192 * 132, (10, 2), dim=128) == 1
    assert group_of(200, (60, 12)) == 5
    assert group_of(4096, (8, 2)) == 4 and group_of(4096, (8, 2), pack=False) == 1
    assert group_of(4096, (10, 2), pack=True) == 5
    assert group_of(192 * 132, (12, 1), dim=128) == 4 and group_of(33, (12, 1)) == 12
    assert group_of(1, (96, 1)) in (48, 32)
    assert group_of(1, (128, 1)) == 128


@pytest.mark.parametrize(
    ("options", "rows", "keys"),
    [
        ({"num_splits": 3}, 1, 500),
        ({"num_splits": 2, "causal": True}, 200, 330),
        ({"num_splits": 7, "window_size": (30, 10)}, 70, 90),  # more parts than KV tiles
        ({"num_splits": 4, "softcap": 15.0, "window_size": (100, None)}, 130, 300),
    ],
)
def test_divided_keys(options: dict[str, Any], rows: int, keys: int) -> None:
    """Within the budget of undivided ones."""
    check(draw(1, rows, keys, (4, 2)), **options)


def test_divided_keys_of_packed_sequences_with_a_sink() -> None:
    """The sink counts once; rows of no sequence stay as they are; a sequence may have no key."""
    q, k, v = (x[0] for x in draw(1, 60, 400, (6, 2)))
    options: dict[str, Any] = {
        "cu_seqlens_q": np.array([0, 10, 10, 50]), "cu_seqlens_k": np.array([0, 220, 300, 390]),
        "seqused_k": np.array([220, 3, 0]), "causal": True, "return_lse": True,
        "learnable_sink": np.linspace(-1, 1, 6, dtype=np.float32),
    }  # fmt: skip
    ours = fa4.flash_attn_varlen_func(q, k, v, impl="emulator_sm90", num_splits=3, **options)
    expected = fa4.flash_attn_varlen_func(q, k, v, impl="reference", **options)
    for found, wanted in zip(ours, expected, strict=True):  # P is rounded at other references
        np.testing.assert_allclose(
            found.astype(np.float32), wanted.astype(np.float32), rtol=2**-6, atol=3e-3
        )


def test_a_division_has_the_same_bits_each_time() -> None:
    """Whatever order the CTAs run in."""
    arrays = draw(1, 3, 700, (4, 2))
    call = make_call(*arrays, {"num_splits": 3}, varlen=False)
    found = [
        emulator_sm90.run(call, schedule="adversarial", seed=seed)[0].tobytes() for seed in (1, 2)
    ]
    assert found[0] == found[1]


def test_parts_are_chosen_where_a_call_does_not_fill_the_gpu() -> None:
    """One query on long keys is divided, a full grid is not; a number asked for is kept."""

    def parts(batch: int, rows: int, keys: int, **fields: Any) -> int:
        call = ForwardCall(
            **{"dtype": "bf16", "head_dim": 128, "head_dim_v": 128, "heads_q": 64, "heads_k": 8,
               "batch": batch, "rows_q": rows, "rows_k": keys, "num_splits": 0, **fields}
        )  # fmt: skip
        spec = WarpgroupSpec(head_dim=128, head_dim_v=128, split=True)
        assert tuned_warpgroups(warpgroup_problem(call), H200).num_splits == count_splits(
            call, spec
        )
        return count_splits(call, spec)

    assert 8 * parts(1, 1, 131072) in range(120, 400)
    assert parts(32, 1, 4096) == parts(4, 8192, 8192) == 1
    assert parts(1, 1, 131072, num_splits=1) == 1 and parts(4, 8192, 8192, num_splits=5) == 5
    assert parts(1, 1, 100) == 1


SPEC = WarpgroupSpec(head_dim=32, head_dim_v=32, group=5, causal=True, tile_n=64, split=True,
                     consumers=1, scheduler="lpt")  # fmt: skip
FAULTS = {
    "an empty part sees its tile": Edit(
        tiles, "        return cutlass.min(end, self.cut_stop * self.spec.tile_n)\n",
        "        return end\n",
    ),
    "parts are read before they are there": Edit(
        combine, "    cute.arch.griddepcontrol_wait()\n", ""
    ),
    "a part's LSE is not weighted": Edit(
        combine, "        weight = power(logs[part] - base)\n", "        weight = Float32(1.0)\n"
    ),
    "the first part is left out": Edit(
        combine, "    parts = row.of(o_parts, True)\n    for part in cutlass.range(row.splits,",
        "    parts = row.of(o_parts, True)\n    for part in cutlass.range(1, row.splits,",
    ),
    "rows beyond the sequence are stored": Edit(
        tiles, "        return row < self.seqlen_q * self.spec.group\n", "        return row >= 0\n"
    ),
    "all parts are the first": Edit(
        output, "    return tensor[(tile.split, *", "    return tensor[(0 * tile.split, *"
    ),
}  # fmt: skip


def launch(spec: WarpgroupSpec, **options: Any) -> tuple[Any, Outputs]:
    """(inputs, outputs) of a call with 3 parts of 2 KV tiles, compiled now."""
    arrays = draw(1, 4, 100, (10, 2))
    inputs = dense_inputs(*arrays, causal=True)
    given = arguments(spec, inputs, 4)  # type: ignore[arg-type]
    import torch

    parts = [torch.full(shape, np.nan) for shape in part_shapes(given[3].shape, given[4].shape, 3)]
    session = Session(None, (), {})
    session._options = Options(**options)
    session.call(compile_artifact(spec, "sm_90a", compile_warpgroup), (*given, *parts), {})
    return inputs, Outputs(as_numpy(given[3]), given[4].numpy())


def test_without_a_fault_the_result_is_right() -> None:
    """And no part is read that was not written: they hold NaN before."""
    assert_within_budget(*launch(SPEC))


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(name: str, tmp_path: Path) -> None:
    """By the result or by the emulator's checks."""
    with pytest.MonkeyPatch.context() as patch:
        put_in_place([FAULTS[name]], tmp_path, patch)
        with pytest.raises((AssertionError, fa4.emulator.EmulationFailed)):
            assert_within_budget(*launch(SPEC))
