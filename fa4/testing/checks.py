"""Checks that compare a call with the float64 oracle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fa4.testing.backends import Backend
from fa4.testing.budget import Outputs, assert_within_budget
from fa4.testing.case import SCORE_MODS, Case
from fa4.testing.inputs import Inputs
from fa4.testing.layouts import build_inputs
from fa4.testing.refusals import Breach

NOT_ZERO = "gradients must be 0 where no sequence lies"
REPEAT_EVERY = 8  # of so many cases one is called twice


def equals_oracle(backend: Backend, case: Case) -> float:
    """Forward: out, and LSE if there is one, within their budgets; one call in eight is repeated
    and must give the same bits."""
    inputs = build_inputs(case)
    outputs = backend.forward(inputs)
    if case.seed % REPEAT_EVERY == 0:
        same_bits(outputs, backend.forward(inputs), "the same call again")
    return assert_within_budget(inputs, outputs, numerics=backend.numerics)


def gradients_equal_oracle(backend: Backend, case: Case) -> float:
    """Forward and backward: every gradient within its budget, that of the LSE included if the case
    has one."""
    inputs = gradient_inputs(case)
    grads = differentiate(backend, case, inputs)
    return assert_within_budget(
        inputs, grads, with_dlse=case.dlse, gradients_alone=True, numerics=backend.numerics
    )


def lse_gradients_equal_oracle(backend: Backend, case: Case) -> float:
    """As `gradients_equal_oracle` with a gradient of the LSE; O and LSE are judged too."""
    inputs = gradient_inputs(case)
    grads = differentiate(backend, replace(case, dlse=True), inputs)
    return assert_within_budget(inputs, grads, with_dlse=True, numerics=backend.numerics)


def gradient_inputs(case: Case) -> Inputs:
    """The inputs, with the derivative of a score_mod."""
    inputs = build_inputs(case)
    if case.score_mod is None:
        return inputs
    return replace(
        inputs, options=inputs.options | {"score_mod_bwd": SCORE_MODS[case.score_mod][1]}
    )


def differentiate(backend: Backend, case: Case, inputs: Inputs) -> Outputs:
    """The back end's forward and backward pass; Breach for gradients in padding."""
    grads = backend.gradients(inputs, saved_by(backend, inputs), with_dlse=case.dlse)
    for name in ("dq", "dk", "dv"):
        unused = inputs.unused(getattr(grads, name), rows=name == "dq")
        if (unused != 0).any():  # NaN is not 0 either
            value = float(unused[unused != 0].flat[0])
            raise Breach(f"{NOT_ZERO}: {name} there is {value:.9g}")
    return grads


def saved_by(backend: Backend, inputs: Inputs) -> Outputs:
    """The results of the forward pass of `gradient_inputs`."""
    options = {name: x for name, x in inputs.options.items() if name != "score_mod_bwd"}
    return backend.forward(replace(inputs, options=options))


def same_bits(first: Outputs, second: Outputs, label: str) -> None:
    """Breach unless all outputs of two calls are the same, NaN included."""
    for name in ("out", "lse", "dq", "dk", "dv", "dsink"):
        a, b = getattr(first, name), getattr(second, name)
        if a is None or b is None:
            continue
        wide_a, wide_b = (np.asarray(x).astype(np.float64) for x in (a, b))
        if not np.array_equal(wide_a, wide_b, equal_nan=True):
            other = (wide_a != wide_b) & ~(np.isnan(wide_a) & np.isnan(wide_b))
            at = tuple(int(i) for i in np.argwhere(other)[0])
            raise Breach(label, f"{name}{list(at)} = {wide_b[at]:.9g}, and {wide_a[at]:.9g} before")
