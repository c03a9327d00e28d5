"""The support table: which PTX instructions the emulator executes, and what each rests on.

Every row of the instruction table carries its forms and its section of the PTX ISA manual. Beyond
the manual, a row can be confirmed by two kinds of measurement: opcodes whose results equal those of
an H200 bit for bit or within the stated bound, and opcodes executed in kernels of other authors
whose outputs are right. `confirmed.json` lists both; `lab/pages/support_table.py` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

from fa4.emulator.isa.instruction_set import TABLE
from fa4.emulator.translate.table import Operation

CONFIRMED = "confirmed.json"  # beside this file: who confirms -> opcodes
MANUAL_ONLY, REFUSED = "manual only", "refused"


@dataclass(frozen=True)
class Support:
    """One row. forms: with the opcode's name. sections: of the PTX ISA 9.x manual.

    confirmed: who confirms -> the opcodes of this row that they executed.
    """

    instruction: str
    forms: str
    sections: str
    confirmed: dict[str, tuple[str, ...]]

    @property
    def refused(self) -> bool:
        """Known by name only: a kernel that has it is not loaded."""
        return self.forms.startswith(f"{self.instruction} not supported")

    @property
    def basis(self) -> str:
        """What the row rests on, in words."""
        if self.refused:
            return REFUSED
        listed = [f"{who} ({len(opcodes)})" for who, opcodes in self.confirmed.items() if opcodes]
        return ", ".join(listed) or MANUAL_ONLY


def support_table(confirmed: Mapping[str, Sequence[str]] | None = None) -> list[Support]:
    """All instructions by name, rows of one name and section together.

    confirmed: who confirms -> opcodes; by default what comes with the package.
    """
    evidence = confirmed_opcodes() if confirmed is None else confirmed
    owner = {opcode: _row_of(opcode) for opcodes in evidence.values() for opcode in opcodes}
    groups: dict[tuple[str, str], list[Operation]] = {}
    for name in sorted(TABLE):
        for row in TABLE[name]:
            groups.setdefault((name, row.section), []).append(row)
    table = []
    for (name, section), rows in groups.items():
        forms = "; ".join(dict.fromkeys(row.forms for row in rows if row.forms))
        by = {
            who: tuple(o for o in opcodes if any(owner[o] is row for row in rows))
            for who, opcodes in evidence.items()
        }
        table.append(Support(name, _with_name(name, forms), section, by))
    return table


def confirmed_opcodes() -> dict[str, list[str]]:
    """Who confirms -> opcodes, as they come with the package."""
    path = resources.files("fa4.emulator.tools").joinpath(CONFIRMED)
    found: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _row_of(opcode: str) -> Operation | None:
    """The row that executes an opcode, as `isa.table.find` chooses it, operands apart."""
    parts = opcode.split(".")
    for length in range(len(parts), 0, -1):
        for row in TABLE.get(".".join(parts[:length]), ()):
            if not row.types or row.types.intersection(parts[length:]):
                return row
    return None


def _with_name(name: str, forms: str) -> str:
    if forms.startswith(name.split(".")[0]):
        return forms
    return f"{name}{'' if forms.startswith('{') else ' '}{forms}".strip()


def describe_support() -> dict[str, Any]:
    """The table as plain data."""
    table = support_table()
    rows = [asdict(row) | {"basis": row.basis} for row in table]
    return {"counts": counts(table), "instructions": rows}


def counts(table: Iterable[Support]) -> dict[str, int]:
    """How many rows are confirmed by each kind of evidence, by the manual only, and refused."""
    table = list(table)
    found = dict.fromkeys((who for row in table for who in row.confirmed), 0)
    found |= {MANUAL_ONLY: 0, REFUSED: 0}
    for row in table:
        kinds = [who for who, opcodes in row.confirmed.items() if opcodes]
        for kind in [REFUSED] if row.refused else kinds or [MANUAL_ONLY]:
            found[kind] += 1
    return found
