"""What the tests of commands share."""

from __future__ import annotations

import contextlib
import io

from fa4 import cli


def call(*arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `fa4 <arguments>`, run in this process."""
    out, err = io.StringIO(), io.StringIO()
    code: int | str | None = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main(arguments)
        except SystemExit as stop:
            code = stop.code
    return int(code or 0), out.getvalue(), err.getvalue()


def refused(*arguments: str) -> str:
    """The one line that `fa4 <arguments>` refuses them with."""
    code, out, err = call(*arguments)
    assert (code, out) == (2, ""), (code, out, err)
    assert err.startswith("fa4: error: ") and err.count("\n") == 1, err
    return err
