"""What is wrong with one call, output by output, so that two faults at once can be told apart.

A property stops at its first failing case. Here that case is looked at again: which outputs are
outside their budgets, and, for gradients, whether they are so with the right O and LSE too, since
a wrong O alone makes dQ and dK wrong. What no output shows has the name of its kind: an exception,
a write to an argument, or the property that was broken.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from fa4.dtypes import numpy_dtype
from fa4.testing.backends import Backend, NotCovered
from fa4.testing.budget import BudgetReport, Outputs, check_budget
from fa4.testing.case import Case
from fa4.testing.checks import gradient_inputs
from fa4.testing.inputs import Inputs
from fa4.testing.layouts import build_inputs
from fa4.testing.levels import OUTPUTS
from fa4.testing.oracle import oracle_forward
from fa4.testing.plain import output_type
from fa4.testing.property import Property
from fa4.testing.refusals import Breach

LONGEST_KIND = 100  # characters of a message that tell one kind of failure from another


def judges_gradients(prop: Property) -> bool:
    """Does a property ask for gradients?"""
    return "gradients" in prop.needs


def observe(
    prop: Property, backend: Backend, case: Case, *, outputs_alone: bool = False
) -> dict[str, str]:
    """What is wrong with a case, by output or kind of failure, with a message; empty if nothing.

    The property itself is only asked where every output of the case is right, and not at all with
    `outputs_alone`.
    """
    try:
        found = wrong_outputs(backend, case, gradients=judges_gradients(prop))
    except NotCovered:
        found = {}
    except Exception as error:
        return {kind_of(error): one_line(error)}
    if found or outputs_alone:
        return found
    try:
        prop.check(backend, case)
    except NotCovered:
        return {}
    except Exception as error:
        kind = kind_of(error) if _speaks_for_itself(error) else prop.name
        return {kind: one_line(error)}
    return {}


def wrong_outputs(backend: Backend, case: Case, *, gradients: bool) -> dict[str, str]:
    """The outputs of a case that are outside their budgets, each with its worst element.

    Raises what the call raises, and AssertionError for results that cannot be judged.
    """
    inputs = build_inputs(case)
    saved = backend.forward(inputs)
    wrong = _outside(check_budget(inputs, saved, numerics=backend.numerics))
    if not gradients:
        return wrong
    given = gradient_inputs(case)
    grads = backend.gradients(
        given, right_outputs(inputs, saved) if wrong else saved, with_dlse=case.dlse
    )
    report = check_budget(
        given, grads, with_dlse=case.dlse, gradients_alone=True, numerics=backend.numerics
    )
    return wrong | _outside(report)


def right_outputs(inputs: Inputs, like: Outputs) -> Outputs:
    """O and LSE of the oracle, rounded as a back end returns them; no LSE where `like` has none."""
    rows = inputs.q.shape[:-1]
    out = np.zeros((*rows, inputs.v.shape[-1]), numpy_dtype(output_type(inputs.dtype)))
    kind = np.float32 if like.lse is None else like.lse.dtype
    lse = np.full((*rows[:-2], rows[-1], rows[-2]), -np.inf, kind)
    rows_first = np.moveaxis(lse, -2, -1)
    for index, right in zip(inputs.q_index, oracle_forward(inputs), strict=True):
        out[index] = right["out"].astype(out.dtype)
        rows_first[index] = right["lse"].T
    return Outputs(out, None if like.lse is None else lse)


def kind_of(error: Exception) -> str:
    """The same for failures of one kind, whatever the sizes and values: the message without
    numbers."""
    text = one_line(error).partition("; it printed")[0]
    if isinstance(error, Breach):
        text = text.partition(":")[0]
    text = re.sub(r"\d[\d.e+-]*", "#", text)
    return re.sub(r"\([#, ]*\)", "(#)", text)[:LONGEST_KIND]


def is_output(symptom: str) -> bool:
    """Is it one of the outputs, and not a kind of failure?"""
    return symptom in OUTPUTS


def one_line(error: Exception) -> str:
    """The message on one line, behind the type of what is no AssertionError."""
    text = " ".join(str(error).split())
    if isinstance(error, AssertionError) and text:
        return text
    name = type(error).__name__
    return f"{name}: {text}" if text else f"raises {name}"


def with_levels(prop: Property, case: Case) -> Case:
    """The case with what the check of a property adds to it."""
    return replace(case, dlse=True) if "dlse" in prop.levels else case


def _speaks_for_itself(error: Exception) -> bool:
    """Does it say what is wrong without the name of the property?"""
    return not isinstance(error, AssertionError) or isinstance(error, Breach)


def _outside(report: BudgetReport) -> dict[str, str]:
    return {check.output: str(check) for check in report.checks if check.share > 1.0}
