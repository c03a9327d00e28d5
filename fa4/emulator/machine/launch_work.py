"""What a launch has done in all: products, exponentials and bytes, as a profiler counts them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from fa4.emulator.machine.state import Grid
from fa4.emulator.warp_lanes import LANES

MMA_SYNC_TILE = 16 * 8  # rows and columns of every mma.sync that there is
# Copies by where the bytes go, by the opcode's last two state spaces.
LOADED, STORED, EXCHANGED = "global_to_shared", "shared_to_global", "between_ctas"


@dataclass
class LaunchWork:
    """One launch.

    products: opcode -> instructions, of a warpgroup (wgmma), a thread (tcgen05.mma) or a warp
    (mma.sync, mma.sp). macs: their multiplications, whether their results are used or not.
    exponentials: values of ex2 that whole warps have computed, with lanes that are switched off.
    copied_bytes: by copies in bulk and of tensors (TMA), by direction, as they appear in shared
    memory: a multicast counts once for each CTA that receives it, what lies outside a tensor counts
    as well.
    """

    kernel: str
    products: Counter[str] = field(default_factory=Counter)
    macs: Counter[str] = field(default_factory=Counter)
    exponentials: int = 0
    copied_bytes: Counter[str] = field(default_factory=Counter)


def work_of(grid: Grid) -> LaunchWork:
    """Of a launch that is over."""
    work = LaunchWork(grid.launch.kernel)
    opcodes = {i.line: i.opcode for step in grid.program.steps for i in step.instructions}
    for line, count in grid.products.items():
        work.products[opcodes[line]] += count
        work.macs[opcodes[line]] += grid.macs[line]
    for line, num_bytes in grid.moved_bytes.items():
        direction = _direction(opcodes[line])
        if direction:
            work.copied_bytes[direction] += num_bytes
    for counts in grid.warp_step_counts.values():
        for step, count in zip(grid.program.steps, counts, strict=True):
            if count:
                for instruction in step.instructions:
                    _add_instruction(work, instruction.parts, instruction.opcode, count)
    return work


def _add_instruction(work: LaunchWork, parts: tuple[str, ...], opcode: str, count: int) -> None:
    if parts[0] == "ex2":
        work.exponentials += LANES * count * (2 if parts[-1].endswith("x2") else 1)
    elif parts[0] == "mma":
        sparse = parts[1] != "sync"  # half of K is there
        depth = int(parts[3 + sparse].rpartition("k")[2]) >> sparse
        work.products[opcode] += count
        work.macs[opcode] += MMA_SYNC_TILE * depth * count


def _direction(opcode: str) -> str:
    """Of a copy, "" of anything else."""
    if not opcode.startswith(("cp.async.bulk", "cp.reduce.async.bulk")):
        return ""
    spaces = [part.partition("::")[0] for part in opcode.split(".")]
    target, source = [space for space in spaces if space in ("shared", "global")][:2]
    if target == source:
        return EXCHANGED
    return LOADED if target == "shared" else STORED
