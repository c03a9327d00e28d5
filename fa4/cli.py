"""The `fa4` command: registers the subcommands and turns bad input into one line.

A subcommand is a function in `fa4/commands/<name>.py` of that name, or a `typer.Typer` that holds
several. `main` is the entry point: an error that the user can act on becomes `fa4: error: ...` on
stderr and exit code 2; anything else keeps its traceback.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Annotated, Any, NoReturn

from fa4.base import compiled_code, interrupts

with interrupts.handled():
    import typer

    import fa4

# What `fa4 --help` lists, by what one wants to do.
GROUPS: dict[str, tuple[str, ...]] = {
    "Check numerics": ("verify", "demo", "generations"),
    "Predict speed": (
        "predict", "sweep", "design", "ablate", "roofline", "trace", "explore", "figures",
        "validate", "calibrate"
    ),
    "Run kernels": ("compile", "emulate", "run", "bench", "distributed", "cache"),
    "Look things up": ("explain", "machines", "doctor"),
}  # fmt: skip
COMMANDS = tuple(name for names in GROUPS.values() for name in names)

# What bad input or a missing package raises (UnicodeDecodeError is a ValueError, FileNotFoundError
# an OSError). FA4_TRACEBACK=1 shows where it was raised.
EXPECTED_ERRORS = (
    ValueError, TypeError, OSError, ImportError, NotImplementedError, MemoryError
)  # fmt: skip


MOST_CHARACTERS = 1000  # of a message; what was given may be as long as one likes


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `fa4` with `arguments` (default: those of the process) and exit with its code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if arguments is None:
        compiled_code.announce()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name that is no text is shown all the same
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with interrupts.handled() if arguments is None else nullcontext():
            named = [name for name in COMMANDS if given[:1] == [name]]
            code = build_app(named or COMMANDS)(
                args=given,
                prog_name="fa4",
                standalone_mode=False,
            )
            if code == interrupts.EXIT_CODE:  # what typer makes of a KeyboardInterrupt
                raise KeyboardInterrupt
    except (typer.Abort, KeyboardInterrupt):
        fail("interrupted", interrupts.EXIT_CODE)
    except Exception as error:
        if not is_expected(error) or os.environ.get("FA4_TRACEBACK"):
            raise
        fail(f"error: {one_line(error)}", 2)
    sys.exit(code if isinstance(code, int) else 0)


def build_app(names: Sequence[str] = COMMANDS) -> typer.Typer:
    """The application with these commands; the fewer, the sooner it starts."""
    app = typer.Typer(cls=make_group_class(), pretty_exceptions_enable=False, rich_markup_mode=None)
    app.callback(invoke_without_command=True)(start)
    command_class = make_command_class()
    for name in names:
        module = importlib.import_module(f"fa4.commands.{name}")
        command = getattr(module, name)
        if isinstance(command, typer.Typer):
            for info in command.registered_commands:
                info.cls = command_class
            app.add_typer(command, name=name)
        else:
            app.command(name, cls=command_class)(command)
    return app


def make_command_class() -> type[typer.core.TyperCommand]:
    """Commands that take each option once, unless it is repeatable: the last would win silently."""

    class OnceCommand(typer.core.TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            if not ctx.resilient_parsing:
                *_, order = self.make_parser(ctx).parse_args(args=list(args))
                given = [item for item in order if not getattr(item, "multiple", True)]
                for item in given:
                    if given.count(item) > 1:
                        ctx.fail(f"{item.opts[0]} is given twice")
            return super().parse_args(ctx, args)

    return OnceCommand


def make_group_class() -> type[typer.core.TyperGroup]:
    """The application's help: commands in groups, what each does said in full."""

    class GroupedCommands(typer.core.TyperGroup):
        def format_commands(self, ctx: Any, formatter: Any) -> None:
            grouped = {name for names in GROUPS.values() for name in names}
            others = tuple(name for name in self.commands if name not in grouped)
            for title, names in (*GROUPS.items(), ("Commands", others)):
                known = [name for name in names if name in self.commands]
                if known:
                    with formatter.section(title):
                        formatter.write_dl([(x, summary(self.commands[x])) for x in known])

    return GroupedCommands


def summary(command: Any) -> str:
    """The first paragraph of a command's help, on one line."""
    paragraph, *_ = (command.help or "").strip().split("\n\n")
    return " ".join(paragraph.split())


def start(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)
    ] = False,
) -> None:
    """FlashAttention-4 made checkable, predictable and runnable.

    Example: fa4 doctor
    """
    if version:
        typer.echo(f"fa4 {fa4.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def is_expected(error: Exception) -> bool:
    """Can the user act on it: a wrong argument (typer's and click's errors) or an expected kind."""
    return isinstance(error, EXPECTED_ERRORS) or hasattr(error, "format_message")


def one_line(error: Exception) -> str:
    """What an error says, without line breaks and never empty."""
    if hasattr(error, "format_message"):
        text = error.format_message()
    elif isinstance(error, OSError) and error.strerror and error.filename is not None:
        text = f"{error.strerror}: {error.filename}"
    else:
        text = str(error)
    text = " ".join(text.split()) or type(error).__name__
    half = MOST_CHARACTERS // 2
    return text if len(text) <= MOST_CHARACTERS else f"{text[:half]} ... {text[-half:]}"


def fail(message: str, code: int) -> NoReturn:
    """Print `fa4: <message>` on stderr and exit."""
    print(f"fa4: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
