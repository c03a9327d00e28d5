"""Whatever the call, and however many work tiles it has: the plan that it is given is sound.

The emulator runs small calls, which get another plan than large ones of the same features.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa4.compiled.support import BackwardCall, ForwardCall
from fa4.compiled.variants import choose_backward_spec, choose_sm90_spec
from fa4.hardware import H200
from fa4.plan import check_plan
from fa4.plan import warpgroup as plans
from fa4.sm90.wide.spec import WideBackwardSpec

NARROW = ("e4m3", "e5m2")
LENGTHS = st.floats(0, 15).map(lambda x: int(2**x))
WINDOWS = st.sampled_from([(None, None), (None, 0), (300, 0), (100, 30), (None, 25), (0, 0)])


@st.composite
def calls(draw: st.DrawFn, dtypes: tuple[str, ...]) -> dict[str, Any]:
    """Fields of a call, up to 32k rows and keys in each of 64 sequences, up to 1,600 heads."""
    dtype = draw(st.sampled_from(dtypes))
    step = 16 if dtype in NARROW else 8
    dim = draw(st.integers(1, 256 // step)) * step
    other = st.integers(1, 256 // step).map(lambda n: n * step)
    rows, keys, batch = draw(LENGTHS), draw(LENGTHS), draw(st.integers(1, 64))
    heads_k, packed = draw(st.integers(1, 16)), draw(st.booleans())
    found = {
        "dtype": dtype, "head_dim": dim, "head_dim_v": draw(st.just(dim) | other),
        "heads_q": heads_k * draw(st.integers(1, 17) | st.integers(18, 100)),
        "heads_k": heads_k, "batch": batch,
        "rows_q": rows * batch if packed else rows, "rows_k": keys * batch if packed else keys,
        "max_seqlen_q": rows if packed else None, "softmax_scale": 0.1, "window": draw(WINDOWS),
        "sink": draw(st.booleans()), "softcap": draw(st.sampled_from([0.0, 20.0])),
        "packed_q": packed, "packed_k": packed, "used_k": draw(st.booleans()),
        "used_q": draw(st.booleans()),
    }  # fmt: skip
    if dtype in NARROW:
        return found | {"descale": draw(st.sampled_from(["", "v", "qkv"]))}
    return found | {"num_splits": draw(st.sampled_from([0, 1, 7]))}


@given(calls(("bf16", "fp16", *NARROW)))
def test_plans_of_forward_calls_are_sound(fields: dict[str, Any]) -> None:
    spec = choose_sm90_spec(ForwardCall(**fields))
    assert check_plan(spec.plan, spec.gpu) == []


@given(calls(("bf16", "fp16")), st.booleans(), st.booleans())
def test_plans_of_gradients_are_sound(fields: dict[str, Any], fixed: bool, lse: bool) -> None:
    call = BackwardCall(**fields | {"num_splits": 1}, deterministic=fixed, lse_gradient=lse)
    spec = choose_backward_spec(call, H200)
    wide = isinstance(spec, WideBackwardSpec)
    found = [spec.keys_plan, spec.queries_plan] if wide else [spec.plan]
    assert [check_plan(plan, spec.gpu) for plan in found] == [[]] * len(found)


def test_a_plan_with_too_little_room_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 bits, three warpgroups, V transposed, work tiles drawn: 32 mbarriers."""
    call = ForwardCall(
        dtype="e4m3", head_dim=64, head_dim_v=64, heads_q=32, heads_k=32, batch=4, rows_q=4096,
        rows_k=4096, window=(None, 0), descale="qkv",
    )  # fmt: skip
    spec = choose_sm90_spec(call)
    assert (spec.consumers, spec.scheduler) == (3, "queue")
    assert check_plan(spec.plan, spec.gpu) == []
    monkeypatch.setattr(plans, "barrier_bytes", lambda pipeline: plans.BARRIER_BYTES)
    pipeline = spec.pipeline
    findings = check_plan(plans.warpgroup_plan(pipeline, H200), H200)
    assert [finding.rule for finding in findings] == ["barrier_space"]
