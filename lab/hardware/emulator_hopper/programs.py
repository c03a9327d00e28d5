"""Programs of the suite: PTX text, arrays, launch shape, and which results are compared how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lab.hardware.driver import Geometry, Gpu
from lab.hardware.emulator_hopper.values import UNSIGNED

Array = np.ndarray[Any, np.dtype[Any]]
Triple = tuple[int, int, int]

HEADER = """.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
"""
REGISTERS = """
  .reg .pred %p<32>;
  .reg .b16 %h<64>;
  .reg .b32 %r<128>;
  .reg .b64 %rd<64>;
  .reg .b128 %q<8>;
"""
THREADS = 256
LETTERS = {16: "%h", 32: "%r", 64: "%rd"}
FIRST_SOURCE, TARGET, SCRATCH = 20, 40, 50  # numbers of the registers of an elementwise program


def bits_of(kind: str) -> int:
    """Width of a PTX type."""
    return 16 if kind == "bf16" else int(kind[1:])


@dataclass(frozen=True)
class Closeness:
    """How far a result may be from the emulator's: either is enough. NaNs are equal."""

    ulp: int = 0
    absolute: float = 0.0


@dataclass(frozen=True)
class Result:
    """Values that one form of an instruction writes.

    form: the instruction as PTX spells it. array: index of the array; start, count: in elements of
    `kind`. kind: "b8" to "b64", compared bit for bit, or a floating-point type with `closeness`.
    """

    form: str
    array: int
    start: int
    count: int
    kind: str = "b32"
    closeness: Closeness | None = None

    def of(self, arrays: Sequence[Array]) -> Array:
        """The values, as bit patterns."""
        whole = arrays[self.array].reshape(-1).view(np.uint8).view(UNSIGNED[bits_of(self.kind)])
        return whole[self.start : self.start + self.count]


@dataclass(frozen=True)
class TensorMapAt:
    """A 128-byte parameter: a tensor map whose address is that of an array plus an offset."""

    raw: bytes
    array: int
    offset_bytes: int = 0


@dataclass(frozen=True)
class Program:
    """One kernel and its launch.

    arrays: buffers before the launch; the kernel's first parameters are their addresses. maps: the
    parameters after them. smem_bytes: dynamic shared memory.
    """

    name: str
    family: str
    text: str
    arrays: tuple[Array, ...]
    results: tuple[Result, ...]
    grid: Triple = (1, 1, 1)
    block: Triple = (32, 1, 1)
    cluster: Triple = (1, 1, 1)
    smem_bytes: int = 0
    maps: tuple[TensorMapAt, ...] = ()


def parameters(program: Program, addresses: Sequence[int]) -> list[bytes]:
    """The kernel's parameters, for arrays at these addresses."""
    values = [address.to_bytes(8, "little") for address in addresses]
    for tensor_map in program.maps:
        address = addresses[tensor_map.array] + tensor_map.offset_bytes
        values.append(address.to_bytes(8, "little") + tensor_map.raw[8:])
    return values


def run_program(
    gpu: Gpu, program: Program, image: bytes, limit_s: float, unwritten: Sequence[int] = ()
) -> list[Array]:
    """The arrays after the launch. unwritten: those whose memory nothing is written to before.
    Raises CudaError; TimeoutError after `limit_s` seconds, and the process must then end."""
    kernel = gpu.load(image, "kernel", program.smem_bytes)
    addresses = [
        gpu.allocate(array.nbytes) if index in unwritten else gpu.upload(array)
        for index, array in enumerate(program.arrays)
    ]
    geometry = Geometry(program.grid, program.block, program.smem_bytes, program.cluster)
    gpu.launch(kernel, geometry, parameters(program, addresses))
    gpu.wait(limit_s)
    found = []
    for array, address in zip(program.arrays, addresses, strict=True):
        found.append(gpu.read(address, array.nbytes).view(array.dtype).reshape(array.shape))
        gpu.free(address)
    return found


@dataclass(frozen=True)
class Form:
    """One instruction of an elementwise program.

    opcode: as PTX spells it. width: bits of the result. text: of the instructions, with {d} for the
    result, {a} {b} {c} {e} for the sources, {s} {t} for 32-bit scratch registers, {op} for the
    opcode; empty: the instruction with its sources in order. label: the opcode unless given.
    """

    opcode: str
    width: int = 32
    text: str = ""
    closeness: Closeness | None = None
    kind: str = ""
    label: str = ""


def module_text(body: str, pointers: int, maps: int = 0, declarations: str = "") -> str:
    """A module with one kernel around `body`: addresses pointer0, ... (the first nine in %rd1 to
    %rd9) and tensor maps map0, ... as parameters. `smem` is the dynamic shared memory."""
    parameters = [f".param .b64 pointer{k}" for k in range(pointers)]
    parameters += [f".param .align 64 .b8 map{k}[128]" for k in range(maps)]
    loads = "".join(f"  ld.param.b64 %rd{k + 1}, [pointer{k}];\n" for k in range(min(pointers, 9)))
    listed = ",\n  ".join(parameters)
    return (
        f"{HEADER}.visible .entry kernel(\n  {listed})\n{{{REGISTERS}{declarations}\n"
        f"{loads}{body}\n  ret;\n}}\n"
    )


def register(width: int, number: int) -> str:
    """The name of a register."""
    return f"{LETTERS[max(width, 16)]}{number}"


def load(width: int, number: int, pointer: int, index: str = "%r4", byte_offset: int = 0) -> str:
    """Element `index` of array `pointer` into register `number`."""
    suffix = f"+{byte_offset}" if byte_offset else ""
    return (
        f"  mul.wide.u32 %rd60, {index}, {width // 8};\n  add.u64 %rd60, %rd{pointer}, %rd60;\n"
        f"  ld.global.b{width} {register(width, number)}, [%rd60{suffix}];\n"
    )


def elementwise(
    name: str, family: str, sources: Sequence[Array], forms: Sequence[Form], prologue: str = ""
) -> Program:
    """Each thread applies every form to one element of each source.

    %r4 is the number of the thread; prologue: instructions between the loads and the forms.
    """
    count = len(sources[0])
    body = "  mov.u32 %r1, %ctaid.x;\n  mov.u32 %r2, %ntid.x;\n  mov.u32 %r3, %tid.x;\n"
    body += "  mad.lo.u32 %r4, %r1, %r2, %r3;\n"
    names = {"s": f"%r{SCRATCH}", "t": f"%r{SCRATCH + 1}"}
    arrays: list[Array] = []
    for letter, source in zip("abce", sources, strict=False):
        width = 8 * source.itemsize
        if not any(source is known for known in arrays):
            arrays.append(source)
        pointer = next(k for k, known in enumerate(arrays, 1) if known is source)
        number = FIRST_SOURCE + len(names)
        body += load(width, number, pointer)
        names[letter] = register(width, number)
    body += prologue
    results, at = [], 0
    listed = ", ".join(f"{{{letter}}}" for letter in "abce"[: len(sources)])
    for form in forms:
        target = register(form.width, TARGET)
        text = form.text or f"{{op}} {{d}}, {listed};"
        size = max(form.width, 16) // 8
        at = -(-at // (256 * size)) * 256 * size
        body += f"  {text.format(op=form.opcode, d=target, **names)}\n"
        body += f"  mul.wide.u32 %rd60, %r4, {size};\n  add.u64 %rd60, %rd{len(arrays) + 1}, %rd60;"
        body += f"\n  st.global.b{8 * size} [%rd60+{at}], {target};\n"
        kind = form.kind or f"b{8 * size}"
        label, each = form.label or form.opcode, bits_of(kind) // 8
        results.append(
            Result(label, len(arrays), at // each, count * size // each, kind, form.closeness)
        )
        at += count * size
    arrays.append(np.zeros(-(-at // 8), np.uint64))
    text = module_text(body, len(arrays))
    blocks = (count // THREADS, 1, 1)
    return Program(name, family, text, tuple(arrays), tuple(results), blocks, (THREADS, 1, 1))


def predicate(opcode: str, operands: str = "{a}, {b}") -> Form:
    """A form whose result is a predicate: 1 or 0."""
    text = f"{{op}} %p1, {operands};\n  selp.b32 {{d}}, 1, 0, %p1;"
    return Form(opcode, 32, text)


@dataclass
class Family:
    """A list of programs under construction."""

    name: str
    programs: list[Program] = field(default_factory=list)

    def add(self, name: str, sources: Sequence[Array], forms: Sequence[Form], **more: Any) -> None:
        """Appends an elementwise program."""
        self.programs.append(elementwise(f"{self.name}-{name}", self.name, sources, forms, **more))
