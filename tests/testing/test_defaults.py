"""What is left out is off, and means the same wherever it is left out.

Held for all of `fa4.testing` by its source: each test of a single default would find one.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import fa4.testing
from fa4.testing import VerifyOptions

SOURCES = sorted(Path(fa4.testing.__file__).parent.rglob("*.py"))
# Switches that are on where nothing is said, and why.
ON = {
    "Backend.importable": "a function of a module; the few others are made inside a function",
    "Axis.gradients": "a level says when it has no gradients",
    "_symptom.sizes": "a case that was made smaller has only the sizes that it takes to fail",
}
# Words that mean something else in one place, and why.
APART = {
    "first_look": "a feature alone has more levels to look at than another property",
    "gradients": "an axis is drawn with gradients, too; a kind of design is forward or backward",
    "group": "a group of properties, and the query heads of a KV head",
    "seconds": "that something took, and that shrinking may take",
}


def defaults() -> Iterator[tuple[str, str, Any]]:
    """(function or class, parameter or field, default) of every constant default."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            found: list[tuple[ast.arg | ast.Name, ast.expr | None]] = []
            if isinstance(node, (ast.FunctionDef, ast.Lambda)):
                given = [*node.args.posonlyargs, *node.args.args]
                places = len(given) - len(node.args.defaults)
                found += zip(given[places:], node.args.defaults, strict=True)
                found += zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            if isinstance(node, ast.ClassDef):
                lines = [line for line in node.body if isinstance(line, ast.AnnAssign)]
                found += [(x.target, x.value) for x in lines if isinstance(x.target, ast.Name)]
            for target, default in found:
                name = target.arg if isinstance(target, ast.arg) else target.id
                if isinstance(default, ast.Constant):
                    yield getattr(node, "name", "lambda"), name, default.value


def test_a_switch_is_off_unless_it_is_said() -> None:
    """Of functions and of dataclasses, but for those above."""
    on = {f"{owner}.{name}" for owner, name, default in defaults() if default is True}
    assert on == set(ON)
    assert sum(default is False for _, _, default in defaults()) > 30


def test_a_word_has_one_default() -> None:
    """A seed that is left out is the same seed everywhere, and so on."""
    found: dict[str, set[Any]] = defaultdict(set)
    for _, name, default in defaults():
        if default is not None:
            found[name].add(default)
    assert {name for name, some in found.items() if len(some) > 1} == set(APART)
    assert found["seed"] == {0}


@pytest.mark.parametrize("field", fields(VerifyOptions), ids=lambda field: field.name)
def test_an_option_has_one_default_wherever_it_is_given(field: Any) -> None:
    """In Python, for the command and for the plugin, whose help says it."""
    from fa4.commands.verify import verify
    from fa4.testing.pytest_plugin import _OPTIONS

    renamed = {"dtypes": "dtype", "timeout_s": "timeout", "isolate": "isolated"}
    command = inspect.signature(verify).parameters
    assert command[renamed.get(field.name, field.name)].default == field.default
    name = renamed.get(field.name, field.name).replace("isolated", "isolate").replace("_", "-")
    if name in ("jobs", "exitfirst"):  # pytest's own -n and -x
        assert name not in _OPTIONS
        return
    option = _OPTIONS[name]
    absent = False if option.get("action") == "store_true" else None
    assert option.get("default", absent) == field.default
    said = re.search(r"\(default (\d+)\)", option["help"])
    assert (said is not None) == isinstance(field.default, int) or field.default is False
    assert said is None or int(said.group(1)) == field.default
