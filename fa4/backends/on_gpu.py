"""What the backends on a GPU share: where tensors must be, the machine, launches on its stream."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from fa4.backends import AttentionGradients, Saved, kernel, kernel_backward
from fa4.call.arrays import is_torch
from fa4.call.call import Call
from fa4.compiled.support import NotSupported, check
from fa4.compiled.toolchain import find_toolchain
from fa4.compiled.variants import find_gpu
from fa4.hardware import Gpu


def supports(family: str, call: Call, *, gradient: bool = False) -> str:
    """What a family's kernels refuse, another GPU, a missing compiler; "" if nothing."""
    try:
        check(kernel.describe(call), family)
        if gradient:
            kernel_backward.check_gradient(call, family)
    except NotSupported as error:
        return str(error)
    if elsewhere := find_fault(family, call):
        return elsewhere
    import torch

    try:
        find_gpu(torch.cuda.get_device_capability(call.q.device), family)
        find_toolchain()
    except (ValueError, RuntimeError, ImportError) as error:
        return str(error)
    return ""


def forward(
    family: str, call: Call, *, lse: bool = True, gradient: bool = False
) -> tuple[Any, Any]:
    """(O, LSE). The host never waits for the GPU.

    Raises ValueError for tensors or a GPU without a kernel, ImportError without CuTe-DSL and
    NotSupported for calls that the kernel refuses: nothing is launched then.
    """
    if elsewhere := find_fault(family, call):
        check(kernel.describe(call), family)
        raise ValueError(elsewhere)
    if gradient:
        kernel_backward.require_gradient(call, family)
    prepared = kernel.prepare(call, machine_of(family), lse=lse)
    return kernel.launch(call, prepared, starter(call.q.device))


def backward(family: str, call: Call, saved: Saved, dout: Any, dlse: Any) -> AttentionGradients:
    """AttentionGradients from the saved O and LSE. Raises as `forward` does."""
    if elsewhere := find_fault(family, call):
        kernel_backward.check_gradient(call, family)
        raise ValueError(elsewhere)
    prepared = kernel_backward.prepare_backward(
        call, machine_of(family), saved, lse_gradient=dlse is not None
    )
    start = starter(call.q.device)
    return kernel_backward.launch_backward(call, prepared, saved, (dout, dlse), start)


def find_fault(family: str, call: Call) -> str:
    """What is wrong with where the tensors are; "" if nothing."""
    if is_torch(call.q) and call.q.device.type == "cuda":
        return ""
    where = f"on {call.q.device}" if is_torch(call.q) else f"a {type(call.q).__name__}"
    return f'impl="{family}" takes torch tensors on a CUDA GPU; q is {where}'


@cache
def machine_of(family: str) -> kernel.FindMachine:
    """Finds the GPU of a call's tensors and its number of SMs: a model may have fewer (H100 PCIe).

    Raises ValueError if no kernel of the family runs on it.
    """
    import torch

    def find(call: Call) -> tuple[Gpu, int]:
        gpu = find_gpu(torch.cuda.get_device_capability(call.q.device), family)
        num_sms = torch.cuda.get_device_properties(call.q.device).multi_processor_count
        return replace(gpu, sm_count=num_sms), num_sms

    return find


@cache
def starter(device: Any) -> Any:
    """Launches on a device, which is made the current one where it is not."""
    import torch

    def start(compiled: Any, *values: Any) -> None:
        if torch.cuda.current_device() == device.index:
            compiled(*values)
            return
        with torch.cuda.device(device):
            compiled(*values)

    return start
