"""The kernel and the reference in FlashAttention-4 mode: the same decisions, the same rounding.

Both get one `ForwardConfig`. What may differ is the order of the sums in float32, and where P or O
lies next to a tie, its last bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fa4.backends.request import make_request
from fa4.call.checked import make_call
from fa4.config import Exp2Split, ForwardConfig
from fa4.dtypes import ulp, unit_roundoff
from fa4.emulator import RunEvents
from fa4.kit.units import padded_dim
from fa4.reference import attention_forward
from fa4.sm100.forward.correction import CHUNK
from fa4.sm100.forward.spec import ForwardSpec
from fa4.testing import Case
from fa4.testing.budget import Outputs
from fa4.testing.inputs import Inputs
from tests.sm100.forward_kernel import Kernel, kernel, make_inputs

REGIMES = ("normal", "scale_100", "ramp_up", "ramp_down", "jumps_under", "jumps_over")
WARP = 32
SAME = {"bf16": 0.97, "fp16": 0.9}  # share of O that must be equal to the bit
POLYNOMIAL_ERROR = 8.8e-5  # relative, of degree 3
FLOAT32_SCORES = 2.0**-21  # of the largest score: what the order of a sum may change


class Rescales(RunEvents):
    """Counts the rescales of O, by warp: given to the emulator as `events`."""

    def __init__(self, run: Kernel) -> None:
        self.warps = run.spec.plan.role("correction").warps
        self.stores = 0
        self.per_rescale = padded_dim(run.spec.head_dim_v) // CHUNK

    def executed(self, fragment: Any, step: Any, outcome: Any, tick: int) -> None:
        """A handler ran."""
        mine = fragment.warp.index in self.warps
        self.stores += mine and step.instruction.opcode.startswith("tcgen05.st")

    @property
    def count(self) -> int:
        """Warps times KV tiles whose O was multiplied."""
        assert self.stores % self.per_rescale == 0
        return self.stores // self.per_rescale


def reference(inputs: Inputs, config: ForwardConfig) -> Any:
    """The reference's result, with its counters."""
    request = make_request(make_call(inputs.q, inputs.k, inputs.v, inputs.options, varlen=False))
    return attention_forward(request.q, request.k, request.v, request.spec, config=config)


def problem(run: Kernel, values: str) -> Inputs:
    """Several tiles each way. Causal rows meet one tile that they do not see, never two.

    After a second one the reference counts a rescale of what is still nothing, the kernel does not.
    """
    spec = run.spec
    keys = 300 if spec.causal else 600
    case = Case(
        layout="packed", lengths=((300, keys),), heads_k=1, group=2, values=values, seed=3,
        head_dim=spec.head_dim, head_dim_v=spec.head_dim_v, dtype=spec.dtype, causal=spec.causal,
    )  # fmt: skip
    return make_inputs(spec, case)


def check_same(inputs: Inputs, spec: ForwardSpec, outputs: Outputs, wanted: Any) -> None:
    """O agrees to its last bit, or as far as one P that rounds the other way changes it."""
    q, k, v = (np.abs(x.astype(np.float64)) for x in (inputs.q, inputs.k, inputs.v))
    norms = [np.sqrt((x**2).sum(axis=-1)).max() for x in (q, k)]
    slip = FLOAT32_SCORES * max(1.0, norms[0] * norms[1] * spec.head_dim**-0.5)
    difference = np.abs(outputs.out.astype(np.float64) - wanted.out.astype(np.float64))
    flip = 2 * unit_roundoff(spec.dtype)  # of a P that takes all of its row
    assert (difference <= ulp(wanted.out, spec.dtype) + (flip + slip) * v.max()).all()
    assert (difference == 0).mean() > SAME[spec.dtype]
    assert outputs.lse is not None
    # An exponent that slips past an integer meets the other end of the polynomial.
    lse_difference = np.abs(outputs.lse - wanted.lse)
    assert (lse_difference <= slip).mean() > SAME[spec.dtype]
    assert lse_difference.max() <= slip + POLYNOMIAL_ERROR


@pytest.mark.parametrize("name", ["plain", "causal"])
def test_same_decisions_and_rounding_as_the_reference(name: str) -> None:
    """O agrees to the last bit or next to it, LSE to float32, the number of rescales exactly."""
    run = kernel(name)
    config, rescales_seen = run.spec.numerics, 0
    for values in REGIMES:
        inputs, rescales = problem(run, values), Rescales(run)
        outputs, _ = run(inputs, events=rescales)
        wanted = reference(inputs, config)
        assert rescales.count == wanted.counters.rescales_done, values
        rescales_seen += rescales.count
        check_same(inputs, run.spec, outputs, wanted)
    assert rescales_seen > 0


def test_other_choices_are_seen() -> None:
    """The comparison above fails with another threshold, or other emulated elements."""
    run = kernel("plain")
    config = run.spec.numerics
    inputs, rescales = problem(run, "jumps_over"), Rescales(run)
    outputs, _ = run(inputs, events=rescales)
    eager = reference(inputs, replace(config, rescale_threshold_log2=9.0))
    assert eager.counters.rescales_done != rescales.count
    inputs = problem(run, "normal")
    outputs, _ = run(inputs)
    with pytest.raises(AssertionError):
        check_same(inputs, run.spec, outputs, reference(inputs, replace(config, exp2=Exp2Split())))
