"""The arguments of a host function: which memory they give to the kernels, and whether they can."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import numbers
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fa4.emulator.errors import LaunchError
from fa4.emulator.host.addresses import no_shift
from fa4.emulator.host.dlpack import is_torch_tensor
from fa4.emulator.machine.launch_record import Allocation

_ALLOWED = (
    "NumPy arrays, CPU torch tensors, CuTe tensors and pointers over CPU memory, numbers, streams, "
    "None, and tuples, lists or dataclasses of these are"
)
# Where nobody has imported cutlass, no argument is one of its objects.
_CUTE_RUNTIME = "cutlass.cute.runtime"
# Larger arrays of 64-bit integers are not searched for pointers.
_MAX_TABLE_BYTES = 64 * 1024
# Attribute of a CuTe tensor that `emulate` made: the shift of its memory.
SHIFT = "_fa4_shift"
# So many notes of tensors are made before those of dead ones are dropped.
_MANY_NOTES = 1024


def leaves(name: str, value: object) -> Iterator[tuple[str, Any]]:
    """The parts of an argument that are not containers, each with a name such as "pages[1]"."""
    if isinstance(value, (tuple, list)):
        for index, part in enumerate(value):
            yield from leaves(f"{name}[{index}]", part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(f"{name}.{field.name}", getattr(value, field.name))
    else:
        yield name, value


def replace_leaves(name: str, value: Any, change: Callable[[str, Any], Any]) -> Any:
    """Rebuilds tuples and lists with change(name, leaf) in place of every leaf."""
    if isinstance(value, (tuple, list)):
        parts = [replace_leaves(f"{name}[{i}]", part, change) for i, part in enumerate(value)]
        if hasattr(value, "_fields"):
            return type(value)(*parts)
        return type(value)(parts)
    return change(name, value)


def aside() -> contextlib.AbstractContextManager[Any]:
    """Inside, tensors are what they are: where the emulator itself looks at them."""
    torch = sys.modules.get("torch")
    return contextlib.nullcontext() if torch is None else torch._C.DisableTorchFunction()


def is_array(value: object) -> bool:
    """True for the tensors and arrays that a program passes itself (not CuTe's wrappers)."""
    return isinstance(value, np.ndarray) or is_torch_tensor(value)


def array_allocation(name: str, value: Any, shift: int = 0) -> Allocation | None:
    """The memory behind an array or tensor: from its first to its last element; None if empty.

    Gaps between the elements belong to it, the rest of the storage does not. shift: that of the
    allocation. Raises LaunchError for memory that is not on the CPU and for negative strides.
    """
    found = _array_span(name, value)
    return found and dataclasses.replace(found, shift=shift)


def _array_span(name: str, value: Any) -> Allocation | None:
    if isinstance(value, np.ndarray):
        _check_numpy(name, value)
        address, writable = value.ctypes.data, value.flags.writeable
        bits = 8 * value.itemsize
        return _span(name, value, address, value.shape, value.strides, 8, bits, writable)
    if is_torch_tensor(value):
        if value.device.type != "cpu":
            raise LaunchError(f"{name} is a tensor on {value.device}; only CPU tensors are allowed")
        if str(value.layout) != "torch.strided":
            raise LaunchError(f"{name} has layout {value.layout}; only torch.strided is allowed")
        bits = 8 * value.element_size()
        return _span(name, value, value.data_ptr(), value.shape, value.stride(), bits, bits)
    raise LaunchError(f"{name} is a {type(value).__name__}; {_ALLOWED} allowed")


def cute_allocation(name: str, tensor: Any) -> Allocation | None:
    """The same of a CuTe runtime tensor (`from_dlpack`)."""
    tensor.load_dltensor()
    # The wrapper's own type: `element_type` may have been set to a narrower one since.
    bits = tensor._dltensor_wrapper.dtype.width
    shift = getattr(tensor, SHIFT, 0)
    address = tensor.data_ptr - shift
    found = _span(name, tensor, address, tensor.shape, tensor.stride, bits, bits)
    return found and dataclasses.replace(found, shift=shift)


def _span(
    name: str,
    owner: Any,
    address: int,
    shape: Sequence[int],
    strides: Sequence[int],
    stride_unit_bits: int,
    element_bits: int,
    writable: bool = True,
) -> Allocation | None:
    if any(stride < 0 for stride in strides):
        raise LaunchError(
            f"{name} has strides {tuple(strides)}; negative ones are not allowed: pass a copy"
        )
    if 0 in shape:
        return None
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    size_bytes = (last * stride_unit_bits + element_bits + 7) // 8
    return Allocation(name, int(address), int(size_bytes), writable, owner)


def _check_numpy(name: str, array: np.ndarray) -> None:
    if array.dtype.hasobject or array.dtype.names:
        raise LaunchError(f"{name} is an array of {array.dtype}; only numbers are allowed")
    if not array.dtype.isnative:
        raise LaunchError(
            f"{name} has byte order {array.dtype.str}; only the native one is allowed"
        )


def collect(
    arguments: Mapping[str, Any],
    always: Iterable[Allocation] = (),
    find: Callable[[int], Allocation | None] = lambda address: None,
    strict: bool = True,
    shift_of: Callable[[Any], int] = no_shift,
) -> list[Allocation]:
    """The memory that kernels called with these named arguments may touch.

    always: allocations to add in any case. find: called with an address that lies in none of
    them, of a pointer argument or in an array of 64-bit integers (which may hold pointers).
    strict: types that no kernel can take raise LaunchError; otherwise they are taken for
    compile-time constants. shift_of: the shift of an array's allocation.
    """
    found: list[Allocation] = []
    pointers: list[tuple[str, int]] = []
    for name, value in arguments.items():
        for part, leaf in leaves(name, value):
            if (address := _pointer_address(leaf)) is not None:
                pointers.append((part, address))
            elif (allocation := _allocation(part, leaf, strict, shift_of)) is not None:
                found.append(allocation)
    found += always
    for part, address in pointers:
        if address and not any(allocation.holds(address) for allocation in found):
            found.append(_behind(part, address, find))
    for table in [allocation for allocation in found if _may_hold_pointers(allocation)]:
        for address in _words(table):
            if address and not any(allocation.holds(address) for allocation in found):
                target = find(address)
                found += [dataclasses.replace(target, name=f"*{table.name}")] if target else []
    return found


def _may_hold_pointers(allocation: Allocation) -> bool:
    kind = str(getattr(allocation.owner, "dtype", ""))
    return kind.endswith(("int64", "Int64")) and allocation.size_bytes <= _MAX_TABLE_BYTES


def _words(allocation: Allocation) -> list[int]:
    words = (ctypes.c_uint64 * (allocation.size_bytes // 8)).from_address(allocation.address)
    return sorted(set(words))


class TensorBook:
    """Tensors that a session's program wrapped or took the address of.

    They are the memory that its pointers may point into. shift_of: the shifts of arrays.
    """

    def __init__(self, shift_of: Callable[[Any], int] = no_shift) -> None:
        self.shift_of = shift_of
        self._notes: dict[tuple[int, int], tuple[weakref.ref[Any], weakref.ref[Any]]] = {}

    def note(self, tensor: Any, source: Any) -> None:
        """Remembers an array and the CuTe tensor made of it (or itself), keeping neither alive."""
        if len(self._notes) > _MANY_NOTES:
            self._forget_dead()
        key = (id(tensor), id(source))
        self._notes.pop(key, None)
        self._notes[key] = (weakref.ref(tensor), weakref.ref(source))

    def find(self, address: int) -> Allocation | None:
        """The memory of the newest living tensor that holds the address."""
        self._forget_dead()
        for tensor, source in reversed(list(self._notes.values())):
            array = source()
            if array is not None:
                allocation = array_allocation("", array, self.shift_of(array))
            else:
                allocation = cute_allocation("", tensor())
            if allocation is not None and allocation.holds(address):
                return allocation
        return None

    def address_of(self, array: Any) -> int:
        """Where kernels see the first element of an array or tensor."""
        found = array_allocation("an argument", array, self.shift_of(array))
        return 0 if found is None else found.address + found.shift

    def seen_at(self, address: int) -> int:
        """Where kernels see what is at an address of this process; other addresses as they are."""
        found = self.find(address)
        if found is None or not 0 <= address - found.address < found.size_bytes:
            return address
        return address + found.shift

    def _forget_dead(self) -> None:
        living = {
            key: note
            for key, note in self._notes.items()
            if any(reference() is not None for reference in note)
        }
        self._notes = living


def _pointer_address(value: Any) -> int | None:
    runtime = sys.modules.get(_CUTE_RUNTIME)
    return int(value._pointer) if runtime and type(value) is runtime._Pointer else None


def _allocation(
    name: str, value: Any, strict: bool, shift_of: Callable[[Any], int]
) -> Allocation | None:
    runtime = sys.modules.get(_CUTE_RUNTIME)
    if runtime and type(value) is runtime._Tensor:
        return cute_allocation(name, value)
    if is_array(value):
        return array_allocation(name, value, shift_of(value))
    if strict and not _is_plain(value):
        raise LaunchError(f"{name} is a {type(value).__name__}; {_ALLOWED} allowed")
    return None


def _behind(name: str, address: int, find: Callable[[int], Allocation | None]) -> Allocation:
    allocation = find(address)
    if allocation is None:
        raise LaunchError(
            f"{name} points to {address:#x}, in memory that no argument holds: "
            "name the tensor there with memory=[...]"
        )
    return dataclasses.replace(allocation, name=name)


def _is_plain(value: Any) -> bool:
    """Scalars, streams, and objects that know how to pass themselves to CuTe-DSL."""
    if value is None or isinstance(value, (bool, numbers.Number, np.generic)):
        return True
    protocols = ("__c_pointers__", "__get_mlir_types__", "__cuda_stream__", "__tvm_ffi_object__")
    if any(hasattr(value, protocol) for protocol in protocols):
        return True
    if type(value).__module__.startswith(("cuda.", "ctypes", "_ctypes")):
        return True
    typing = sys.modules.get("cutlass.base_dsl.typing")
    return typing is not None and isinstance(value, typing.Numeric)
