"""Cuts PTX text into tokens, and reads them one after another with errors that name the line."""

from __future__ import annotations

import re
from typing import NoReturn

from fa4.emulator.errors import PtxError

_COMMENT_OR_STRING = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/|/\*', re.DOTALL)

_TOKEN = re.compile(
    r"""
    [%$_A-Za-z][\w$]*(?:(?:\.|::)[\w$]+)*            # a name, an opcode, %tid.x
  | \.[A-Za-z_][\w$]*(?:::[\w$]+)*                   # a directive or a type
  | 0[xXfFdDbB][0-9a-fA-F]+U?                        # 0x1F, 0b101, 0f3F800000
  | (?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?U?       # 12, 017, 1.5e-3
  | "[^"]*"
  | << | >>
  | \S                                               # punctuation, or what the parser refuses
    """,
    re.VERBOSE | re.ASCII,
)

_NAME = re.compile(r"[%$_A-Za-z][\w$]*", re.ASCII)


def is_name(token: str) -> bool:
    """Whether a token is a name, an opcode or a special register, not a number or punctuation."""
    return token[:1].isalpha() or token[:1] in ("_", "$") or (token[:1] == "%" and token != "%")


class Cursor:
    """A position in the tokens of one PTX text.

    tokens ends with two "" (the end of the text), so that the parser may look one token ahead;
    lines holds the 1-based line of each token. statement is the index of the first token of the
    statement being read, `opened` what encloses it: (description, line), outermost first. Both
    serve error messages.
    """

    def __init__(self, text: str) -> None:
        self.tokens: list[str] = []
        self.lines: list[int] = []
        self.index = 0
        self.statement = 0
        self.opened: list[tuple[str, int]] = []
        number = 1
        for number, line in enumerate(_without_comments(text).split("\n"), 1):
            found = _TOKEN.findall(line)
            self.tokens += found
            self.lines += [number] * len(found)
        self.tokens += ["", ""]
        self.lines += [number, number]

    @property
    def token(self) -> str:
        """The next token, "" at the end of the text."""
        return self.tokens[self.index]

    @property
    def line(self) -> int:
        """The line of the next token."""
        return self.lines[self.index]

    def take(self) -> str:
        """The next token; moves past it."""
        token = self.tokens[self.index]
        if token:
            self.index += 1
        return token

    def accept(self, token: str) -> bool:
        """Moves past the next token if it is `token`; says whether it was."""
        if self.tokens[self.index] != token:
            return False
        self.index += 1
        return True

    def expect(self, token: str) -> None:
        """Moves past `token`. PtxError if something else comes next."""
        if not self.accept(token):
            self.fail(f"'{token}'")

    def take_name(self, what: str) -> str:
        """A name without dots; `what` describes it in the PtxError raised if there is none."""
        if not _NAME.fullmatch(self.token):
            self.fail(what)
        return self.take()

    def take_count(self, what: str) -> int:
        """An unsigned integer without operators. PtxError if there is none."""
        try:
            value = int(self.token, 0)
        except ValueError:
            self.fail(what)
        self.index += 1
        return value

    def take_string(self) -> str:
        """The text between two double quotes. PtxError if there is none."""
        if not self.token.startswith('"'):
            self.fail("a string")
        return self.take()[1:-1]

    def skip_past(self, token: str) -> None:
        """Moves past the next `token`, whatever comes before it."""
        while self.token != token:
            if not self.token:
                self.fail(f"'{token}'")
            self.index += 1
        self.index += 1

    def fail(self, expected: str) -> NoReturn:
        """Raises PtxError: `expected` is missing at the next token."""
        start = min(self.statement, self.index)
        if self.token:
            message = f"expected {expected}, found {self.token!r}"
            if self.lines[start] < self.line:
                message += f" (in the statement that begins on line {self.lines[start]})"
            raise PtxError(message, self.line)
        opened = list(self.opened)
        if self.tokens[start]:
            words = " ".join(self.tokens[start : min(self.index, start + 8)])
            opened.append((f"the statement '{words}'", self.lines[start]))
        inside = " in ".join(f"{what} of line {line}" for what, line in reversed(opened))
        message = f"the text ends where {expected} was expected"
        raise PtxError(message + (f", inside {inside}" if inside else ""), self.line)


def label_positions(tokens: list[str]) -> dict[int, list[int]]:
    """Where labels stand: index of a "{" -> indices of the label names directly inside its braces.

    A scope's labels must be known when it opens: a branch may come before its label, and must not
    bind to a label of the same name in an enclosing scope.
    """
    positions: dict[int, list[int]] = {}
    enclosing = [-1]
    for index, token in enumerate(tokens):
        if token == "{":
            enclosing.append(index)
        elif token == "}":
            if len(enclosing) > 1:
                enclosing.pop()
        elif token == ":":
            positions.setdefault(enclosing[-1], []).append(index - 1)
    return positions


def _without_comments(text: str) -> str:
    """`text` with every comment replaced by as many line breaks as it has."""

    def replace(match: re.Match[str]) -> str:
        found = match[0]
        if found[0] == '"':
            return found
        if found == "/*":
            raise PtxError("comment without '*/'", text.count("\n", 0, match.start()) + 1)
        return " " + "\n" * found.count("\n")

    return _COMMENT_OR_STRING.sub(replace, text)
