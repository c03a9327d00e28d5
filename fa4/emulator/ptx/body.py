"""Reads the body of a kernel or function: scopes, declarations, labels, instructions."""

from __future__ import annotations

from fa4.emulator.errors import PtxError
from fa4.emulator.ptx.declarations import SPACES, read_registers, read_variables
from fa4.emulator.ptx.lexer import Cursor, is_name
from fa4.emulator.ptx.names import Names
from fa4.emulator.ptx.operands import read_label, read_operands, read_register
from fa4.emulator.ptx.syntax import Operand, PtxInstruction, Register, Variable


class Body:
    """What stands between the braces of a kernel; the fields are those of syntax.Kernel."""

    def __init__(
        self,
        cursor: Cursor,
        names: Names,
        label_positions: dict[int, list[int]],
        files: dict[int, str],
    ) -> None:
        self.variables: list[Variable] = []
        self.registers: dict[str, str] = {}
        self.instructions: list[PtxInstruction] = []
        self.labels: dict[str, int] = {}
        self.branch_targets: dict[str, tuple[str, ...]] = {}
        self._cursor = cursor
        self._names = names
        self._label_positions = label_positions
        self._files = files
        self._location: tuple[str, int] | None = None
        self._shared = 0  # instructions on the line of the one before

    def read(self) -> None:
        """Reads from the opening brace to past the closing one. PtxError if it cannot."""
        cursor = self._cursor
        depth = len(cursor.opened)
        self._open_scope()
        while len(cursor.opened) > depth:
            cursor.statement = cursor.index
            token = cursor.token
            if is_name(token) and cursor.tokens[cursor.index + 1] == ":":
                self._read_label()
            elif is_name(token) or token == "@":
                self._read_instruction()
            elif token[:1] == ".":
                self._read_directive()
            elif token == "{":
                self._open_scope()
            elif token == "}":
                cursor.index += 1
                cursor.opened.pop()
                self._names.close_scope()
            else:
                cursor.fail("an instruction, a directive, a label or '}'")

    def _open_scope(self) -> None:
        cursor = self._cursor
        positions = self._label_positions.get(cursor.index, [])
        cursor.opened.append(("the '{'", cursor.line))
        cursor.expect("{")
        self._names.open_scope()
        for position in positions:
            self._names.declare_symbol(cursor.tokens[position], cursor.lines[position])

    def _read_label(self) -> None:
        cursor = self._cursor
        name = read_label(cursor, self._names)
        cursor.expect(":")
        if cursor.accept(".branchtargets"):
            targets = [read_label(cursor, self._names)]
            while cursor.accept(","):
                targets.append(read_label(cursor, self._names))
            cursor.expect(";")
            self.branch_targets[name] = tuple(targets)
        elif cursor.token in (".callprototype", ".calltargets"):
            cursor.skip_past(";")  # about indirect calls, which name the function in a register
        else:
            self.labels[name] = len(self.instructions)

    def _read_instruction(self) -> None:
        cursor = self._cursor
        tokens = cursor.tokens
        start = cursor.index
        line = cursor.lines[start]
        guard = self._read_guard() if tokens[start] == "@" else None
        after_guard = cursor.index
        opcode = cursor.take()
        if not is_name(opcode):
            cursor.index = after_guard
            cursor.fail("an opcode")
        while cursor.token[:1] == "." and cursor.token[1:2].isalpha():
            opcode += cursor.take()  # written with spaces, as in "add .s32"
        parts = tuple(opcode.split("."))
        operands: tuple[Operand, ...] = ()
        first = cursor.index
        if not cursor.accept(";"):
            operands = read_operands(cursor, self._names, ";", calls=parts[0] == "call")
        text = f"{opcode} " + "".join(tokens[first : cursor.index - 1]).replace(",", ", ")
        if guard is not None:
            text = "".join(tokens[start:after_guard]) + " " + text
        shared_line = 0
        if self.instructions and self.instructions[-1].written_line == line:
            self._shared += 1
            line, shared_line = cursor.lines[-1] + self._shared, line
        self.instructions.append(
            PtxInstruction(
                opcode, parts, operands, guard, line, text.rstrip(), self._location, shared_line
            )
        )

    def _read_guard(self) -> Register:
        cursor = self._cursor
        cursor.expect("@")
        line = cursor.line
        guard = read_register(cursor, self._names)
        if self.registers.get(guard.name) != "pred":
            raise PtxError(f"the guard {guard.name} is no predicate register", line)
        return guard

    def _read_directive(self) -> None:
        cursor = self._cursor
        token = cursor.token
        if token == ".loc":
            self._read_location()
        elif token == ".reg":
            cursor.index += 1
            self.registers.update(read_registers(cursor, self._names))
        elif token in SPACES:
            self.variables += read_variables(cursor, self._names)
        elif token == ".extern" and cursor.tokens[cursor.index + 1] in SPACES:
            cursor.index += 1
            self.variables += read_variables(cursor, self._names, extern=True)
        elif token == ".pragma":
            cursor.skip_past(";")
        else:
            what, line = cursor.opened[-1]
            cursor.fail(f"a directive that a body may have ({what} of line {line} is still open)")

    def _read_location(self) -> None:
        """`.loc file line column`, with where the function is inlined: that part is dropped."""
        cursor = self._cursor
        cursor.expect(".loc")
        file = self._files.get(cursor.take_count("the index of a file"))
        line = cursor.take_count("a line of the source")
        cursor.take_count("a column of the source")
        self._location = (file, line) if file is not None else None
        if cursor.accept(","):
            cursor.expect("function_name")
            cursor.take_name("the label of a function name")
            if cursor.accept("+"):
                cursor.take_count("an offset in bytes")
            cursor.expect(",")
            cursor.expect("inlined_at")
            for what in ("the index of a file", "a line of the source", "a column of the source"):
                cursor.take_count(what)
