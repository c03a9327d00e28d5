"""CTAs of the Hopper backward kernel that stay: which work tiles they have, and what nobody has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cutlass")

from fa4.hardware import H200
from fa4.sm90.backward import queue
from fa4.sm90.backward.spec import WarpgroupBackwardSpec
from fa4.testing import Case, assert_within_budget
from tests.sm90.backward_kernel import FEW_SMS, spec_of
from tests.sm100.altered import Edit, put_in_place
from tests.sm100.backward_kernel import BackwardKernel, build, kept, prepare
from tests.sm100.forward_kernel import make_inputs
from tests.sm100.test_forward_features import CHEAP

# The last 90 of 400 keys are seen: those of the first two KV tiles by nobody.
UNSEEN = Case(batch=2, seqlen_q=50, seqlen_k=400, heads_k=1, group=2, head_dim=24, head_dim_v=16,
              dtype="bf16", window_size=(40, None))  # fmt: skip
IN_ORDER = Case(batch=1, seqlen_q=150, seqlen_k=500, heads_k=1, group=1, head_dim=16,
                head_dim_v=16, dtype="bf16")  # fmt: skip
ALONE = {"resident_clusters": 1, "clusters_limit": 1}  # the next CTA starts when one has ended


def check(run: BackwardKernel, case: Case, **options: object) -> None:
    """No finding, and every gradient within its budget; what nobody writes is neither."""
    inputs = make_inputs(run.spec, case)
    report, outputs = run.launch(inputs, prepare(run.spec, inputs), collect=True, **options)
    assert not report.findings
    assert_within_budget(inputs, outputs, gradients_alone=True)


def unseen_kernel() -> BackwardKernel:
    return build(WarpgroupBackwardSpec(head_dim=24, head_dim_v=16, window_left=True, gpu=FEW_SMS))


def ordered_kernel() -> BackwardKernel:
    return build(WarpgroupBackwardSpec(head_dim=16, head_dim_v=16, deterministic=True, gpu=FEW_SMS))


def test_keys_that_no_query_sees_have_no_gradient() -> None:
    run = unseen_kernel()
    check(run, UNSEEN)
    inputs = make_inputs(run.spec, UNSEEN)
    _, outputs = run.launch(inputs, prepare(run.spec, inputs))
    for gradient in (outputs.dk, outputs.dv):
        assert not np.any(gradient[:, :256].astype(np.float32))


def test_zeros_that_nobody_writes_are_seen(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        edit = Edit(queue, "            store_zeros(", "            (")
        put_in_place([edit], tmp_path, patch)
        with pytest.raises(AssertionError):
            check(unseen_kernel(), UNSEEN)


def test_one_cta_at_a_time_ends_in_a_fixed_order() -> None:
    """Nobody waits for a tile whose CTA has not started."""
    check(ordered_kernel(), IN_ORDER, **ALONE)


def test_a_tile_of_a_cta_that_has_not_started_is_waited_for(tmp_path: Path) -> None:
    """Planted: also in a fixed order a CTA begins with its own number."""
    with pytest.MonkeyPatch.context() as patch:
        edit = Edit(queue, "    if queue.work.problem.spec.deterministic:\n", "    if False:\n")
        numbers = Edit(queue, "(0 if queue.work.problem.spec.deterministic else ", "(")
        put_in_place([edit, numbers], tmp_path, patch)
        inputs = make_inputs(ordered_kernel().spec, IN_ORDER)
        run = ordered_kernel()
        space = prepare(run.spec, inputs)
        report, _ = run.launch(inputs, space, collect=True, max_steps=300_000, **ALONE)
        assert {finding.kind for finding in report.findings} & {"deadlock", "step-limit"}


@settings(CHEAP, max_examples=3)
@given(
    st.integers(1, 5), st.integers(1, 200), st.integers(1, 500), st.integers(1, 3),
    st.sampled_from(["plain", "causal"]),
)  # fmt: skip
def test_any_number_of_ctas(sms: int, rows: int, keys: int, heads: int, name: str) -> None:
    """One for all work tiles, or more than there are."""
    spec = replace(spec_of(name), gpu=replace(H200, sm_count=sms))
    case = Case(batch=1, seqlen_q=rows, seqlen_k=keys, heads_k=heads, group=1,
                head_dim=spec.head_dim, head_dim_v=spec.head_dim_v, dtype=spec.dtype,
                causal=spec.causal)  # fmt: skip
    check(kept(spec), case)
