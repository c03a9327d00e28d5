"""From a failing case to a test that can be pasted into a file and run."""

from __future__ import annotations

import re

from fa4.testing.backends import Backend, is_loadable
from fa4.testing.case import Case
from fa4.testing.walk import Walk


def failing_test(
    name: str, backend: Backend, case: Case, error: str, check: str | None = None
) -> str:
    """Source of a pytest test function that fails as long as the back end does.

    check: the property that it checks, if not the one that it is named after.
    One that ran in a process of its own does so in the test too. A back end that was given as a
    function without an importable name appears as `your_function`.
    """
    words = re.sub(r"\W+", "_", name).strip("_")
    loaded = f'"{backend.name}"' if is_loadable(backend.name) else "your_function"
    load = "isolate" if backend.isolated else "load_backend"  # a crash must not end pytest
    reason = error.partition("; ")[0]
    reason = reason if len(reason) <= 94 else f"{reason[:90]} ..."
    if isinstance(case, Walk):
        lines = "".join(f"    {line}\n" for line in case.source(f"{load}({loaded})"))
        return (
            f"def test_{words}():\n    # {reason}\n"
            f"    from fa4.testing import Case, {load}, open_session\n\n{lines}"
        )
    return (
        f"def test_{words}():\n"
        f"    # {reason}\n"
        f"    from fa4.testing import Case, check_property, {load}\n"
        "\n"
        f"    case = {_wrapped(case)}\n"
        f'    check_property("{check or name}", {load}({loaded}), case)\n'
    )


def _wrapped(case: Case) -> str:
    """The case's repr, one field per line where it is long."""
    text = repr(case)
    if len(text) < 80:
        return text
    # Commas at depth 1 separate fields.
    parts, depth, start = [], 0, len("Case(")
    for at, char in enumerate(text):
        depth += (char in "([") - (char in ")]")
        if char == "," and depth == 1:
            parts.append(text[start:at].strip())
            start = at + 1
    parts.append(text[start:-1].strip())
    return "Case(\n" + "".join(f"        {part},\n" for part in parts) + "    )"
