"""Hashes of programs: what changes them, and what does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.sources import SourceTree, essence

TEXTS = {
    "fa4/__init__.py": "",
    "fa4/costs.py": '"""Costs."""\nCYCLES = 8  # of a load\n',
    "fa4/use.py": "def f():\n    from fa4.costs import CYCLES\n    return CYCLES\n",
    "fa4/other.py": "X = 1\n",
    "lab/benchmarks/run.py": "from helper import g\n",
    "lab/benchmarks/helper.py": "from fa4.use import f as g\nfrom lab import records, shared\n",
    "lab/__init__.py": "",
    "lab/records.py": "",
    "lab/shared.py": "X = 1\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small project."""
    for name, text in TEXTS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_program_is_what_it_imports(root: Path) -> None:
    """Inside functions, and as scripts do from their own folder; not what keeps the records."""
    found = SourceTree(root).closure(["lab.benchmarks.run"])
    named = ["fa4.costs", "fa4.use", "lab.benchmarks.helper", "lab.benchmarks.run", "lab.shared"]
    assert sorted(found) == named
    with pytest.raises(ValueError, match=r"no module 'fa4\.none'"):
        SourceTree(root).closure(["fa4.none"])


CHANGES = {
    "a value": ("fa4.costs", "CYCLES = 9\n", True),
    "what lab and tests share": ("lab.shared", "X = 2\n", True),
    "another import": ("fa4.use", "from fa4.other import X as f\n", True),
    "comment, docstring": ("fa4.costs", '"""C."""\n\n# why\nCYCLES = 8  # of a load\n', False),
    "a comment behind code": ("fa4.costs", "CYCLES = 8  # of every load\n", False),
    "a comment that becomes code": ("fa4.costs", "CYCLES = 8; X = 1\n", True),
    "what is not imported": ("fa4.other", "X = 2\n", False),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_the_hash_changes_with_the_code(root: Path, change: str) -> None:
    module, text, differs = CHANGES[change]
    before = SourceTree(root).fingerprint(["lab.benchmarks.run"])
    after = SourceTree(root, {module: text}).fingerprint(["lab.benchmarks.run"])
    assert (before != after) == differs


def test_strings_are_no_comments() -> None:
    """Lines of a string that look like one, or are empty; docstrings go, code beside them stays."""
    text = 'class A:\n    """Doc\n\n    one."""\n    S = """\n# one\n\ntwo"""  # S\n\n# a\nx = 1\n'
    assert essence(text) == 'class A:\n    S = """\n# one\n\ntwo"""\nx = 1'
    short = 'def f(): "doc"; return 1\n'
    assert essence(short) == short.strip()
    assert essence('x = "# no"  # a comment\n') == 'x = "# no"'
