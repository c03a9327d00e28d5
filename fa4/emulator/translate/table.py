"""One table of instructions: name, section of the manual, forms, and the function that does it.

Three kinds of entry:

- `lane` operations compute registers from registers. Their function emits LLVM vector code over
  the 32 lanes of a warp (see `fa4.emulator.translate.lanes`).
- `machine` operations touch memory, barriers or other units. Their function binds an instruction
  to a Python handler once, when the kernel is loaded (see `fa4.emulator.machine`).
- `control` operations are branches and exits, which the program builder knows.

An instruction is looked up by its longest dotted prefix that has an entry which accepts its type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias, TypeVar

from fa4.emulator.ptx.syntax import PtxInstruction

Function = TypeVar("Function", bound=Callable[..., Any])


class Unsupported(Exception):
    """Raised while an instruction is bound or emitted: the reason it cannot be executed."""


@dataclass(frozen=True)
class Operation:
    """One row of the table.

    name: dotted opcode prefix, "add" or "cp.async.bulk.tensor". types: the entry serves only
    instructions with one of these among their parts (empty: all). section: of the PTX ISA 9.x
    manual. forms: the accepted modifiers, for the support table. converges: all named lanes of
    the warp take part (.sync), so diverged lanes wait for each other first. accepts: if given, the
    entry serves only instructions for which it is true. watch: of a `lane` operation, binds what
    looks at the operands before it executes, or gives None where nothing needs to be looked at.
    holds: registers in the vectors among its operands stay in use when it has been issued.
    """

    name: str
    kind: str
    section: str
    forms: str
    function: Callable[..., Any]
    types: frozenset[str] = frozenset()
    converges: bool = False
    accepts: Callable[[PtxInstruction], bool] | None = None
    watch: Callable[[PtxInstruction, Any], Callable[[Any, int], None] | None] | None = None
    holds: bool = False


class TableRows(list[Operation]):
    """The rows of one module, in order; its functions are added by decorators."""

    def register(
        self, kind: str, name: str, section: str, forms: str, types: Iterable[str] = (), **more: Any
    ) -> Callable[[Function], Function]:
        """Decorator: adds a row for the decorated function. more: of `Operation`."""

        def add(function: Function) -> Function:
            self.append(Operation(name, kind, section, forms, function, frozenset(types), **more))
            return function

        return add

    def lane(
        self, name: str, section: str, forms: str, **keywords: Any
    ) -> Callable[[Function], Function]:
        """Adds a row for `emit(builder, instruction)`."""
        return self.register("lane", name, section, forms, **keywords)

    def machine(
        self, name: str, section: str, forms: str, **keywords: Any
    ) -> Callable[[Function], Function]:
        """Adds a row for `bind(instruction, context) -> handler(warp, mask)`."""
        return self.register("machine", name, section, forms, **keywords)


Table: TypeAlias = dict[str, list[Operation]]  # by name


def build_table(parts: Iterable[TableRows]) -> Table:
    """The rows of all parts by name; those of one name are tried in this order."""
    table: Table = {}
    for row in chain.from_iterable(parts):
        table.setdefault(row.name, []).append(row)
    return table


def find(instruction: PtxInstruction, table: Table) -> Operation:
    """The row of a table that executes `instruction`. Raises Unsupported if there is none."""
    parts = instruction.parts
    for length in range(len(parts), 0, -1):
        for row in table.get(".".join(parts[:length]), ()):
            if row.types and not row.types.intersection(parts[length:]):
                continue
            if row.accepts is None or row.accepts(instruction):
                return row
    raise Unsupported("no such instruction in the table")


def modifiers(instruction: PtxInstruction, name: str, *groups: Iterable[str]) -> list[str]:
    """Splits the parts after `name` into one modifier for each group, "" where absent.

    Each group lists the modifiers of which at most one may be present; the order of the groups
    does not matter, every part must belong to one. Raises Unsupported naming the part that does
    not fit.
    """
    found = [""] * len(groups)
    members = [frozenset(group) for group in groups]
    for part in instruction.parts[name.count(".") + 1 :]:
        for index, group in enumerate(members):
            if part in group and not found[index]:
                found[index] = part
                break
        else:
            raise Unsupported(f"modifier .{part}")
    return found
