"""{fa4-commands}: the reference of the commands, written from their own options and help texts."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer
from docutils.parsers.rst import Directive
from sphinx.util.docutils import SphinxDirective

from fa4 import cli


def escape(text: str) -> str:
    """Text that Markdown shows as it is."""
    return re.sub(r"([\\|*_<>\[\]`$~])", r"\\\1", " ".join(text.split()))


def render_command(name: str, command: Any) -> Iterator[str]:
    """A command: what it does, how it is called, a table of its options."""
    yield f"### fa4 {name}\n"
    help_text = inspect.cleandoc(command.help or "")
    for paragraph in re.split(r"\n\s*\n", help_text):
        paragraph = " ".join(paragraph.split())
        example = paragraph.partition("Example: ")[2]
        yield f"```console\n{example}\n```\n" if example else f"{escape(paragraph)}\n"
    context = typer.Context(command)
    rows = [row for option in command.params if (row := option_row(option, context))]
    if rows:
        yield "| option | |\n|---|---|"
        yield "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def option_row(option: Any, context: Any) -> tuple[str, str] | None:
    """How an option is written and what it means, as `--help` has them; None if it is hidden."""
    record = option.get_help_record(context)
    if record is None:
        return None
    written, meaning = record
    shown = " ".join(written.split()).replace("|", "\\|")
    return f"`{shown}`", escape(meaning)


def render_commands() -> str:
    """All commands, in the groups of `fa4 --help`."""
    app = typer.main.get_command(cli.build_app())
    parts: list[str] = []
    for title, names in cli.GROUPS.items():
        parts.append(f"## {title}\n")
        for name in names:
            command = app.commands[name]  # type: ignore[attr-defined]
            if hasattr(command, "commands"):
                parts.append(f"### fa4 {name}\n\n{escape(command.help or '')}\n")
                for sub, subcommand in command.commands.items():
                    lines = "\n".join(render_command(f"{name} {sub}", subcommand))
                    parts.append(lines.replace("### ", "#### ", 1))
            else:
                parts.append("\n".join(render_command(name, command)))
    return "\n".join(parts)


class CommandReference(SphinxDirective):
    """The text above in place of the directive."""

    def run(self) -> list[Any]:
        self.env.note_dependency(cli.__file__)
        return self.parse_text_to_nodes(render_commands(), allow_section_headings=True)


def setup(app: Any) -> dict[str, Any]:
    """Sphinx calls it."""
    directive: type[Directive] = CommandReference
    app.add_directive("fa4-commands", directive)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
