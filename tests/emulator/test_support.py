"""The support table: complete, honest about what it rests on, and the one that is documented."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from pathlib import Path

import pytest

from fa4 import cli
from fa4.emulator.isa.instruction_set import TABLE
from fa4.emulator.tools import support
from fa4.emulator.tools.support import MANUAL_ONLY, confirmed_opcodes, support_table
from lab.pages.support_table import BEGIN, END, EVIDENCE, PAGE, fill, markdown, measured, section_of

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = PAGE.read_text(encoding="utf-8")


def is_current(document: str) -> bool:
    """Whether the table in a document is the present one."""
    return section_of(document) == "\n".join(markdown(support_table()))


def test_the_documented_table_is_the_present_one() -> None:
    """If not: python -m lab.pages.support_table"""
    assert is_current(DOCUMENT)


def test_a_changed_row_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new form, a new row and a removed row each make the test above fail."""
    support_table()
    (row, *others) = TABLE["tcgen05.ld"]
    for rows in (
        [dataclasses.replace(row, forms=row.forms + " more"), *others],
        [row, dataclasses.replace(row, section="1.2"), *others],
        others,
    ):
        with monkeypatch.context() as patch:
            patch.setitem(TABLE, "tcgen05.ld", rows)
            assert not is_current(DOCUMENT)
    assert is_current(DOCUMENT)


def test_every_row_is_there_with_its_name() -> None:
    """All instructions; forms begin with the opcode; sections look like sections."""
    rows = support_table()
    assert {row.instruction for row in rows} == set(TABLE)
    for row in rows:
        assert row.forms.startswith(row.instruction.split(".")[0]), row
        assert re.fullmatch(r"9\.7\.[\d.]+\d(, 9\.7\.[\d.]+\d)*", row.sections), row


def test_the_package_has_what_was_measured() -> None:
    """If not: python -m lab.pages.support_table"""
    assert confirmed_opcodes() == measured()


def test_evidence_is_read_from_the_results(tmp_path: Path) -> None:
    """Opcodes confirm the row that executes them, by name and type, and no other."""
    foreign = ["tcgen05.ld.sync.aligned.32x32b.x32.b32", "add.s32", "nothing.x"]
    hopper = {"add": ["add.rn.f32", "add.s32"], "mad.wide": ["mad.wide.u32"]}
    products = {"wgmma.fence": ["wgmma.fence.sync.aligned"]}
    places = [place for records in EVIDENCE.values() for place in records]
    for (name, key), opcodes in zip(places, (hopper, products, foreign), strict=True):
        (tmp_path / f"{name}.json").write_text(json.dumps({key: opcodes}))
    rows = support_table(measured(tmp_path))
    basis = {(row.instruction, row.sections): row.basis for row in rows if row.basis != MANUAL_ONLY}
    assert basis.pop(("multimem", "9.7.9.14")) == "refused"
    assert basis.pop(("tcgen05.mma.ws.sp", "9.7.16.10.9.4")) == "refused"
    assert basis == {
        ("add", "9.7.3.3, 9.7.5.1"): "H200 (1)",
        ("add", "9.7.1.1"): "H200 (1), foreign kernels (1)",
        ("mad.wide", "9.7.1.4"): "H200 (1)",
        ("wgmma.fence", "9.7.15.7.1"): "H200 (1)",
        ("tcgen05.ld", "9.7.16.8.3"): "foreign kernels (1)",
    }
    assert all(row.basis in (MANUAL_ONLY, "refused") for row in support_table({}))
    counts = support.counts(rows)
    assert (counts["H200"], counts["foreign kernels"], counts["refused"]) == (4, 2, 2)
    assert counts[MANUAL_ONLY] == len(rows) - 7


def test_filling_keeps_the_rest() -> None:
    """Only what stands between the markers changes; without markers nothing does."""
    text = fill(f"before\n\n{BEGIN}\n\nold\n\n{END}\n\nafter\n")
    assert is_current(text) and text.startswith("before\n") and text.endswith("\nafter\n")
    assert fill(text) == text
    with pytest.raises(ValueError, match="lacks"):
        fill("no table\n")


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    """For people and for machines."""
    with pytest.raises(SystemExit) as stop:
        cli.main(["emulate", "--support", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert stop.value.code == 0
    assert sum(report["counts"].values()) >= len(report["instructions"]) == len(support_table())
    with pytest.raises(SystemExit) as stop:
        cli.main(["emulate", "--support"])
    out = capsys.readouterr().out
    assert stop.value.code == 0 and "mbarrier.try_wait" in out and "manual only" in out


# The kinds of findings.

NAMING = {"fault", "fatal", "report", "MemoryFault"}  # calls whose first argument is the kind
INDIRECT = {"fault", "uninitialised", "missing-proxy-fence", "trap", "brkpt", "livelock"}


def kinds_in(source: str) -> set[str]:
    """Kinds of findings that a module names: in its calls, and as `kind = "..."` of an error."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in NAMING and node.args:
                found |= {
                    inner.value
                    for inner in ast.walk(node.args[0])
                    if isinstance(inner, ast.Constant) and isinstance(inner.value, str)
                }
        if isinstance(node, ast.ClassDef):
            found |= {
                item.value.value
                for item in node.body
                if isinstance(item, ast.Assign)
                and isinstance(item.value, ast.Constant)
                and getattr(item.targets[0], "id", "") == "kind"
            }
    return found


def test_every_kind_of_finding_is_documented() -> None:
    """The table of docs/emulator.md has all of them, and none that no code reports."""
    section = DOCUMENT.partition("## What the checks mean")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
    documented = {kind for cell in cells for kind in re.findall(r"`([\w-]+)`", cell)}
    sources = [p.read_text("utf-8") for p in (ROOT / "fa4" / "emulator").rglob("*.py")]
    reported = {kind for source in sources for kind in kinds_in(source)}
    assert documented == reported | INDIRECT | {"deadlock"}


def test_the_search_for_kinds_finds_them() -> None:
    """Planted: a call with a new kind, and an error class with one."""
    source = 'fragment.fault("new", "text")\nclass E(Exception):\n    kind = "other"\n'
    assert kinds_in(source + 'raise MemoryFault("exit" if a else "far", "m")') == {
        "new", "other", "exit", "far"
    }  # fmt: skip
