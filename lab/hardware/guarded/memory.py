"""Allocations with unmapped memory on both sides, on a GPU and on the host.

A GPU's ordinary allocator rounds up and packs, so that an access beside a tensor lands in another
one and nobody notices. `GuardedMemory` gives each allocation an address range of its own, three
times as large as it needs and mapped in the middle third only; in turn the allocation begins where
the mapped part begins, and ends where it ends. What touches the rest ends the process (the host) or
breaks the context (a GPU: an illegal memory access).

`install_in_torch` lets every CUDA tensor of torch be made so: a library's outputs and workspaces,
too. It must be called before torch looks at a GPU.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass, field
from typing import Any, Protocol

from lab.hardware.driver import CudaLibrary

ALIGN_BYTES = 16  # what TMA, and torch's vector loads, ask of an address


class Driver(Protocol):
    """Address ranges, and memory to put into them."""

    granule_bytes: int

    def reserve(self, size_bytes: int) -> int:
        """The address of a range in which nothing is mapped."""

    def map(self, address: int, size_bytes: int) -> None:
        """Puts memory into a part of a range."""

    def release(self, address: int, size_bytes: int, mapped: int, mapped_bytes: int) -> None:
        """Gives back a range and the memory in it."""


@dataclass
class GuardedMemory:
    """Makes and frees allocations. live: of each address, its range and what is mapped of it."""

    driver: Driver
    at_end: bool = False
    live: dict[int, tuple[int, int, int, int]] = field(default_factory=dict)

    def allocate(self, size_bytes: int) -> int:
        """The address of `size_bytes` whose first, or in turn last, byte borders on nothing.

        The end is exact where the size is a multiple of 16 bytes.
        """
        granule = self.driver.granule_bytes
        mapped_bytes = -(-max(size_bytes, 1) // granule) * granule
        start = self.driver.reserve(3 * mapped_bytes)
        mapped = start + mapped_bytes
        self.driver.map(mapped, mapped_bytes)
        address = mapped
        if self.at_end:
            address += (mapped_bytes - size_bytes) // ALIGN_BYTES * ALIGN_BYTES
        self.at_end = not self.at_end
        self.live[address] = start, 3 * mapped_bytes, mapped, mapped_bytes
        return address

    def free(self, address: int) -> None:
        """Unmaps an allocation. Raises KeyError for an address that is none."""
        self.driver.release(*self.live.pop(address))


class HostDriver:
    """Memory of this process: pages that may be touched, and pages that may not."""

    granule_bytes = mmap.PAGESIZE

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        self._library.mmap.restype = ctypes.c_void_p
        self._library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3,
                                       ctypes.c_long]  # fmt: skip
        self._library.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def reserve(self, size_bytes: int) -> int:
        """Pages without any access. Raises MemoryError."""
        anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = self._library.mmap(None, size_bytes, 0, anonymous, -1, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise MemoryError(f"no address range of {size_bytes} bytes")
        return int(address)

    def map(self, address: int, size_bytes: int) -> None:
        """Lets pages be read and written. Raises MemoryError."""
        if self._library.mprotect(address, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE):
            raise MemoryError(f"no memory of {size_bytes} bytes")

    def release(self, address: int, size_bytes: int, mapped: int, mapped_bytes: int) -> None:
        """Unmaps the range."""
        self._library.munmap(address, size_bytes)


class _Properties(ctypes.Structure):
    """CUmemAllocationProp: pinned memory of a device."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("type", ctypes.c_int), ("device", ctypes.c_int), ("flags", ctypes.c_int)]


class CudaDriver(CudaLibrary):
    """Memory of a GPU, by the driver's virtual memory functions. A context must be current."""

    def __init__(self, device: int = 0, library: str = "libcuda.so.1") -> None:
        """Loads the driver. Raises OSError or CudaError without a GPU."""
        super().__init__(library)
        pinned, of_a_device, read_and_write = 1, 1, 3
        self._properties = _Properties(pinned, 0, of_a_device, device)
        self._access = _Access(of_a_device, device, read_and_write)
        self._handles: dict[int, ctypes.c_uint64] = {}
        size = ctypes.c_size_t()
        self.call(
            "cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(self._properties), 0
        )
        self.granule_bytes = size.value

    def reserve(self, size_bytes: int) -> int:
        """An address range. Raises CudaError."""
        address = ctypes.c_uint64()
        self.call("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(size_bytes),
                   ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0))  # fmt: skip
        return address.value

    def map(self, address: int, size_bytes: int) -> None:
        """Makes memory and maps it. Raises CudaError."""
        handle, size, place = ctypes.c_uint64(), ctypes.c_size_t(size_bytes), _address(address)
        self.call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties),
                   ctypes.c_uint64(0))  # fmt: skip
        self._handles[address] = handle
        self.call("cuMemMap", place, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        self.call("cuMemSetAccess", place, size, ctypes.byref(self._access), ctypes.c_size_t(1))

    def release(self, address: int, size_bytes: int, mapped: int, mapped_bytes: int) -> None:
        """Waits for all kernels, as one may still use the memory; then unmaps. Raises CudaError."""
        self.call("cuCtxSynchronize")
        self.call("cuMemUnmap", _address(mapped), ctypes.c_size_t(mapped_bytes))
        self.call("cuMemRelease", self._handles.pop(mapped))
        self.call("cuMemAddressFree", _address(address), ctypes.c_size_t(size_bytes))


def _address(value: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(value)


def install_in_torch(memory: GuardedMemory) -> None:
    """Lets torch take its CUDA memory from `memory`, each tensor's storage on its own.

    Raises RuntimeError if torch has begun to use a GPU. CUDA graphs cannot be captured then.
    """
    import torch

    def allocate(size_bytes: int, device: int, stream: int | None) -> int:
        return memory.allocate(size_bytes) if size_bytes else 0

    def free(address: int | None, size_bytes: int, device: int, stream: int | None) -> None:
        if address:
            memory.free(address)

    number, size, place = ctypes.c_int, ctypes.c_ssize_t, ctypes.c_void_p
    callbacks = (
        ctypes.CFUNCTYPE(place, size, number, place)(allocate),
        ctypes.CFUNCTYPE(None, place, size, number, place)(free),
    )
    _KEPT.append(callbacks)  # torch calls them as long as it lives
    addresses = (ctypes.cast(callback, place).value for callback in callbacks)
    allocator = torch.cuda.memory._CUDAAllocator(torch._C._cuda_customAllocator(*addresses))
    torch.cuda.memory.change_current_allocator(allocator)


_KEPT: list[Any] = []
