"""Checks that compare a call with the float64 oracle."""

from __future__ import annotations

from dataclasses import replace

from fa4.testing.backends import Backend
from fa4.testing.budget import assert_within_budget
from fa4.testing.case import SCORE_MODS, Case
from fa4.testing.layouts import build_inputs


def equals_oracle(backend: Backend, case: Case) -> float:
    """Forward: out, and LSE if there is one, within their budgets."""
    inputs = build_inputs(case)
    return assert_within_budget(inputs, backend.forward(inputs))


def gradients_equal_oracle(backend: Backend, case: Case, *, with_dlse: bool = False) -> float:
    """Forward and backward: every gradient within its budget; with dlse, O and LSE too."""
    inputs = build_inputs(case)
    saved = backend.forward(inputs)
    if case.score_mod is not None:
        derivative = {"score_mod_bwd": SCORE_MODS[case.score_mod][1]}
        inputs = replace(inputs, options=inputs.options | derivative)
    grads = backend.gradients(inputs, saved, with_dlse=with_dlse)
    return assert_within_budget(inputs, grads, with_dlse=with_dlse, gradients_alone=not with_dlse)
