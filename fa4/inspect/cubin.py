"""What a cubin says of its kernels without any tool; its machine code where nvdisasm is installed.

A cubin is an ELF file. NVIDIA does not document the records of its attribute sections (.nv.info);
the few codes read here are those that `cuobjdump -elf` prints the names of.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fa4.emulator.elf import read_sections, read_symbols

# Attribute records: format byte, code byte, then a 16-bit value or the size of what follows.
_SIZED = 4  # EIFMT_SVAL
_REGCOUNT, _FRAME_SIZE, _MIN_STACK_SIZE = 0x2F, 0x11, 0x12  # EIATTR_*: (symbol, value)

_SECONDS = 60
_PACKAGE_FOLDERS = ("nvidia/*/bin", "triton/backends/nvidia/bin")
NO_DISASSEMBLER = (
    "no nvdisasm on PATH, in $CUDA_HOME, in /usr/local/cuda or in a Python package; "
    "install one with `pip install nvidia-cuda-nvdisasm`"
)


@dataclass(frozen=True)
class Resources:
    """Of one kernel. registers: per thread at launch. frame_bytes: local memory of its frame (0: no
    spills). stack_bytes: with everything that it calls. smem_bytes: static shared memory."""

    name: str
    registers: int
    frame_bytes: int
    stack_bytes: int
    smem_bytes: int


class Disassembly(NamedTuple):
    """text: of nvdisasm, None if there is none. problem: why not."""

    text: str | None
    problem: str = ""


def read_resources(cubin: bytes) -> tuple[Resources, ...]:
    """The kernels of a cubin, by name. Raises ValueError if it is not one."""
    try:
        sections, symbols = read_sections(cubin), read_symbols(cubin).names
    except ValueError as error:
        raise ValueError(f"not a cubin: {error}") from None
    values: dict[tuple[int, int], int] = {}
    for section in sections:
        if section.name == ".nv.info":
            data = cubin[section.offset : section.offset + section.size]
            values |= {(code, symbol): value for code, symbol, value in _records(data)}
    kernels = {x.name.removeprefix(".nv.info.") for x in sections if x.name.startswith(".nv.info.")}
    shared = {x.name.removeprefix(".nv.shared."): x.size for x in sections}
    index = {name: number for number, name in enumerate(symbols) if name in kernels}
    return tuple(
        Resources(
            name,
            values.get((_REGCOUNT, index[name]), 0),
            values.get((_FRAME_SIZE, index[name]), 0),
            values.get((_MIN_STACK_SIZE, index[name]), 0),
            shared.get(name, 0),
        )
        for name in sorted(index)
    )


def find_disassembler() -> Path | None:
    """nvdisasm: on PATH, of a CUDA toolkit, or of nvidia-cuda-nvdisasm's or triton's package."""
    on_path = shutil.which("nvdisasm")
    if on_path:
        return Path(on_path)
    homes = [os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")]
    folders = [Path(home) / "bin" for home in (*homes, "/usr/local/cuda") if home]
    for place in sys.path:
        for pattern in _PACKAGE_FOLDERS:
            folders += sorted(Path(place or ".").glob(pattern), reverse=True)
    found = (folder / "nvdisasm" for folder in folders)
    return next((file for file in found if os.access(file, os.X_OK)), None)


def disassemble(cubin: bytes) -> Disassembly:
    """The machine code of a cubin as `nvdisasm -c` prints it."""
    tool = find_disassembler()
    if tool is None:
        return Disassembly(None, NO_DISASSEMBLER)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            done = subprocess.run(
                [str(tool), "-c", file.name],
                capture_output=True, text=True, timeout=_SECONDS, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            return Disassembly(None, f"{tool} failed: {error}")
    if done.returncode:
        return Disassembly(None, f"{tool} refuses the cubin: {done.stderr.strip()[:200]}")
    return Disassembly(done.stdout)


def _records(data: bytes) -> Iterator[tuple[int, int, int]]:
    """(code, symbol, value) of the records that give a number to a symbol."""
    place = 0
    while place + 4 <= len(data):
        kind, code, size = struct.unpack_from("<BBH", data, place)
        place += 4
        if kind == _SIZED:
            if size == 8:
                yield (code, *struct.unpack_from("<II", data, place))
            place += size
