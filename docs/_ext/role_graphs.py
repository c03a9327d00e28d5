"""Graphs of roles and signals (Mermaid, as `fa4 explain --mermaid` writes them) as a table.

A row for each role that arrives, a column for each that waits, the signals where they meet: it can
be read in any width and aloud, and needs no program in the reader's browser.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.transforms import SphinxTransform

NODE = re.compile(r'^ *(\w+)\["([^"]*)"\]$', re.MULTILINE)
EDGE = re.compile(r'^ *(\w+) -->\|"([^"]*)"\| (\w+)$', re.MULTILINE)
BREAK = "<br/>"


def read_graph(text: str) -> tuple[dict[str, str], dict[tuple[str, str], list[str]]]:
    """Role -> its label, and (arriver, waiter) -> signals. ValueError for any other line."""
    lines = text.strip().splitlines()[1:]
    known = [line for line in lines if NODE.fullmatch(line) or EDGE.fullmatch(line)]
    if known != lines:
        raise ValueError(f"not a graph of roles: {sorted(set(lines) - set(known))}")
    roles = {name: label.split(BREAK)[-1] for name, label in NODE.findall(text)}
    edges = {(a, b): names.split(BREAK) for a, names, b in EDGE.findall(text)}
    return roles, edges


def cell(lines: list[str], literal: bool) -> nodes.entry:
    """A table's cell, a line for each text."""
    block = nodes.line_block()
    for line in lines:
        shown = nodes.literal(line, line) if literal else nodes.Text(line)
        block += nodes.line("", "", shown)
    return nodes.entry("", block)


def build_table(text: str) -> nodes.table:
    """Arrivers down, waiters across."""
    roles, edges = read_graph(text)
    waiters = [name for name in roles if any(to == name for _, to in edges)]
    group = nodes.tgroup(cols=len(waiters) + 1)
    group += [nodes.colspec(colwidth=1) for _ in range(len(waiters) + 1)]
    head = nodes.row("", cell(["arrives \\ waits"], False))
    head += [cell([name], False) for name in waiters]
    body = nodes.tbody()
    for name, warps in roles.items():
        row = nodes.row("", cell([name, warps], False))
        row += [cell(edges.get((name, to), []), True) for to in waiters]
        body += row
    group += [nodes.thead("", head), body]
    return nodes.table("", group, classes=["roles"])


class ShowRoleGraphs(SphinxTransform):
    """Puts the table in place of each Mermaid block."""

    default_priority = 400

    def apply(self, **kwargs: Any) -> None:
        for block in list(self.document.findall(nodes.literal_block)):
            if block.get("language") == "mermaid":
                block.replace_self(build_table(block.astext()))


def setup(app: Any) -> dict[str, Any]:
    """Sphinx calls it."""
    app.add_transform(ShowRoleGraphs)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
