"""What drawn problems hardly reach in the backward kernel: offsets, empty sequences, NaN."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cutlass")

from fa4.emulator import EmulatorError
from fa4.sm100.backward import reduce
from fa4.sm100.backward.spec import BackwardSpec
from fa4.testing import Case, assert_within_budget
from fa4.testing.budget import Outputs
from tests.sm100.altered import Edit, put_in_place
from tests.sm100.backward_kernel import (
    BackwardKernel,
    Workspace,
    arguments,
    build,
    finish,
    kernel,
    prepare,
)
from tests.sm100.forward_kernel import as_numpy, make_inputs
from tests.sm100.test_forward_edges import far_apart

SMALL = BackwardSpec(head_dim=16, head_dim_v=16)
TILES = 2**31 // (128 * 16) + 3  # of a workspace whose second head starts beyond 2^31 elements


def check_offsets(run: BackwardKernel) -> None:
    """Two heads and batch entries, everything far apart: within budget."""
    case = Case(
        layout="packed", lengths=((129, 130), (129, 130)), group=2, head_dim=16, head_dim_v=16,
        dtype="bf16",
    )  # fmt: skip
    inputs = make_inputs(run.spec, case)
    space = prepare(run.spec, inputs)
    count = space.stats.shape[1]
    far = Workspace(
        np.zeros((2, TILES, 128 * 16), np.float32), np.zeros((2, TILES, 2, 128), np.float32),
        space.turns, space.places, run.spec.block_rows,
    )  # fmt: skip
    far.stats[:, :count] = space.stats
    call = list(arguments(run.spec, inputs, far))
    for place in range(6):
        call[place] = far_apart(call[place])
    run.session.call(run.compiled, call, {})
    near = replace(far, dq_accum=far.dq_accum[:, :count])
    dq = finish(run.spec, inputs, near, call[9])
    dk, dv = (as_numpy(x) for x in call[4:6])
    assert_within_budget(inputs, Outputs(None, dq=dq, dk=dk, dv=dv), gradients_alone=True)


@pytest.mark.slow
def test_offsets_beyond_32_bits() -> None:
    """Batch entries, and heads of the workspace, more than 2^31 elements apart."""
    check_offsets(build(SMALL))


@pytest.mark.slow
def test_offsets_in_32_bits_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place([Edit(reduce, "place = Int64(head)", "place = head")], tmp_path, monkeypatch)
    with pytest.raises((EmulatorError, AssertionError)):
        check_offsets(build(SMALL))


@pytest.mark.parametrize("tensor", ["k", "v"])
def test_nan_at_a_hidden_key_stays_there(tensor: str) -> None:
    """A whole KV tile that no window shows is NaN: no gradient but its own could be."""
    run = kernel("window")
    case = Case(
        layout="packed", lengths=((100, 400),), head_dim=72, head_dim_v=16, dtype="bf16",
        window_size=(60, 0),
    )  # fmt: skip
    inputs = make_inputs(run.spec, case)
    hidden = getattr(inputs, tensor).copy()
    hidden[:128] = np.nan
    outputs, _ = run(replace(inputs, **{tensor: hidden}))
    assert_within_budget(inputs, outputs, gradients_alone=True)


@pytest.mark.parametrize("lengths", [((0, 0), (0, 130), (129, 5)), ((5, 0), (130, 0))])
def test_empty_sequences(lengths: tuple[tuple[int, int], ...]) -> None:
    """No rows, no keys, neither: gradients that exist are 0, and nothing else is written."""
    run = kernel("packed")
    case = Case(layout="packed", lengths=lengths, group=2, head_dim=64, head_dim_v=128,
                dtype="bf16", causal=True, softcap=15.0)  # fmt: skip
    inputs = make_inputs(run.spec, case)
    outputs, _ = run(inputs)
    assert_within_budget(inputs, outputs, gradients_alone=True)
