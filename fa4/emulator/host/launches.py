"""Launches as the CUDA driver and its runtime are told them: read out of memory."""

from __future__ import annotations

import ctypes as C
from typing import Any

from fa4.emulator.errors import LaunchError
from fa4.emulator.execute import load_module
from fa4.emulator.host.device import MAX_SHARED_BYTES_PER_BLOCK
from fa4.emulator.machine.launch_record import Launch
from fa4.emulator.ptx.syntax import Kernel

P, I32, I64 = C.c_void_p, C.c_int32, C.c_int64

# cudaLaunchAttributeID (driver_types.h)
_COOPERATIVE, _CLUSTER, _PROGRAMMATIC = 2, 4, 6
# Hints: access policy, synchronization policy, cluster scheduling policy, priority, memory
# synchronization domains, preferred cluster (a larger one that the hardware may use where it
# fits), shared memory carve-out. A run without them is one that the hardware may choose.
_HINTS = {0, 1, 3, 5, 8, 9, 10, 11, 14}


class _LaunchAttribute(C.Structure):
    _fields_ = (("id", I32), ("pad", I32), ("value", I32 * 16))


class LaunchConfig(C.Structure):
    """cudaLaunchConfig_t; CUlaunchConfig has a dynamic_smem_bytes of 32 bits and a gap."""

    _fields_ = (
        ("grid", I32 * 3),
        ("block", I32 * 3),
        ("dynamic_smem_bytes", I64),
        ("stream", P),
        ("attributes", C.POINTER(_LaunchAttribute)),
        ("attribute_count", I32),
    )


def read_attributes(kernel: str, config: LaunchConfig) -> dict[str, Any]:
    """Cluster and kind of a launch, as `Launch` names them. Raises LaunchError for other ones."""
    found: dict[str, Any] = {}
    for attribute in config.attributes[: config.attribute_count]:
        value = attribute.value
        if attribute.id == _CLUSTER:
            found["cluster"] = (value[0], value[1], value[2])
        elif attribute.id == _PROGRAMMATIC:
            found["programmatic"] = bool(value[0])
        elif attribute.id == _COOPERATIVE:
            found["cooperative"] = bool(value[0])
        elif attribute.id not in _HINTS:
            raise LaunchError(f"{kernel}: launch attribute {attribute.id} is not supported")
    return found


def read_launch(
    ptx: str,
    kernel: str,
    shape: tuple[int, ...],
    dynamic_smem_bytes: int,
    values: int,
    **rest: Any,
) -> Launch:
    """A launch. shape: grid and block. values: address of the addresses of its parameters."""
    entry = find_kernel(ptx, kernel)
    smem = dynamic_smem_bytes + static_smem_bytes(ptx, entry)
    if smem > MAX_SHARED_BYTES_PER_BLOCK:
        raise LaunchError(
            f"{entry.name}: {smem} bytes of shared memory, at most "
            f"{MAX_SHARED_BYTES_PER_BLOCK} are allowed"
        )
    pointers = (P * len(entry.parameters)).from_address(values) if entry.parameters else ()
    parameters = tuple(
        C.string_at(pointer, parameter.size_bytes or 0)
        for pointer, parameter in zip(pointers, entry.parameters, strict=True)
    )
    return Launch(
        kernel=entry.name,
        ptx=ptx,
        grid=(shape[0], shape[1], shape[2]),
        block=(shape[3], shape[4], shape[5]),
        dynamic_smem_bytes=dynamic_smem_bytes,
        parameters=parameters,
        **{"cluster": (1, 1, 1), **rest},
    )


def find_kernel(ptx: str, name: str) -> Kernel:
    """A kernel by its name. Raises LaunchError if the PTX has none of it."""
    kernels = load_module(ptx).kernels
    if name not in kernels:
        raise LaunchError(f"no kernel {name!r} in the PTX, which has {', '.join(kernels)}")
    return kernels[name]


def static_smem_bytes(ptx: str, kernel: Kernel) -> int:
    """Shared memory that a kernel and its module declare."""
    variables = (*load_module(ptx).variables, *kernel.variables)
    return sum(v.size_bytes or 0 for v in variables if v.space == "shared" and not v.extern)
