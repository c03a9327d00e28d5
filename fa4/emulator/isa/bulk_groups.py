"""The groups of bulk copies, which a thread commits and waits for: PTX ISA 9.7.9.25.6."""

from __future__ import annotations

from fa4.emulator.isa.copy_groups import commit_handler, wait_handler
from fa4.emulator.machine.copies import CopyGroups
from fa4.emulator.machine.state import Warp
from fa4.emulator.ptx.syntax import Integer, PtxInstruction
from fa4.emulator.translate.context import Handler, KernelContext
from fa4.emulator.translate.table import TableRows, Unsupported, modifiers

ROWS = TableRows()


def _groups(warp: Warp) -> CopyGroups:
    return warp.bulk_copies


@ROWS.machine("cp.async.bulk.commit_group", "9.7.9.25.6.1", "cp.async.bulk.commit_group")
def bind_bulk_commit(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Closes a group of each active lane."""
    return commit_handler(_groups)


@ROWS.machine("cp.async.bulk.wait_group", "9.7.9.25.6.2", "cp.async.bulk.wait_group{.read} N")
def bind_bulk_wait(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Waits for all but the N latest groups of each lane; .read: until they have read."""
    (read,) = modifiers(instruction, "cp.async.bulk.wait_group", ("read",))
    count = instruction.operands[0]
    if not isinstance(count, Integer) or count.value < 0:
        raise Unsupported(f"{instruction.opcode} {count}")
    what = f"{instruction.opcode} {count.value}"
    return wait_handler(_groups, count.value, bool(read), what)
