"""The `fa4` command: registers the subcommands and turns bad input into one line.

A subcommand is a function in `fa4/commands/<name>.py` of that name, or a `typer.Typer` that holds
several. `main` is the entry point: an error that the user can act on becomes `fa4: error: ...` on
stderr and exit code 2; anything else keeps its traceback.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

import fa4

COMMANDS = (
    "demo",
    "verify",
    "generations",
    "predict",
    "sweep",
    "ablate",
    "roofline",
    "trace",
    "explain",
    "machines",
    "validate",
    "calibrate",
    "emulate",
    "run",
    "bench",
    "compile",
    "cache",
    "doctor",
)

# What bad input or a missing package raises (UnicodeDecodeError is a ValueError, FileNotFoundError
# an OSError). FA4_TRACEBACK=1 shows where it was raised.
EXPECTED_ERRORS = (ValueError, TypeError, OSError, ImportError, NotImplementedError)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `fa4` with `arguments` (default: those of the process) and exit with its code."""
    try:
        code = build_app()(
            args=None if arguments is None else list(arguments),
            prog_name="fa4",
            standalone_mode=False,
        )
    except (typer.Abort, KeyboardInterrupt):
        fail("interrupted", 130)
    except Exception as error:
        if not is_expected(error) or os.environ.get("FA4_TRACEBACK"):
            raise
        fail(f"error: {one_line(error)}", 2)
    sys.exit(code if isinstance(code, int) else 0)


def build_app() -> typer.Typer:
    """The application with every command in COMMANDS."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.callback(invoke_without_command=True)(start)
    for name in COMMANDS:
        module = importlib.import_module(f"fa4.commands.{name}")
        command = getattr(module, name)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app


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
    return " ".join(text.split()) or type(error).__name__


def fail(message: str, code: int) -> NoReturn:
    """Print `fa4: <message>` on stderr and exit."""
    print(f"fa4: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
