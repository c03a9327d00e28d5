"""How the cases of a bug are judged: as the properties of the kit judge theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from fa4.testing.atlas.arrangements import arrange_inputs, arrange_saved
from fa4.testing.atlas.bug import Bug
from fa4.testing.backends import Backend
from fa4.testing.budget import Outputs, assert_within_budget
from fa4.testing.case import SCORE_MODS, Case
from fa4.testing.inputs import Inputs
from fa4.testing.layouts import build_inputs
from fa4.testing.metamorphic import lse_requested

Probe = Callable[[Backend, Bug], float]


@contextmanager
def _in_call(number: int, calls: int) -> Iterator[None]:
    """Say which of several calls an assertion is about."""
    try:
        yield
    except AssertionError as error:
        if calls == 1:
            raise
        raise AssertionError(f"call {number} of {calls}: {error}") from error


def _results(outputs: Outputs) -> list[np.ndarray]:
    """The arrays of a call's results."""
    found = (outputs.out, outputs.lse, outputs.dq, outputs.dk, outputs.dv, outputs.dsink)
    return [x for x in found if x is not None]


def _calls(judge: Callable[[Backend, Bug, Case], tuple[float, Outputs]]) -> Probe:
    """Judge every case of a bug in turn; at last, the results of all calls must still be there."""

    def probe(backend: Backend, bug: Bug) -> float:
        worst, kept = 0.0, []
        for number, case in enumerate(bug.cases, 1):
            with _in_call(number, len(bug.cases)):
                share, outputs = judge(backend, bug, case)
            worst = max(worst, share)
            kept += [(number, x, x.copy()) for x in _results(outputs)]
        for number, now, before in kept:
            if now.tobytes() != before.tobytes():
                raise AssertionError(f"the result of call {number} was overwritten by a later one")
        return worst

    return probe


def _judge_forward(backend: Backend, bug: Bug, case: Case) -> tuple[float, Outputs]:
    inputs = arrange_inputs(bug.arrangement, build_inputs(case))
    outputs = backend.forward(inputs)
    return assert_within_budget(inputs, outputs, numerics=backend.numerics), outputs


def _judge_gradients(
    backend: Backend, bug: Bug, case: Case, *, with_dlse: bool = False
) -> tuple[float, Outputs]:
    inputs = arrange_inputs(bug.arrangement, build_inputs(case))
    saved = backend.forward(inputs)
    if case.score_mod is not None:
        derivative = {"score_mod_bwd": SCORE_MODS[case.score_mod][1]}
        inputs = replace(inputs, options=inputs.options | derivative)
    grads = backend.gradients(inputs, arrange_saved(bug.arrangement, saved), with_dlse=with_dlse)
    share = assert_within_budget(
        inputs, grads, with_dlse=with_dlse, gradients_alone=not with_dlse,
        numerics=backend.numerics,
    )  # fmt: skip
    _assert_finite_outside(inputs, grads)
    return share, replace(grads, lse=saved.lse)


def _assert_finite_outside(inputs: Inputs, grads: Outputs) -> None:
    """Gradients of rows that no sequence uses are no NaN: a caller's products sum over them."""
    indices = {"dq": inputs.q_index, "dk": inputs.kv_index, "dv": inputs.kv_index}
    for name, index in indices.items():
        array = np.array(getattr(grads, name), np.float64)
        for part in index:
            array[part] = 0.0
        if not np.isfinite(array).all():
            raise AssertionError(f"{name} is not finite where no sequence is")


def _judge_gradients_lse(backend: Backend, bug: Bug, case: Case) -> tuple[float, Outputs]:
    return _judge_gradients(backend, bug, case, with_dlse=True)


def _probe_lse_requested(backend: Backend, bug: Bug) -> float:
    return max(lse_requested(backend, case) for case in bug.cases)


# What is judged, and what a back end must offer for it.
PROBES: dict[str, Probe] = {
    "forward": _calls(_judge_forward),
    "gradients": _calls(_judge_gradients),
    "gradients_lse": _calls(_judge_gradients_lse),
    "lse_requested": _probe_lse_requested,
}
PROBE_NEEDS: dict[str, tuple[str, ...]] = {
    "forward": (),
    "gradients": ("gradients",),
    "gradients_lse": ("gradients", "dlse", "lse"),
    "lse_requested": ("return_lse", "lse"),
}


def check_bug(bug: Bug, backend: Backend) -> float:
    """Does a back end have a bug? The largest share of the error budget that was used, if not.

    AssertionError if it has; NotCovered if it does not offer the bug's cases; and what the back end
    raises.
    """
    return PROBES[bug.probe](backend, bug)
