"""The compiled SM100 kernels on a B200 or B300, on torch's current stream."""

from __future__ import annotations

from functools import cache
from typing import Any

from fa4.arrays import is_torch
from fa4.backends import AttentionGradients, Saved, kernel, kernel_backward
from fa4.call import Call
from fa4.compiled.support import NotSupported, check
from fa4.compiled.toolchain import find_toolchain
from fa4.compiled.variants import find_gpu
from fa4.hardware import Gpu


def supports(call: Call, *, gradient: bool = False) -> str:
    """What the kernels refuse, another GPU, a missing compiler."""
    try:
        check(kernel.describe(call))
        if gradient:
            kernel_backward.check_gradient(call)
    except NotSupported as error:
        return str(error)
    if elsewhere := _place(call):
        return elsewhere
    import torch

    try:
        find_gpu(torch.cuda.get_device_capability(call.q.device))
        find_toolchain()
    except (ValueError, RuntimeError, ImportError) as error:
        return str(error)
    return ""


def forward(call: Call, *, lse: bool = True, gradient: bool = False) -> tuple[Any, Any]:
    """(O, LSE). The host never waits for the GPU.

    Raises ValueError for tensors or a GPU without a kernel, ImportError without CuTe-DSL and
    NotSupported for calls that the kernel refuses: nothing is launched then.
    """
    if elsewhere := _place(call):
        check(kernel.describe(call))
        raise ValueError(elsewhere)
    if gradient:
        kernel_backward.require_gradient(call)
    return kernel.launch(call, kernel.prepare(call, _machine, lse=lse), _starter(call.q.device))


def _place(call: Call) -> str:
    """What is wrong with where the tensors are; "" if nothing."""
    if is_torch(call.q) and call.q.device.type == "cuda":
        return ""
    where = f"on {call.q.device}" if is_torch(call.q) else f"a {type(call.q).__name__}"
    return f'impl="sm100" takes torch tensors on a CUDA GPU; q is {where}'


def _machine(call: Call) -> tuple[Gpu, int]:
    """The GPU of the tensors and its number of SMs. Raises ValueError if no kernel runs on it."""
    import torch

    gpu = find_gpu(torch.cuda.get_device_capability(call.q.device))
    return gpu, torch.cuda.get_device_properties(call.q.device).multi_processor_count


@cache
def _starter(device: Any) -> Any:
    """Launches on a device, which is made the current one where it is not."""
    import torch

    def start(compiled: Any, *values: Any) -> None:
        if torch.cuda.current_device() == device.index:
            compiled(*values)
            return
        with torch.cuda.device(device):
            compiled(*values)

    return start


def backward(call: Call, saved: Saved, dout: Any, dlse: Any) -> AttentionGradients:
    """AttentionGradients from the saved O and LSE. Raises as `forward` does."""
    if elsewhere := _place(call):
        kernel_backward.check_gradient(call)
        raise ValueError(elsewhere)
    prepared = kernel_backward.prepare_backward(
        call, _machine, saved, lse_gradient=dlse is not None
    )
    start = _starter(call.q.device)
    return kernel_backward.launch_backward(call, prepared, saved, (dout, dlse), start)
