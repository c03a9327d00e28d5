"""Control flow. These rows only say which kind of step the program builder makes of them."""

from __future__ import annotations

from fa4.emulator.ptx.syntax import PtxInstruction
from fa4.emulator.translate.program import BRANCH, EXIT, INDEXED
from fa4.emulator.translate.table import TableRows

ROWS = TableRows()


@ROWS.register("control", "bra", "9.7.12.2", "bra{.uni} target")
def branch(instruction: PtxInstruction) -> int:
    """A jump, or a conditional branch if guarded."""
    return BRANCH


@ROWS.register("control", "brx.idx", "9.7.12.3", "brx.idx{.uni} index, targets")
def indexed_branch(instruction: PtxInstruction) -> int:
    """A branch through a table of labels."""
    return INDEXED


@ROWS.register("control", "exit", "9.7.12.6", "exit")
@ROWS.register("control", "ret", "9.7.12.5", "ret{.uni}, of the kernel itself")
def leave(instruction: PtxInstruction) -> int:
    """The end of a thread."""
    return EXIT
