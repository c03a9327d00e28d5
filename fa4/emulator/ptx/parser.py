"""Reads PTX text into the syntax tree of syntax.py (PTX ISA 4, 5 and 11)."""

from __future__ import annotations

import re

from fa4.emulator.errors import PtxError
from fa4.emulator.ptx.body import Body
from fa4.emulator.ptx.declarations import SPACES, read_parameters, read_variables
from fa4.emulator.ptx.lexer import Cursor, label_positions
from fa4.emulator.ptx.names import Names
from fa4.emulator.ptx.syntax import Kernel, Module, Variable

OLDEST_VERSION = (8, 7)
NEWEST_VERSION = (9, 5)

# How many numbers a directive takes at least and at most; what is left out of three is 1.
_DIRECTIVES = {
    ".reqntid": (1, 3),
    ".maxntid": (1, 3),
    ".reqnctapercluster": (1, 3),
    ".minnctapersm": (1, 1),
    ".maxnctapersm": (1, 1),
    ".maxnreg": (1, 1),
    ".maxclusterrank": (1, 1),
    ".explicitcluster": (0, 0),
    ".blocksareclusters": (0, 0),
    ".noreturn": (0, 0),
}
_LINKING = frozenset({".visible", ".extern", ".weak", ".common"})


def parse(text: str) -> Module:
    """The syntax tree of a PTX module of version 8.7 to 9.5, for any target.

    Names are resolved: every register, symbol and label is declared, and unique in its kernel.
    An instruction's text has its spaces normalised and no semicolon. Opcodes are not checked.
    PtxError, with the line, if the text is malformed, incomplete or uses what is not supported.
    """
    parser = _ModuleParser(text)
    try:
        return parser.read()
    except RecursionError:
        raise PtxError("braces or parentheses nested too deeply", parser.line) from None


class _ModuleParser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._cursor = Cursor(text)
        self._label_positions = label_positions(self._cursor.tokens)
        self._names = Names()
        self._files: dict[int, str] = {}
        self._variables: list[Variable] = []
        self._kernels: dict[str, Kernel] = {}
        self._functions: dict[str, Kernel] = {}

    @property
    def line(self) -> int:
        """The line that is being read."""
        return self._cursor.line

    def read(self) -> Module:
        cursor = self._cursor
        version = self._read_version()
        target = self._read_target()
        address_size = self._read_address_size()
        self._read_files()
        while cursor.token:
            self._read_statement()
        return Module(
            version,
            target,
            address_size,
            self._kernels,
            self._functions,
            tuple(self._variables),
            self._files,
            self._text,
        )

    def _read_version(self) -> tuple[int, int]:
        cursor = self._cursor
        cursor.expect(".version")
        line, written = cursor.line, cursor.take()
        match = re.fullmatch(r"(\d{1,3})\.(\d{1,3})", written)
        if match is None:
            raise PtxError(f"expected a version such as 8.8, found {written!r}", line)
        version = (int(match[1]), int(match[2]))
        if not OLDEST_VERSION <= version <= NEWEST_VERSION:
            raise PtxError(f".version {written} is not supported: allowed are 8.7 to 9.5", line)
        return version

    def _read_target(self) -> str:
        cursor = self._cursor
        cursor.statement = cursor.index
        cursor.expect(".target")
        target = cursor.take_name("a target such as sm_100a")
        while cursor.accept(","):
            cursor.take_name("a target option")
        return target

    def _read_address_size(self) -> int:
        """64. Without the directive it would be 32 (PTX ISA 11.1.3), which no such chip has."""
        cursor = self._cursor
        line = cursor.line
        size = cursor.take_count("64") if cursor.accept(".address_size") else 32
        if size != 64:
            text = f".address_size {size} is not supported: write .address_size 64 behind .target"
            raise PtxError(text, line)
        return size

    def _read_files(self) -> None:
        """All `.file` directives: they may come after the instructions that refer to them."""
        cursor = self._cursor
        start = cursor.index
        for index, token in enumerate(cursor.tokens):
            if token == ".file":
                cursor.index = cursor.statement = index + 1
                number = cursor.take_count("the index of a file")
                self._files[number] = cursor.take_string()
        cursor.index = start

    def _read_statement(self) -> None:
        cursor = self._cursor
        cursor.statement = cursor.index
        token = cursor.token
        if token == ".file":
            cursor.index += 3
            while cursor.accept(","):  # time of change and size
                cursor.take_count("a number")
        elif token == ".section":
            self._skip_section()
        elif token == ".pragma":
            cursor.skip_past(";")
        else:
            linking = cursor.take() if token in _LINKING else ""
            if cursor.token in (".entry", ".func"):
                self._read_function(is_entry=cursor.take() == ".entry")
            elif cursor.token in SPACES - {".param"}:
                self._variables += read_variables(cursor, self._names, linking == ".extern")
            else:
                cursor.fail("a kernel, a function, a variable or a section")

    def _skip_section(self) -> None:
        cursor = self._cursor
        cursor.opened.append(("the section", cursor.line))
        cursor.skip_past("{")
        cursor.skip_past("}")
        cursor.opened.pop()

    def _read_function(self, is_entry: bool) -> None:
        """A kernel or function from its results on, with its body or the ";" of a declaration."""
        cursor = self._cursor
        names = Names(self._names)
        results = read_parameters(cursor, names) if cursor.accept("(") else ()
        line = cursor.line
        name = cursor.take_name("the name of a kernel or function")
        known = self._kernels if is_entry else self._functions
        if name not in known:
            self._names.declare_symbol(name, line)
            names.declare_symbol(name, line)
        names.open_scope()
        cursor.opened.append((f"{'kernel' if is_entry else 'function'} {name}", line))
        parameters = read_parameters(cursor, names) if cursor.accept("(") else ()
        directives = self._read_directives()
        has_body = not cursor.accept(";")
        body = Body(cursor, names, self._label_positions, self._files)
        if has_body:
            if name in known and known[name].has_body:
                raise PtxError(f"{name} has a body already", line)
            body.read()
        cursor.opened.pop()
        if has_body or name not in known:
            known[name] = Kernel(
                name=name,
                parameters=parameters,
                variables=tuple(body.variables),
                registers=body.registers,
                instructions=tuple(body.instructions),
                labels=body.labels,
                directives=directives,
                branch_targets=body.branch_targets,
                results=results,
                is_entry=is_entry,
                has_body=has_body,
            )

    def _read_directives(self) -> dict[str, tuple[int, ...]]:
        """The performance directives between a header and its body."""
        cursor = self._cursor
        directives: dict[str, tuple[int, ...]] = {}
        while cursor.token[:1] == ".":
            if cursor.accept(".pragma"):
                cursor.skip_past(";")
                continue
            if cursor.token not in _DIRECTIVES:
                cursor.fail("a performance directive (" + ", ".join(_DIRECTIVES) + ") or '{'")
            name = cursor.take()
            least, most = _DIRECTIVES[name]
            numbers = [cursor.take_count("a number")] if least else []
            while len(numbers) < most and cursor.accept(","):
                numbers.append(cursor.take_count("a number"))
            numbers += [1] * (most - len(numbers))
            directives[name[1:]] = tuple(numbers)
        return directives
