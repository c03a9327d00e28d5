"""The bytes of a Triton kernel's parameters, from the arguments of its launch.

A signature names the type of each argument: "*fp32" a pointer, "i32" a number, "constexpr" nothing
that is passed, "tensordesc<fp16[64, 32]>" a host descriptor, a tuple several. Descriptors become a
tensor map with sizes and strides behind it, or those alone where the compiler keeps no map.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fa4.emulator.errors import ArgumentError, LaunchError
from fa4.emulator.host.arguments import is_array
from fa4.emulator.tma.descriptor import TensorMap

# Numbers of tensor-map types as Triton's compiler writes them (those of PTX's tensormap.replace).
_MAP_TYPES = (
    "u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f32_ftz", "f64", "bf16", "tf32",
    "tf32_ftz", "b4x16", "b4x16_p64", "b6x16_p32",
)  # fmt: skip
_SWIZZLES = (0, 32, 64, 128)
_FLOATS = {"fp16": "<e", "fp32": "<f", "f32": "<f", "fp64": "<d"}


@dataclass
class PackedArguments:
    """parameters: bytes of each parameter, in order. memory: named tensors behind pointers.

    maps: what tensor maps there still are descriptors for.
    """

    address_of: Callable[[Any], int]
    maps: Iterator[Mapping[str, Any]]
    parameters: list[bytes] = field(default_factory=list)
    memory: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, kind: Any, value: Any) -> None:
        """Adds an argument of a type. Raises ArgumentError if it is no value of it."""
        if isinstance(kind, tuple):
            for index, (inner, part) in enumerate(zip(kind, value, strict=True)):
                self.add(f"{name}[{index}]", inner, part)
        elif kind.startswith("tensordesc"):
            self._add_descriptor(name, value)
        elif kind.startswith("*"):
            self._add_pointer(name, value)
        elif kind != "constexpr":
            self.parameters.append(_pack_number(name, kind, value))

    def _add_pointer(self, name: str, value: Any) -> None:
        if value is None or isinstance(value, int):
            address = value or 0
        elif hasattr(value, "data_ptr"):
            tensor = getattr(value, "base", value)
            offset = 0
            if not is_array(tensor):
                tensor, offset = _viewed(name, value)
            self.memory[name] = tensor
            address = self._seen_at(name, tensor) + offset
        else:
            raise ArgumentError(name, f"{name} is a {type(value).__name__}, not a tensor")
        self.parameters.append(address.to_bytes(8, "little"))

    def _seen_at(self, name: str, tensor: Any) -> int:
        try:
            return self.address_of(tensor)
        except LaunchError as error:
            raise ArgumentError(name, f"{name}: {error}") from error

    def _add_descriptor(self, name: str, descriptor: Any) -> None:
        described = next(self.maps, None)
        sizes = [("i32", size) for size in descriptor.shape]
        steps = [("i64", stride) for stride in descriptor.strides]
        if described is None:
            self._add_pointer(name, descriptor.base)
            flags = [descriptor.padding == "nan"]
            if hasattr(descriptor, "round_f32_to_tf32"):
                flags.append(descriptor.round_f32_to_tf32)
            wide = [("i64", size) for size in descriptor.shape]
            numbers = [*wide, *steps, *(("i1", int(flag)) for flag in flags), *sizes, *steps]
        else:
            self.memory[name] = descriptor.base
            address = self._seen_at(name, descriptor.base)
            self.parameters.append(_encode_map(name, descriptor, described, address))
            numbers = [*sizes, *steps]
        self.parameters += [_pack_number(name, kind, int(value)) for kind, value in numbers]


def _viewed(name: str, value: Any) -> tuple[Any, int]:
    """The tensor that an object holds which Triton takes for one as it has `data_ptr()`, and how
    far behind its beginning it points."""
    held = [part for part in getattr(value, "__dict__", {}).values() if is_array(part)]
    if len(held) != 1 or not hasattr(held[0], "data_ptr"):
        kind = type(value).__name__
        raise ArgumentError(name, f"{name} is a {kind}, which holds no tensor to be found")
    return held[0], int(value.data_ptr()) - int(held[0].data_ptr())


def pack(
    signature: Sequence[tuple[str, Any]],
    values: Sequence[Any],
    maps: Sequence[Mapping[str, Any]],
    address_of: Callable[[Any], int],
) -> PackedArguments:
    """The parameters of a launch: (name, type) and value of each argument.

    maps: the compiler's description of each descriptor's tensor map, in order. address_of: where
    kernels see a tensor. Raises ArgumentError for values that a type does not have.
    """
    packed = PackedArguments(address_of, iter(maps))
    for (name, kind), value in zip(signature, values, strict=True):
        packed.add(name, kind, value)
    return packed


def _pack_number(name: str, kind: str, value: Any) -> bytes:
    if kind == "bf16":
        return struct.pack("<f", float(value))[2:]
    if kind in _FLOATS:
        return struct.pack(_FLOATS[kind], float(value))
    if kind[:1] not in "iu" or not kind[1:].isdigit():
        raise ArgumentError(name, f"{name} has the type {kind}, which the emulator does not pass")
    size_bytes = max(1, int(kind[1:]) // 8)
    return (int(value) % (1 << 8 * size_bytes)).to_bytes(size_bytes, "little")


def _encode_map(name: str, descriptor: Any, described: Mapping[str, Any], address: int) -> bytes:
    """The tensor map of a descriptor: dimensions innermost first, box as the compiler chose it."""
    if described.get("is_im2col"):
        raise ArgumentError(name, f"{name}: tensor maps of im2col are not emulated")
    element = _MAP_TYPES[described["elem_type"]]
    if getattr(descriptor, "round_f32_to_tf32", False):
        element = "tf32"
    item_bytes = described["elem_size"]
    rank = len(descriptor.shape)
    dims = [int(size) for size in descriptor.shape[::-1]]
    if described.get("fp4_padded"):  # its elements are bytes of two
        element, dims[0] = "b4x16_p64", 2 * dims[0]
    return TensorMap(
        address=address,
        element=element,
        dims=tuple(dims),
        strides_bytes=tuple(int(step) * item_bytes for step in descriptor.strides[-2::-1]),
        box=tuple(described["block_size"][::-1]),
        element_strides=(1,) * rank,
        swizzle=_SWIZZLES[described["swizzle"]],
        fill_nan=descriptor.padding == "nan",
    ).encode()
