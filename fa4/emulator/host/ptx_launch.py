"""Launches PTX without a host program: parameters from NumPy arrays, numbers and bytes.

`run_ptx` is the short way: PTX text, one value for each parameter, a report. Arrays are written in
place. For CuTe-DSL programs, which compute their parameters themselves, see `fa4.emulator.host`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from fa4.emulator.errors import ArgumentError, EmulatorError, LaunchError
from fa4.emulator.execute import Report, load_module, run
from fa4.emulator.host.addresses import shift_of
from fa4.emulator.machine.launch_record import Allocation, Launch
from fa4.emulator.machine.options import Options
from fa4.emulator.ptx.syntax import Kernel, Variable
from fa4.emulator.tma.descriptor import TensorMap

Triple: TypeAlias = tuple[int, int, int]
Arguments: TypeAlias = "Mapping[str, Any] | Sequence[Any]"

DEFAULT_BLOCK = (128, 1, 1)
POINTER_BYTES = 8
# Types of NumPy and ml_dtypes -> element types of tensor maps; others are moved as bytes.
_TMA_ELEMENTS = {
    "uint8": "u8", "uint16": "u16", "uint32": "u32", "uint64": "u64", "int32": "s32",
    "int64": "s64", "float16": "f16", "float32": "f32", "float64": "f64", "bfloat16": "bf16",
    "int8": "u8", "int16": "u16", "float8_e4m3fn": "u8", "float8_e5m2": "u8",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Tma:
    """A parameter that is the tensor map of an array.

    array: in C order, its last dimension innermost. box: elements that one copy moves, in the
    order of the array's dimensions. swizzle: span in bytes, 0, 32, 64 or 128.
    """

    array: Any
    box: tuple[int, ...]
    swizzle: int = 0

    def encode(self) -> bytes:
        """The 128 bytes of the map. Raises EmulatorError if there is no such map."""
        array = self.array
        if str(array.dtype) not in _TMA_ELEMENTS:
            raise LaunchError(f"no tensor map has elements of type {array.dtype}")
        _check_array("the array of a tensor map", array)
        return TensorMap(
            address=_address(array),
            element=_TMA_ELEMENTS[str(array.dtype)],
            dims=array.shape[::-1],
            strides_bytes=array.strides[-2::-1] if array.ndim > 1 else (),
            box=self.box[::-1],
            element_strides=(1,) * array.ndim,
            swizzle=self.swizzle,
        ).encode()


def run_ptx(
    ptx: str,
    arguments: Arguments,
    kernel: str = "",
    *,
    grid: Triple | None = None,
    block: Triple | None = None,
    cluster: Triple | None = None,
    dynamic_smem_bytes: int = 0,
    **options: Any,
) -> Report:
    """Runs one kernel of a PTX text. Arguments and result: see `make_launch` and `execute.run`.

    options: those of `fa4.emulator.Options`. Raises what these two raise.

    Example:
        report = run_ptx(text, {"x": x, "y": y, "n": 1000}, grid=(8, 1, 1))
    """
    launch, allocations = make_launch(
        ptx,
        arguments,
        kernel,
        grid=grid,
        block=block,
        cluster=cluster,
        dynamic_smem_bytes=dynamic_smem_bytes,
    )
    return run([launch], allocations, Options(**options))


def make_launch(
    ptx: str,
    arguments: Arguments,
    kernel: str = "",
    *,
    grid: Triple | None = None,
    block: Triple | None = None,
    cluster: Triple | None = None,
    dynamic_smem_bytes: int = 0,
) -> tuple[Launch, list[Allocation]]:
    """The launch of a kernel with these arguments, and the memory that it may touch.

    arguments: one for each parameter, in order; the names of a mapping appear in findings. An
    array is passed as its address, `Tma` as a tensor map, a NumPy scalar and bytes as they are, a
    Python number in the parameter's size, a tuple as a struct of such values. kernel: may be left
    out if the PTX has only one. Defaults: the kernel's own .reqntid and .reqnctapercluster, 128
    threads, one cluster. Raises PtxError or LaunchError.
    """
    found = find_kernel(ptx, kernel)
    named = arguments if isinstance(arguments, Mapping) else _numbered(arguments)
    parameters = found.parameters
    if len(named) != len(parameters):
        names = [p.name.removeprefix(f"{found.name}_") for p in parameters]
        sizes = [f"{n} ({p.size_bytes} bytes)" for n, p in zip(names, parameters, strict=True)]
        listed = ", ".join(sizes) or "none"
        raise LaunchError(
            f"the kernel takes {len(parameters)} parameter(s), {len(named)} given: {listed}"
        )
    allocations: dict[int, Allocation] = {}
    values = []
    for (name, value), parameter in zip(named.items(), parameters, strict=True):
        with _blaming(name):
            for array_name, array in _arrays(name, value):
                _check_array(array_name, array)
                allocations.setdefault(id(array), _allocation(array_name, array))
            values.append(_pack(name, value, parameter))
    cluster = cluster or _triple(found.directives.get("reqnctapercluster")) or (1, 1, 1)
    launch = Launch(
        kernel=found.name,
        ptx=ptx,
        grid=grid or cluster,
        block=block or _triple(found.directives.get("reqntid")) or DEFAULT_BLOCK,
        cluster=cluster,
        dynamic_smem_bytes=dynamic_smem_bytes,
        parameters=tuple(values),
    )
    return launch, list(allocations.values())


@contextmanager
def _blaming(argument: str) -> Iterator[None]:
    """Errors inside are those of this argument."""
    try:
        yield
    except EmulatorError as error:
        raise ArgumentError(argument, str(error)) from error


def find_kernel(ptx: str, name: str = "") -> Kernel:
    """A kernel of a PTX text; without a name the only one. Raises PtxError or LaunchError."""
    kernels = load_module(ptx).kernels
    listed = ", ".join(kernels) or "none"
    if name and name not in kernels:
        raise LaunchError(f"no kernel {name!r}; the PTX has {listed}")
    if not name and len(kernels) != 1:
        raise LaunchError(f"name one kernel; the PTX has {listed}")
    return kernels[name] if name else next(iter(kernels.values()))


def _numbered(arguments: Sequence[Any]) -> dict[str, Any]:
    return {f"argument {index}": value for index, value in enumerate(arguments)}


def _triple(values: Sequence[int] | None) -> Triple | None:
    if not values:
        return None
    x, y, z = (*values, 1, 1)[:3]
    return x, y, z


def _arrays(name: str, value: Any) -> list[tuple[str, Any]]:
    """The arrays of an argument, with their names."""
    if isinstance(value, tuple):
        inner = [_arrays(f"{name}[{index}]", field) for index, field in enumerate(value)]
        return [pair for pairs in inner for pair in pairs]
    if isinstance(value, Tma):
        return [(name, value.array)]
    return [(name, value)] if isinstance(value, np.ndarray) else []


def _check_array(name: str, array: Any) -> None:
    if not array.flags.c_contiguous:
        raise LaunchError(f"{name} is not contiguous in C order: pass a copy")
    if array.dtype.hasobject or not array.dtype.isnative:
        raise LaunchError(f"{name} is an array of {array.dtype}; only native numbers are allowed")


def _allocation(name: str, array: Any) -> Allocation:
    shift = shift_of(array)
    return Allocation(
        name, array.ctypes.data, array.nbytes, array.flags.writeable, array, shift=shift
    )


def _address(array: Any) -> int:
    """Where kernels see an array."""
    return int(array.ctypes.data) + shift_of(array)


def _pack(name: str, value: Any, parameter: Variable) -> bytes:
    """The bytes of a parameter. Raises LaunchError if the value does not fit."""
    size = parameter.size_bytes or 0
    if isinstance(value, tuple):
        packed = _pack_struct(name, value, parameter)
    else:
        packed = _pack_value(name, value, parameter.type, size)
    if len(packed) != size:
        raise LaunchError(
            f"{name} has {len(packed)} bytes; parameter {parameter.name} takes {size}"
        )
    _check_kind(name, value, parameter)
    return packed


def _check_kind(name: str, value: Any, parameter: Variable) -> None:
    """Raises LaunchError for a float where the parameter is an integer, and the other way round.

    .b32 and its kin take both; signs do not matter. A pointer is an integer, a number of Python
    for a floating-point parameter one of that type.
    """
    declared = parameter.type[:1]
    if isinstance(value, (np.ndarray, Tma)):
        given, what = "u", "an address"
    elif isinstance(value, np.generic):
        given, what = "u" if value.dtype.kind in "iub" else "f", f"a number of type {value.dtype}"
    elif isinstance(value, float):
        given, what = "f", f"the float {value}"
    else:
        return
    if declared in "usf" and (declared == "f") != (given == "f"):
        raise LaunchError(f"{name} is {what}; parameter {parameter.name} is .{parameter.type}")


def _pack_struct(name: str, fields: tuple[Any, ...], parameter: Variable) -> bytes:
    """Numbers at multiples of their size, bytes where the one before ends, zeros at the end."""
    packed = bytearray()
    for field in fields:
        if not isinstance(field, (np.ndarray, np.generic, bytes, Tma)):
            raise LaunchError(f"{name}: {field!r} in a struct needs a type, such as np.int32(5)")
        part = _pack_value(name, field, "", 0)
        alignment = 1 if isinstance(field, bytes) else min(len(part), 64)
        packed += bytes(-len(packed) % alignment) + part
    return bytes(packed).ljust(parameter.size_bytes or 0, b"\0")


def _pack_value(name: str, value: Any, ptx_type: str, size_bytes: int) -> bytes:
    if isinstance(value, np.ndarray):
        return _address(value).to_bytes(POINTER_BYTES, "little")
    if isinstance(value, Tma):
        return value.encode()
    if isinstance(value, np.generic):
        return value.tobytes()
    if isinstance(value, bytes):
        return value
    if isinstance(value, float) or (isinstance(value, int) and ptx_type in ("f32", "f64")):
        formats = {2: "<e", 4: "<f", 8: "<d"}
        if size_bytes not in formats:
            raise LaunchError(f"{name} is a float; its parameter has {size_bytes} bytes")
        return struct.pack(formats[size_bytes], value)
    if isinstance(value, int):
        low, high = -(1 << 8 * size_bytes - 1) if size_bytes else 0, 1 << 8 * size_bytes
        if not low <= value < high:
            raise LaunchError(f"{name} is {value}, which does not fit {size_bytes} bytes")
        return (value % high).to_bytes(size_bytes, "little")
    raise LaunchError(
        f"{name} is a {type(value).__name__}; arrays, Tma, numbers, bytes and tuples are allowed"
    )
