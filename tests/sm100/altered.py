"""Modules of the kernels with something else in them, in place while a kernel is compiled."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PACKAGES = ("fa4.sm90.", "fa4.sm100.", "fa4.plan.", "fa4.compiled.", "tests.sm100.")


@dataclass(frozen=True)
class Edit:
    """module: what is altered, from `old` to `new`, which occurs once."""

    module: ModuleType
    old: str
    new: str


def altered(edits: Iterable[Edit], folder: Path) -> ModuleType:
    """A copy of a module with edits of it, imported beside the original."""
    edits = list(edits)
    module = edits[0].module
    assert module.__file__ is not None
    source = Path(module.__file__).read_text(encoding="utf-8")
    for edit in edits:
        assert source.count(edit.old) == 1, f"the edit must fit one place of the source: {edit.old}"
        source = source.replace(edit.old, edit.new)
    file = folder / f"altered_{module.__name__.replace('.', '_')}.py"
    file.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = copy
    spec.loader.exec_module(copy)
    return copy


def put_in_place(edits: Iterable[Edit], folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Whoever uses a function or class of an edited module finds the altered one.

    Copies that use one another have one another's: a module's copy is imported, then put in place,
    before the next is.
    """
    by_module: dict[str, list[Edit]] = {}
    for edit in edits:
        by_module.setdefault(edit.module.__name__, []).append(edit)
    for name, mine in by_module.items():
        copy = altered(mine, folder)
        for what, value in list(vars(mine[0].module).items()):
            if getattr(value, "__module__", None) == name:
                replace_everywhere(value, getattr(copy, what, value), patch)


def replace_everywhere(value: Any, instead: Any, patch: pytest.MonkeyPatch) -> None:
    """In the namespaces of all kernel modules."""
    for name, module in list(sys.modules.items()):
        if name.startswith((*PACKAGES, "altered_")) and module is not None:
            for what, held in list(vars(module).items()):
                if held is value:
                    patch.setattr(module, what, instead)
