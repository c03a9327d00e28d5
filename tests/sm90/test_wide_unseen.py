"""Keys that no query sees, of the Hopper backward kernels of wide heads: they have no gradient."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass")

import torch

import fa4
from fa4.sm90.wide import keys_consumer
from fa4.sm90.wide.spec import WideBackwardSpec
from fa4.testing import Case, assert_within_budget
from tests.sm90.test_key_parts import compare, force
from tests.sm90.wide_kernel import build
from tests.sm100.altered import Edit, put_in_place
from tests.sm100.backward_kernel import prepare_stats
from tests.sm100.forward_kernel import make_inputs

# The last 90 of 300 keys are seen: those of the first three KV tiles by nobody.
CASE = Case(batch=2, seqlen_q=50, seqlen_k=300, heads_k=1, group=2, head_dim=24, head_dim_v=136,
            dtype="bf16", window_size=(40, None))  # fmt: skip
UNSEEN = 192


def check(case: Case) -> None:
    """No finding, every gradient within its budget, and zeros; the tensors begin as numbers."""
    left, right = (bound is not None for bound in case.window_size)
    spec = WideBackwardSpec(head_dim=24, head_dim_v=136, window_left=left, window_right=right)
    inputs = make_inputs(spec, case)
    stats, _ = prepare_stats(spec, inputs)
    reports, outputs = build(spec).launch(inputs, stats, collect=True)
    assert not any(report.findings for report in reports)
    assert_within_budget(inputs, outputs, gradients_alone=True)
    for gradient in (outputs.dk, outputs.dv):
        assert not np.any(gradient[:, :UNSEEN].astype(np.float32))


def test_keys_that_no_query_sees_have_no_gradient() -> None:
    check(CASE)


def test_no_key_is_seen() -> None:
    """Of a window that lies before the first key."""
    check(replace(CASE, seqlen_q=300, seqlen_k=50, window_size=(None, -260)))


def test_zeros_that_nobody_writes_are_seen(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        edit = Edit(keys_consumer, "        store_zeros(work", "        (work")
        put_in_place([edit], tmp_path, patch)
        with pytest.raises(AssertionError):
            check(CASE)


@pytest.mark.parametrize(("parts", "packed"), [(1, True), (3, False)])
def test_in_parts(monkeypatch: Any, parts: int, packed: bool) -> None:
    """In float32, of a row of more vectors than a warp has lanes; of sequences without queries."""
    force(monkeypatch, find_key_parts=parts)
    sizes = {"q": (60, 6, 256), "k": (310, 2, 256), "v": (310, 2, 136)}

    def gradients(impl: str) -> Any:
        drawn = torch.Generator().manual_seed(5)
        q, k, v = (torch.randn(*s, generator=drawn).bfloat16() for s in sizes.values())
        options: dict[str, Any] = {"impl": impl, "window_size": (40, None)}
        tensors = [x.requires_grad_() for x in (q, k, v)]
        if packed:
            starts = (torch.tensor(x, dtype=torch.int32) for x in ([0, 53, 53], [0, 203, 303]))
            names = ("cu_seqlens_q", "cu_seqlens_k")
            options |= dict(zip(names, starts, strict=True))
            out = fa4.flash_attn_varlen_func(*tensors, **options)
        else:
            out = fa4.flash_attn_func(*(x[None] for x in tensors), **options)
        return torch.autograd.grad(out, tensors, torch.randn(out.shape, generator=drawn).bfloat16())

    found, wanted = (gradients(impl) for impl in ("emulator_sm90", "reference"))
    if not packed:
        found, wanted = ([x[None] for x in one] for one in (found, wanted))
    compare(found, wanted)
