"""A new option of a call is four files, the kernels' own apart: tried in a copy of the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MOST_FILES = 4
NAME = "stub_shift"

# File -> (what stands there, what stands there with the option).
EDITS: dict[str, tuple[tuple[str, str], ...]] = {
    "fa4/call/options.py": (
        ("    dropout_p: float\n", f"    {NAME}: float\n    dropout_p: float\n"),
        (
            '    Option(name="dropout_p"',
            f'    Option(name="{NAME}", default=0.0, kind=NUMBER, doc="a stub",\n'
            '           no_drop_in="nobody has it", not_drawn="it does nothing"),\n'
            '    Option(name="dropout_p"',
        ),
    ),
    "fa4/api.py": (
        ("    dropout_p: float = 0.0,\n",
         f"    {NAME}: float = 0.0,\n    dropout_p: float = 0.0,\n"),
        ('"dropout_p": dropout_p,', f'"{NAME}": {NAME}, "dropout_p": dropout_p,'),
        ("        dropout_p, dropout_seed:",
         f"        {NAME}: a stub.\n        dropout_p, dropout_seed:"),
    ),
    "fa4/call/call.py": (("    dropout_p: float\n", f"    {NAME}: float\n    dropout_p: float\n"),),
    "fa4/backends/request.py": (
        (
            "    packing = _read_packing(call)\n",
            f"    if call.{NAME}:\n        raise NotImplementedError('{NAME} is a stub')\n"
            "    packing = _read_packing(call)\n",
        ),
    ),
}  # fmt: skip

USE = f"""
import numpy as np
import pytest
import fa4
from fa4.call.call import operator_schema
from fa4.compiled.support import describe_support

assert fa4.__file__.startswith({{folder!r}}), fa4.__file__
x = np.ones((1, 4, 1, 16), np.float16)
assert fa4.flash_attn_func(x, x, x).shape == x.shape
reasons = {{{{"emulator": "no kernel has it", "emulator_sm90": "no kernel has it",
           "reference": "is a stub"}}}}
for impl, reason in reasons.items():
    with pytest.raises(NotImplementedError, match=f"{NAME}.*{{{{reason}}}}") as refused:
        fa4.flash_attn_func(x, x, x, {NAME}=0.5, impl=impl)
    assert "\\n" not in str(refused.value), refused.value
with pytest.raises(TypeError, match="{NAME}"):
    fa4.flash_attn_func(x, x, x, {NAME}="much")
assert "float {NAME}, float dropout_p" in operator_schema()
row = next(row for row in describe_support() if row["feature"] == "{NAME}")
assert not any(row[name] for name in ("forward", "backward", "sm90", "sm90 backward")), row
"""


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the option is tried in, with the option."""
    folder = tmp_path_factory.mktemp("stub")
    ignored = shutil.ignore_patterns("__pycache__", "*.nbc", "*.nbi")
    for name in ("fa4", "lab"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    (folder / "docs").mkdir()
    for name in ("lab/pages/option_tables.py", "lab/pages/marked_tables.py", "docs/options.md"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "tests").mkdir()
    shutil.copy(ROOT / "tests/test_options.py", folder / "tests")
    for path, changes in EDITS.items():
        text = (folder / path).read_text("utf-8")
        for before, after in changes:
            assert before in text, (path, before)
            text = text.replace(before, after)
        (folder / path).write_text(text, encoding="utf-8")
    return folder


def run(folder: Path, *arguments: str) -> None:
    """Python in the copy, which must succeed."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=250,
        check=False, env=os.environ | {"PYTHONPATH": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_an_option_is_four_files(copied: Path) -> None:
    """Kernels refuse it in one line, the schema, the checks and the tables have it."""
    assert len(EDITS) <= MOST_FILES
    run(copied, "-c", USE.format(folder=str(copied)))


def test_the_tests_of_options_pass_with_it(copied: Path) -> None:
    """All but that of the page, which a program writes."""
    run(copied, "-m", "pytest", "tests/test_options.py", "-q", "-p", "no:cacheprovider",
        "-k", "not page")  # fmt: skip
