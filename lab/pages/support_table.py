"""The emulator's support table in docs/emulator.md, and the measurements it rests on.

`python -m lab.pages.support_table` reads from the result files which opcodes gave the results of an
H200 and which were executed in kernels of other authors, writes them into the package, where `fa4
emulate --support` finds them, and the table between its markers in that page.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from fa4.emulator.tools import support
from fa4.emulator.tools.support import Support, support_table
from lab import ROOT
from lab.pages import DOCS
from lab.records import read_record

PAGE = DOCS / "emulator.md"
PACKAGED = ROOT / "fa4" / "emulator" / "tools" / support.CONFIRMED
# Who confirms -> result files, each with the key of its opcodes: a list, or lists by the name of
# the instruction.
EVIDENCE = {
    "H200": (
        ("emulator_hopper", "confirmed"),
        ("wgmma_sums", "confirmed"),
    ),
    "foreign kernels": (("emulator_foreign", "opcodes"),),
}
BEGIN = "<!-- support table: written by python -m lab.pages.support_table -->"
END = "<!-- end of the support table -->"


def measured(folder: Path | None = None) -> dict[str, list[str]]:
    """Who confirms -> opcodes, sorted, as the result files have them."""
    found = {}
    for who, records in EVIDENCE.items():
        opcodes: set[str] = set()
        for name, key in records:
            listed = read_record(name, folder)[key]
            opcodes.update(*listed.values() if isinstance(listed, dict) else [listed])
        found[who] = sorted(opcodes)
    return found


def markdown(table: Iterable[Support]) -> Iterator[str]:
    """The lines of the table as it stands in the documentation."""
    yield "| instruction | forms | PTX ISA | confirmed by |"
    yield "|---|---|---|---|"
    for row in table:
        forms = row.forms.replace("|", "\\|")
        yield f"| `{row.instruction}` | `{forms}` | {row.sections} | {row.basis} |"


def section_of(text: str) -> str:
    """The table in a document, without its markers. Raises ValueError if they are not there."""
    before, begin, rest = text.partition(BEGIN)
    inside, end, _ = rest.partition(END)
    if not (begin and end and before):
        raise ValueError(f"the document lacks {BEGIN!r} or {END!r}")
    return inside.strip()


def fill(text: str) -> str:
    """A document with the present table between its markers. Raises ValueError without them."""
    section_of(text)
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    table = "\n".join(markdown(support_table()))
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def main() -> None:
    """Writes the package's file, then the page's table."""
    PACKAGED.write_text(json.dumps(measured(), indent=0) + "\n", encoding="utf-8")
    PAGE.write_text(fill(PAGE.read_text("utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
