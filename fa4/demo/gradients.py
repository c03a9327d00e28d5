"""The compiled backward kernels on the demo's head, executed by the emulator."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fa4.backends import AttentionGradients, Saved
from fa4.call.call import Call
from fa4.testing.budget import Check, check_output, expect_gradients
from fa4.testing.inputs import dense_inputs

SCHEDULES = ("fifo", "adversarial")
NAMES = ("dq", "dk", "dv")


def run_backward_kernels(
    call: Call, outputs: tuple[np.ndarray, np.ndarray], progress: Callable[[str], None]
) -> dict[str, Any]:
    """The gradients of one head for a dO that is drawn.

    outputs: O and LSE of the call. Keys of the result: problem (a sentence if the kernels cannot do
    it, and then nothing else); ok; checks (of dq, dk and dv); schedules (findings of each);
    same_bits: are the results of all schedules the same?
    """
    from fa4.backends.kernel_backward import check_gradient
    from fa4.compiled.support import NotSupported

    try:
        check_gradient(call)
    except NotSupported as error:
        return {"problem": f"the backward kernels are left out: {error}"}
    options: dict[str, Any] = {"causal": True} if call.window_right == 0 else {}
    inputs = dense_inputs(*call[:3], **options)
    started = time.perf_counter()
    found, schedules = _emulate(call, outputs, inputs.dout, progress)
    progress(f"backward kernels: emulated in {time.perf_counter() - started:.1f} s")
    expected = expect_gradients(inputs)
    checks: dict[str, Any] = {}
    for grads in found:
        for name in NAMES:
            check = check_output(name, [getattr(grads, name)[0]], expected[name])
            keep_worst(checks, name, check)
    same = all(
        getattr(one, name).tobytes() == getattr(found[0], name).tobytes()
        for one in found
        for name in NAMES
    )
    clean = not any(schedule["findings"] for schedule in schedules)
    return {
        "problem": None,
        "ok": clean and same and all(check["within_budget"] for check in checks.values()),
        "checks": checks,
        "schedules": schedules,
        "same_bits": same,
    }


def _emulate(
    call: Call,
    outputs: tuple[np.ndarray, np.ndarray],
    dout: np.ndarray,
    progress: Callable[[str], None],
) -> tuple[list[AttentionGradients], list[dict[str, Any]]]:
    """Gradients of each schedule that the checks did not stop, and what each schedule found."""
    from fa4.backends import emulator
    from fa4.emulator import EmulationFailed

    found, schedules = [], []
    for seed, schedule in enumerate(SCHEDULES):
        progress(f"backward kernels: emulating under schedule {schedule}")
        try:
            grads, reports = emulator.run_backward(
                call, Saved(*outputs), dout, schedule=schedule, seed=seed
            )
            found.append(grads)
        except EmulationFailed as failure:
            reports = [failure.report]
        schedules.append(describe_run(schedule, seed, reports))
    return found, schedules


def describe_run(schedule: str, seed: int, reports: Sequence[Any]) -> dict[str, Any]:
    """What the emulator found under one schedule, and how much it executed."""
    return {
        "schedule": schedule,
        "seed": seed,
        "findings": [str(finding) for report in reports for finding in report.findings],
        "instructions": sum(report.instructions.total() for report in reports),
    }


def keep_worst(worst: dict[str, Any], name: str, check: Check) -> None:
    """Keeps the check of an output that used most of its budget."""
    if name not in worst or check.share > worst[name]["share_of_budget"]:
        worst[name] = {
            "error": check.error,
            "budget": check.allowed,
            "share_of_budget": check.share,
            "within_budget": check.share <= 1.0,
        }
