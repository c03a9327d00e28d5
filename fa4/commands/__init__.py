"""One file per subcommand of `fa4`, each holding a function of the same name; and how they print.

A command imports what is heavy inside its function, so that `fa4 --help` stays fast. It returns
None, raises `typer.Exit(1)` where its answer is "no", and raises ValueError (or a kin listed in
`fa4.cli`) where its input is bad.
"""

from __future__ import annotations

import json
import math
import os
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

SCHEMA_VERSION = 1  # of every `--json` report; raised when a key changes its meaning or goes away


def emit(
    report: Mapping[str, Any], as_json: bool, table: Callable[[Mapping[str, Any]], Any]
) -> None:
    """Print a report: as JSON with its schema version, or as what `table(report)` returns.

    `table` gives a string or a rich renderable (or a tuple of them), for people to read.
    """
    if as_json:
        document = {"schema_version": SCHEMA_VERSION, **plain(report)}
        print(json.dumps(document, indent=2, allow_nan=False))
        return
    from rich.console import Console

    console = Console(highlight=False)
    known = console.is_terminal or "COLUMNS" in os.environ
    shown = table(report)
    for part in shown if isinstance(shown, tuple) else (shown,):
        if isinstance(part, str):
            console.print(
                wrap(part, console.width) if known else part, markup=False, soft_wrap=True
            )
        else:
            console.print(part, markup=False)


def wrap(text: str, width: int) -> str:
    """Lines longer than the terminal is wide, broken between words; the rest stands indented.

    What is written to a file or a pipe keeps its lines, so that they can be searched.
    """
    lines: list[str] = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        broken = (
            textwrap.wrap(
                line,
                width,
                subsequent_indent=indent,
                break_on_hyphens=False,
            )
            if len(line) > width
            else [line]
        )
        lines += broken
    return "\n".join(lines)


def plain(value: Any) -> Any:
    """`value` in types JSON has: arrays become lists; inf and nan, which it lacks, strings."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # a NumPy scalar or array
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)
