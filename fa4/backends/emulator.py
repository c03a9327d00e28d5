"""The compiled SM100 kernel of a B200, executed on the CPU with the emulator's checks."""

from __future__ import annotations

from typing import Any

from fa4.arrays import is_torch
from fa4.backends import AttentionGradients, Saved, kernel, reference
from fa4.call import Call
from fa4.compiled.support import NotSupported, check, is_device_function
from fa4.compiled.toolchain import find_toolchain
from fa4.hardware import B200, Gpu
from fa4.request import make_request

# In the emulator a kernel has so many SMs: few, so that each CTA gets several work tiles.
EMULATED_SMS = 4
_NO_MOD_GRADIENT = "no gradients through a CuTe-DSL score_mod or mask_mod"


def supports(call: Call, *, gradient: bool = False) -> str:
    """What the kernel refuses, tensors that are not on the CPU, a missing compiler."""
    try:
        check(kernel.describe(call))
        find_toolchain()
    except (NotSupported, ImportError) as error:
        return str(error)
    if is_torch(call.q) and call.q.device.type != "cpu":
        return f'impl="emulator" takes tensors on the CPU; q is on {call.q.device}'
    if gradient and _has_device_mods(call):
        return _NO_MOD_GRADIENT
    return ""


def forward(call: Call, *, lse: bool = True) -> tuple[Any, Any]:
    """(O, LSE). Raises `fa4.emulator.EmulationFailed` if a check found something."""
    return run(call, lse=lse)[:2]


def run(call: Call, *, lse: bool = True, **options: Any) -> tuple[Any, Any, list[Any]]:
    """(O, LSE, the emulator's reports); options of `fa4.emulator.launch`."""
    from fa4 import emulator

    reports: list[Any] = []

    def start(compiled: Any, *values: Any) -> None:
        reports.extend(emulator.launch(compiled, *values, **options))

    check(kernel.describe(call))
    if is_torch(call.q) and call.q.device.type != "cpu":
        raise ValueError(f'impl="emulator" takes tensors on the CPU; q is on {call.q.device}')
    make_request(call)  # the lengths, which the kernel would trust
    return *kernel.launch(call, kernel.prepare(call, _machine, lse=lse), start), reports


def _machine(call: Call) -> tuple[Gpu, int]:
    del call  # the same for all
    return B200, EMULATED_SMS


def _has_device_mods(call: Call) -> bool:
    """Are there callables that only a kernel can call? Those of `fa4.masks` the reference can."""
    mods = (call.extras.score_mod, call.extras.mask_mod)
    return any(mod is not None and is_device_function(mod) for mod in mods)


def backward(call: Call, saved: Saved, dout: Any, dlse: Any) -> AttentionGradients:
    """The reference's: there is no backward kernel in this version."""
    if _has_device_mods(call):
        raise NotImplementedError(_NO_MOD_GRADIENT)
    return reference.backward(call, saved, dout, dlse)
