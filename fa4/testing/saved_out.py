"""dQ where K and V have a common mean: what the rounding of the saved O costs.

D = rowsum(dO O) is taken from the O that the forward pass returned, rounded to the element type.
Where values vary little around a common mean, dP - D is a small difference of large numbers, and
the error of D, times P K with a K that has a mean too, is most of dQ: 39% of it in bf16 for 2,048
keys. Every published flash attention does this, since its backward pass is given no other O; plain
attention of the budget does too (`Numerics.saved_out`), so no back end fails for it. But it is no
necessity: D = rowsum(P dP) of the same P and dP has no such error, nor has an O with more bits. So
there is a property of its own, held to plain attention with the unrounded O, that a back end may
leave open ("robustness"). A backward pass that names `out_residual` is given what rounding took
from O, as a forward pass with more bits would keep it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fa4.dtypes import round_to
from fa4.testing.backends import Backend
from fa4.testing.budget import Outputs, assert_within_budget
from fa4.testing.case import Case
from fa4.testing.checks import gradient_inputs, saved_by
from fa4.testing.inputs import Inputs
from fa4.testing.oracle import oracle_forward
from fa4.testing.property import Plan, Property
from fa4.testing.shrink import SIZES


def residual_of(inputs: Inputs, saved: Outputs) -> np.ndarray:
    """What rounding took from O, (B, Sq, Hq, dv) in its type, of a dense call."""
    exact = np.stack([parts["out"] for parts in oracle_forward(inputs)])
    return round_to(exact - saved.out.astype(np.float64), inputs.dtype, saturate=True)


def gradients_common_mean(backend: Backend, case: Case) -> float:
    """Gradients within the budget of an O with more bits."""
    inputs = gradient_inputs(case)
    saved = saved_by(backend, inputs)
    grads = backend.gradients(inputs, saved, out_residual=residual_of(inputs, saved))
    numerics = replace(backend.numerics, saved_out="exact")
    return assert_within_budget(inputs, grads, gradients_alone=True, numerics=numerics)


def _list_cases(plan: Plan) -> list[Case]:
    """Values around a common mean, a few keys and many."""
    shapes: tuple[dict[str, Any], ...] = (
        {"seqlen_q": 8, "seqlen_k": 2048, "head_dim": 64, "head_dim_v": 64},
        {"seqlen_q": 33, "seqlen_k": 257, "group": 2, "head_dim": 32, "head_dim_v": 32},
    )
    return [
        Case(dtype=dtype, seed=plan.seed + n, values="common_mean", **shape)
        for n, shape in enumerate(shapes)
        for dtype in plan.dtypes
    ]


SAVED_OUT = Property(
    "gradients_common_mean",
    "dQ where K and V have a common mean: D from an O with more bits",
    gradients_common_mean,
    listed=_list_cases,
    needs=frozenset({"gradients"}),
    dtypes=("bf16", "fp16"),
    group="robustness",
    levels=("gradients",),
    shrinks=SIZES - {"dtype"},
)
