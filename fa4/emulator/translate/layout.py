"""Where things lie: registers in a warp's register file, variables in the address spaces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fa4.emulator.errors import LaunchError, PtxError
from fa4.emulator.ptx.syntax import Kernel, Module, Variable
from fa4.emulator.translate.lanes import width_of
from fa4.emulator.translate.link import Routine

# Generic addresses of the windows. Real host addresses have 47 bits, so that these never clash.
SHARED_WINDOW = 0x7E00_0000_0000_0000
PARAMETER_WINDOW = 0x7D00_0000_0000_0000
MODULE_WINDOW = 0x7C00_0000_0000_0000
LOCAL_WINDOW = 0x7B00_0000_0000_0000
FUNCTION_WINDOW = 0x7A00_0000_0000_0000  # no memory: an address of a function is only called
FUNCTION_BYTES = 16

# Local memory of a thread for recursion and calls of addresses, beyond one frame of each function.
# The driver's default is 1 KiB (CUDA: cudaLimitStackSize), which programs that recurse raise.
STACK_BYTES = 1 << 14
FRAME_ALIGNMENT_BYTES = 16
FRAME = "%frame"  # the hidden register with a thread's distance of its frame from the kernel's

# In these spaces the low 32 bits of an address are enough, as in code that keeps it in 32 bits:
# an address below WINDOW_BYTES counts from the start of the window.
WINDOW_BYTES = 1 << 32
WINDOWS = {
    "local": LOCAL_WINDOW,
    "const": MODULE_WINDOW,
    **dict.fromkeys(("param", "param::entry", "param::func"), PARAMETER_WINDOW),
}

# The system keeps the first KiB of a CTA's shared memory (CUDA programming guide, "Shared
# Memory": 1 KB per block reserved), so that address 0 is never valid.
SHARED_BASE = 1024
# Largest shared memory of a CTA: 227 KiB (CUDA programming guide, compute capability 9.0, 10.0).
MAX_SHARED_BYTES = 227 * 1024
RANK_SHIFT = 24  # a shared::cluster address holds the CTA's rank from this bit on

_AXES = "xyz"
SPECIALS_32 = (
    *(f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in _AXES),
    *(f"%{name}.{axis}" for name in ("clusterid", "nclusterid") for axis in _AXES),
    *(f"%{name}.{axis}" for name in ("cluster_ctaid", "cluster_nctaid") for axis in _AXES),
    "%cluster_ctarank",
    "%cluster_nctarank",
    "%laneid",
    "%warpid",
    "%nwarpid",
    "%smid",
    "%nsmid",
    *(f"%lanemask_{relation}" for relation in ("eq", "le", "lt", "ge", "gt")),
    "%dynamic_smem_size",
    "%total_smem_size",
    "%aggr_smem_size",
)
SPECIALS_64 = ("%gridid", "%current_graph_exec", FRAME)


@dataclass(frozen=True)
class RegisterFile:
    """offsets: name -> (byte offset, bits); size_bytes of one warp's register file."""

    offsets: dict[str, tuple[int, int]]
    size_bytes: int


def lay_out_registers(kernel: Kernel) -> RegisterFile:
    """Predicates take 4 bytes (a mask), others 32 lanes of their width, 64-byte aligned."""
    widths = {name: width_of(kind) for name, kind in kernel.registers.items()}
    widths |= dict.fromkeys(SPECIALS_32, 32) | dict.fromkeys(SPECIALS_64, 64)
    widths |= {"%cc": 1, "%is_explicit_cluster": 1}
    offsets: dict[str, tuple[int, int]] = {}
    position = 0
    for name, bits in widths.items():
        if bits == 1:
            offsets[name] = (position, 1)
            position += 4
    position = _align(position, 128)
    for name, bits in widths.items():
        if bits > 1:
            bits = max(bits, 16)
            offsets[name] = (position, bits)
            position += max(4 * bits, 64)
    return RegisterFile(offsets, _align(position, 128))


@dataclass(frozen=True)
class Variables:
    """Addresses of a kernel's variables, and the sizes of its static parts.

    addresses: name -> address as `mov` of the symbol gives it, without a CTA rank. shared:
    the names that lie in shared memory. framed: those in the frame of a function, which the
    thread's `FRAME` is added to. parameters: the offset of each parameter. frame_bytes: of each
    routine, in their order.
    """

    addresses: dict[str, int]
    shared: frozenset[str]
    framed: frozenset[str]
    frame_bytes: tuple[int, ...]
    parameter_offsets: tuple[int, ...]
    parameter_bytes: int
    static_shared_bytes: int
    dynamic_shared_address: int
    local_bytes: int
    module_image: bytes


def lay_out_variables(module: Module, kernel: Kernel, routines: tuple[Routine, ...]) -> Variables:
    """Places parameters, shared, local and module variables. Raises PtxError for other spaces."""
    addresses: dict[str, int] = {}
    offsets, parameter_bytes = _place(kernel.parameters, 0)
    addresses |= {name: PARAMETER_WINDOW + offset for name, offset in offsets.items()}

    every = (*module.variables, *kernel.variables)
    by_space: dict[str, list[Variable]] = {}
    for variable in every:
        by_space.setdefault(variable.space, []).append(variable)
    unknown = set(by_space) - {"shared", "global", "const"}
    if unknown:
        raise PtxError(f"variables in space .{sorted(unknown)[0]} are not supported")

    shared = by_space.get("shared", [])
    static = [v for v in shared if v.size_bytes is not None]
    dynamic = [v for v in shared if v.size_bytes is None]
    placed, end = _place(static, SHARED_BASE)
    addresses |= placed
    # Hardware aligns the dynamic part like its most aligned declaration; 1024 is the largest
    # alignment that a TMA or MMA swizzle pattern needs.
    alignment = max([v.align_bytes for v in dynamic], default=16)
    dynamic_address = _align(end, alignment)
    addresses |= {v.name: dynamic_address for v in dynamic}

    frame_bytes = []
    for number, routine in enumerate(routines):
        placed, end = _place(routine.frame, 0)
        frame_bytes.append(_align(end, FRAME_ALIGNMENT_BYTES))
        addresses |= {name: LOCAL_WINDOW + offset for name, offset in placed.items()}
        if number:
            addresses[routine.name] = FUNCTION_WINDOW + FUNCTION_BYTES * number
    functions = routines[1:]
    constants = (*by_space.get("global", ()), *by_space.get("const", ()))
    placed, module_bytes = _place([v for v in constants if v.size_bytes is not None], 0)
    addresses |= {name: MODULE_WINDOW + offset for name, offset in placed.items()}
    image = bytearray(module_bytes)
    for variable in constants:
        if variable.initial is not None:
            start = placed[variable.name]
            image[start : start + len(variable.initial)] = variable.initial
            for at, name in variable.addresses:
                address = addresses.get(name, 0)  # 0: of what the module only declares
                image[start + at : start + at + 8] = address.to_bytes(8, "little")
    return Variables(
        addresses,
        frozenset(v.name for v in shared),
        frozenset(v.name for f in functions for v in f.frame),
        tuple(frame_bytes),
        tuple(offsets[p.name] for p in kernel.parameters),
        parameter_bytes,
        dynamic_address - SHARED_BASE,
        dynamic_address,
        sum(frame_bytes) + (STACK_BYTES if functions else 0),
        bytes(image),
    )


def check_shared_bytes(kernel: str, static_bytes: int, dynamic_bytes: int) -> None:
    """Raises LaunchError if a CTA needs more shared memory than the chip has."""
    total = static_bytes + dynamic_bytes
    if total > MAX_SHARED_BYTES:
        raise LaunchError(
            f"{kernel} needs {total} bytes of shared memory ({static_bytes} static, "
            f"{dynamic_bytes} dynamic); a CTA has at most {MAX_SHARED_BYTES}"
        )


def _align(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def _place(variables: Iterable[Variable], start: int) -> tuple[dict[str, int], int]:
    placed = {}
    for variable in variables:
        start = _align(start, variable.align_bytes)
        placed[variable.name] = start
        start += variable.size_bytes or 0
    return placed, start
