"""Runs programs of the suite on the emulator."""

from __future__ import annotations

import numpy as np

from fa4.emulator.execute import run
from fa4.emulator.isa.instruction_set import TABLE
from fa4.emulator.machine.launch_record import Allocation, Launch
from fa4.emulator.machine.options import Options
from fa4.emulator.ptx.parser import parse
from fa4.emulator.ptx.syntax import PtxInstruction
from fa4.emulator.translate.table import find
from lab.hardware.emulator_hopper.programs import Array, Program, parameters

# Families whose programs use memory in ways that the emulator's checks can fault.
CHECKED = ("exchanges", "control", "accesses", "atomics", "barriers", "clusters", "tensors")


def aligned_copy(array: Array) -> Array:
    """A copy at a multiple of 256 bytes, as the driver allocates; around it is no other array."""
    raw = np.zeros(3 * array.nbytes + 256, np.uint8)
    start = array.nbytes + -(raw.ctypes.data + array.nbytes) % 256
    copy = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def emulate(program: Program, checks: bool = True) -> list[Array]:
    """The arrays after the launch. Raises EmulationFailed for findings."""
    arrays = [aligned_copy(array) for array in program.arrays]
    addresses = [array.ctypes.data for array in arrays]
    launch = Launch(
        "kernel",
        program.text,
        program.grid,
        program.block,
        program.cluster,
        program.smem_bytes,
        tuple(parameters(program, addresses)),
    )
    allocations = [
        Allocation(f"array{k}", array.ctypes.data, array.nbytes, True, array)
        for k, array in enumerate(arrays)
    ]
    run([launch], allocations, Options(checks=checks))
    return arrays


def opcodes_of(program: Program) -> dict[str, list[str]]:
    """Names in the emulator's table -> spellings, of the kernel's instructions."""
    (kernel,) = parse(program.text).kernels.values()
    found: dict[str, set[str]] = {}
    for item in kernel.instructions:
        if isinstance(item, PtxInstruction):
            found.setdefault(find(item, TABLE).name, set()).add(item.opcode)
    return {name: sorted(spellings) for name, spellings in sorted(found.items())}
