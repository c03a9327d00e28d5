"""What the backends in the emulator share: compiled kernels on the CPU, with its checks.

Gradients are the backward kernels', as the result is the forward kernel's: a call that they refuse
is refused when it is made, if a gradient may be asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from fa4.backends import AttentionGradients, Saved, kernel, kernel_backward
from fa4.backends.request import make_request
from fa4.call.arrays import is_torch
from fa4.call.call import Call
from fa4.compiled.support import NotSupported, check
from fa4.compiled.toolchain import find_toolchain
from fa4.hardware import B200, H200, Gpu

MACHINES = {"sm100": B200, "sm90": H200}  # whose kernels are executed, by family
# In the emulator a kernel has so many SMs: few, so that each CTA gets several work tiles.
EMULATED_SMS = 4


def supports(family: str, call: Call, *, gradient: bool = False) -> str:
    """What the kernels refuse, tensors that are not on the CPU, a missing compiler."""
    try:
        check(kernel.describe(call), family)
        if gradient:
            kernel_backward.check_gradient(call, family)
        find_toolchain()
    except (NotSupported, ImportError) as error:
        return str(error)
    return find_fault(call)


def forward(
    family: str, call: Call, *, lse: bool = True, gradient: bool = False
) -> tuple[Any, Any]:
    """(O, LSE). Raises `fa4.emulator.EmulationFailed` if a check found something."""
    if gradient:
        kernel_backward.require_gradient(call, family)
    return run(family, call, lse=lse)[:2]


def backward(family: str, call: Call, saved: Saved, dout: Any, dlse: Any) -> AttentionGradients:
    """AttentionGradients from the saved O and LSE. Raises as `forward` does."""
    return run_backward(family, call, saved, dout, dlse)[0]


def run(family: str, call: Call, *, lse: bool = True, **options: Any) -> tuple[Any, Any, list[Any]]:
    """(O, LSE, the emulator's reports); options of `fa4.emulator.launch`."""
    check(kernel.describe(call), family)
    start, reports = _starter(call, options)
    prepared = kernel.prepare(call, machine_of(family), lse=lse)
    return *kernel.launch(call, prepared, start), reports


def run_backward(
    family: str, call: Call, saved: Saved, dout: Any, dlse: Any = None, **options: Any
) -> tuple[AttentionGradients, list[Any]]:
    """(gradients, the emulator's reports, one for each kernel); options as those of `run`."""
    kernel_backward.check_gradient(call, family)
    start, reports = _starter(call, options)
    prepared = kernel_backward.prepare_backward(
        call, machine_of(family), saved, lse_gradient=dlse is not None
    )
    return kernel_backward.launch_backward(call, prepared, saved, (dout, dlse), start), reports


@cache
def machine_of(family: str) -> kernel.FindMachine:
    """The machine of a family and its number of emulated SMs, for any call."""
    found: tuple[Gpu, int] = MACHINES[family], EMULATED_SMS
    return lambda call: found


def _starter(call: Call, options: dict[str, Any]) -> tuple[Callable[..., None], list[Any]]:
    """What launches in the emulator, and the list that its reports go to.

    Raises ValueError for tensors elsewhere and for wrong lengths, which a kernel would trust.
    """
    from fa4 import emulator

    reports: list[Any] = []

    def start(compiled: Any, *values: Any) -> None:
        reports.extend(emulator.launch(compiled, *values, **options))

    if elsewhere := find_fault(call):
        raise ValueError(elsewhere)
    make_request(call)
    return start, reports


def find_fault(call: Call) -> str:
    """What is wrong with where the tensors are; "" if nothing."""
    if is_torch(call.q) and call.q.device.type != "cpu":
        return f'impl="emulator" takes tensors on the CPU; q is on {call.q.device}'
    return ""
