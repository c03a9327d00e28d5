"""Control flow. These rows only say which kind of step the program builder makes of them."""

from __future__ import annotations

from fa4.emulator.ptx.syntax import PtxInstruction
from fa4.emulator.translate.calls import calls_function
from fa4.emulator.translate.program import BRANCH, CALL, EXIT, INDEXED, RETURN
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


@ROWS.register(
    "control",
    "call",
    "9.7.12.4",
    "call{.uni} {(results),} function {, (arguments)}, by name or address; recursion",
    accepts=calls_function,
)
def call(instruction: PtxInstruction) -> int:
    """A call of a device function of the module."""
    return CALL


@ROWS.register("control", "ret", "9.7.12.5", "ret{.uni}")
def leave_function(instruction: PtxInstruction) -> int:
    """The end of a function, or of a thread."""
    return RETURN


@ROWS.register("control", "exit", "9.7.12.6", "exit")
def leave(instruction: PtxInstruction) -> int:
    """The end of a thread."""
    return EXIT
