"""Writes docs/options.md: every option of a call, and which kernels have it.

python -m lab.pages.option_tables
"""

from __future__ import annotations

from collections.abc import Iterable

from fa4.call.options import OPTIONS, Option
from fa4.compiled.support import Feature, columns
from fa4.plan.render import markdown_table
from lab.pages import DOCS
from lab.pages.marked_tables import MarkedTables

PAGE = DOCS / "options.md"


def in_kernels(option: Option, table: Iterable[Feature]) -> str:
    """Does a table of kernels have the option? "-": it is no matter of theirs."""
    row = {row.name: row for row in table}.get(option.support_row)
    return "-" if row is None else "yes" if row.supported else "no"


def render_options() -> str:
    """A row per option."""
    rows = [
        (f"`{option.name}`" + (" (varlen)" if option.varlen else ""), f"`{option.default}`",
         ", ".join(filter(None, (option.kind, option.rule))), option.doc, option.since,
         *(in_kernels(option, table) for table in columns().values()))
        for option in OPTIONS
    ]  # fmt: skip
    return markdown_table(("option", "default", "value", "meaning", "since", *columns()), rows)


TABLES_OF_PAGE = MarkedTables("python -m lab.pages.option_tables", {"options": render_options})

if __name__ == "__main__":
    TABLES_OF_PAGE.write(PAGE)
