"""Tables of docs/verify.md and docs/verify_json.md: what the suite lists by default, counted
without a call, and the keys of a report.

`python -m lab.pages.verify_tables` writes them between their markers; a test of the pages compares.
"""

from __future__ import annotations

from fa4.testing.coverage import listed_cases, listed_counts
from fa4.testing.levels import outputs_of
from fa4.testing.properties import PROPERTIES
from fa4.testing.schema import FIELDS
from lab.pages import DOCS
from lab.pages.marked_tables import MarkedTables

PAGE = DOCS / "verify.md"
JSON_PAGE = PAGE.with_name("verify_json.md")


def coverage_table() -> str:
    """A row per output: cases listed, pairs of levels with a meaning, the rarest pair's cases."""
    cases = dict.fromkeys(("out", "lse", "dq", "dk", "dv", "dsink"), 0)
    for prop in PROPERTIES:
        for case in listed_cases(prop):
            for output in outputs_of(case, prop.levels):
                cases[output] += 1
    names = {"out": "O", "lse": "LSE", "dq": "dQ", "dk": "dK", "dv": "dV", "dsink": "dsink"}
    rows = ["| output | cases listed | pairs of levels | covered | cases of the rarest pair |",
            "|---|---|---|---|---|"]  # fmt: skip
    for row in listed_counts().coverage():
        covered = row.pairs - len(row.few)
        rows.append(f"| {names[row.output]} | {cases[row.output]:,} | {row.pairs} | {covered} "
                    f"| {row.least} |")  # fmt: skip
    return "\n".join(rows)


def schema_table() -> str:
    """A row per key of a JSON report."""
    rows = [f"| `{name}` | {text} |" for name, text in FIELDS.items()]
    return "\n".join(["| key | |", "|---|---|", *rows])


TABLES = MarkedTables("python -m lab.pages.verify_tables", {"coverage": coverage_table})
JSON_TABLES = MarkedTables("python -m lab.pages.verify_tables", {"schema": schema_table})

if __name__ == "__main__":
    TABLES.write(PAGE)
    JSON_TABLES.write(JSON_PAGE)
