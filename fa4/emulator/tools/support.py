"""The support table: which PTX instructions the emulator executes, and what each rests on.

Every row of the instruction table carries its forms and its section of the PTX ISA manual. Beyond
the manual, a row can be confirmed by two kinds of measurement, read from `benchmarks/results`:
opcodes whose results equal those of an H200 bit for bit or within the stated bound, and opcodes
executed in kernels of other authors whose outputs are right.

`python -m fa4.emulator.tools.support docs/emulator.md` writes the table between the markers there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fa4.emulator.isa.instruction_set import TABLE
from fa4.emulator.translate.table import Operation

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
# (who confirms, file, key of its list of opcodes)
EVIDENCE = (
    ("H200", "emulator_hopper.json", "confirmed"),
    ("foreign kernels", "emulator_foreign.json", "opcodes"),
)
MANUAL_ONLY, REFUSED = "manual only", "refused"
BEGIN = "<!-- support table: written by python -m fa4.emulator.tools.support docs/emulator.md -->"
END = "<!-- end of the support table -->"


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


def support_table(results: Path = RESULTS) -> list[Support]:
    """All instructions by name, rows of one name and section together."""
    evidence = {who: _opcodes(results / file, key) for who, file, key in EVIDENCE}
    owner = {opcode: _row_of(opcode) for opcodes in evidence.values() for opcode in opcodes}
    groups: dict[tuple[str, str], list[Operation]] = {}
    for name in sorted(TABLE):
        for row in TABLE[name]:
            groups.setdefault((name, row.section), []).append(row)
    table = []
    for (name, section), rows in groups.items():
        forms = "; ".join(dict.fromkeys(row.forms for row in rows if row.forms))
        confirmed = {
            who: tuple(o for o in opcodes if any(owner[o] is row for row in rows))
            for who, opcodes in evidence.items()
        }
        table.append(Support(name, _with_name(name, forms), section, confirmed))
    return table


def _opcodes(path: Path, key: str) -> list[str]:
    """Opcodes that a result file lists, sorted; none if it was not measured yet.

    The file has them as a list, or as lists by the name of the instruction.
    """
    if not path.exists():
        return []
    listed = json.loads(path.read_text(encoding="utf-8"))[key]
    if isinstance(listed, dict):
        listed = [opcode for opcodes in listed.values() for opcode in opcodes]
    return sorted(set(listed))


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


def markdown(table: Iterable[Support]) -> Iterator[str]:
    """The lines of the table as it stands in the documentation."""
    yield "| instruction | forms | PTX ISA | confirmed by |"
    yield "|---|---|---|---|"
    for row in table:
        forms = row.forms.replace("|", "\\|")
        yield f"| `{row.instruction}` | `{forms}` | {row.sections} | {row.basis} |"


def describe_support() -> dict[str, Any]:
    """The table as plain data."""
    table = support_table()
    rows = [asdict(row) | {"basis": row.basis} for row in table]
    return {"counts": counts(table), "instructions": rows}


def counts(table: Iterable[Support]) -> dict[str, int]:
    """How many rows are confirmed by each kind of evidence, by the manual only, and refused."""
    found = {who: 0 for who, _, _ in EVIDENCE} | {MANUAL_ONLY: 0, REFUSED: 0}
    for row in table:
        kinds = [who for who, opcodes in row.confirmed.items() if opcodes]
        for kind in [REFUSED] if row.refused else kinds or [MANUAL_ONLY]:
            found[kind] += 1
    return found


def section_of(text: str) -> str:
    """The table in a document, without its markers. Raises ValueError if they are not there."""
    before, begin, rest = text.partition(BEGIN)
    inside, end, _ = rest.partition(END)
    if not (begin and end and before):
        raise ValueError(f"the document lacks {BEGIN!r} or {END!r}")
    return inside.strip()


def replace_section(text: str, table: str) -> str:
    """A document with another table between its markers. Raises ValueError without them."""
    section_of(text)
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def main(paths: Iterable[str]) -> None:
    """Writes the present table into each of these documents."""
    table = "\n".join(markdown(support_table()))
    for path in map(Path, paths):
        path.write_text(replace_section(path.read_text("utf-8"), table), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
