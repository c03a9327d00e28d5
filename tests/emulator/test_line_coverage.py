"""What of each source line ran: text, HTML, branches that went one way, predicates never true."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from fa4 import cli, emulator
from fa4.emulator.machine.coverage import merge_coverages
from fa4.emulator.tools.faults import plant
from fa4.emulator.tools.line_coverage import as_html, as_text, by_file

# Sums `count` numbers, four at a time, then the remainder one by one; a flag is set for none.
SUM = """
.version 8.8
.target sm_100a
.address_size 64
.visible .entry sums(.param .u64 x, .param .u64 y, .param .u32 count)
{
  .reg .pred %p, %q; .reg .b32 %n, %v, %w, %s; .reg .b64 %x, %y;
  .shared .align 8 .b8 bar[8];
  .loc 1 1 0
  ld.param.u64 %x, [x]; ld.param.u64 %y, [y];
  ld.param.u32 %n, [count];
  mov.u32 %s, 0;
  setp.gt.u32 %q, %n, 100;
  .loc 1 2 0
MAIN:
  setp.lt.u32 %p, %n, 4;
  @%p bra REST;
  ld.global.v2.u32 {%v, %w}, [%x];
  add.u32 %s, %s, %v; add.u32 %s, %s, %w;
  ld.global.v2.u32 {%v, %w}, [%x+8];
  add.u32 %s, %s, %v; add.u32 %s, %s, %w;
  add.u64 %x, %x, 16;
  sub.u32 %n, %n, 4;
  bra MAIN;
  .loc 1 3 0
REST:
  setp.eq.u32 %p, %n, 0;
  @%p bra DONE;
  .loc 1 4 0
  bar.sync 0;
  ld.global.u32 %v, [%x];
  add.u32 %s, %s, %v;
  add.u64 %x, %x, 4;
  sub.u32 %n, %n, 1;
  bra REST;
  .loc 1 5 0
DONE:
  @%q fence.proxy.async;
  .loc 1 6 0
  st.global.u32 [%y], %s;
  ret;
}
.file 1 "FILE"
"""
SOURCE = """count = n
while count >= 4: add_four()
while count:
    add_one()  # a < b & c
if n > 100: publish()
store()
"""


def run(text: str, count: int) -> emulator.Report:
    """The kernel by one thread, and what it must come to."""
    x, y = np.arange(max(count, 1), dtype=np.uint32), np.zeros(1, np.uint32)
    report = emulator.run_ptx(text, [x, y, count], block=(1, 1, 1))
    assert y[0] == x[:count].sum()
    return report


@pytest.fixture
def ptx(tmp_path: Path) -> str:
    """The kernel, of a source that is there."""
    (tmp_path / "sums.py").write_text(SOURCE)
    return SUM.replace("FILE", str(tmp_path / "sums.py"))


def test_lines_are_listed(ptx: str) -> None:
    """Of 8 numbers there is no remainder; of 6 there is; the flag is never set."""
    (file,) = by_file(run(ptx, 8).coverage)
    states = {number: line.state for number, line in file.lines.items()}
    assert states == {1: "ran", 2: "ran", 3: "partly", 4: "not", 5: "not", 6: "ran"}
    text = as_text([file])
    assert f"{file.path}: of 6 lines with instructions 3 ran, 1 in part, 2 not" in text
    number = ptx.split("\n").index("  bar.sync 0;") + 1
    barrier = f"PTX line {number}: bar.sync 0 (not reached; synchronises"
    assert f"line 4: 0 of 6 instructions ran\n    {barrier}" in text
    assert "@%p bra DONE (always taken)" in text
    assert "fence.proxy.async (predicate false for all lanes; synchronises" in text
    (file,) = by_file(run(ptx, 6).coverage)
    assert [n for n, line in file.lines.items() if line.state != "ran"] == [5]
    with pytest.raises(AssertionError):
        run(ptx.replace("sub.u32 %n, %n, 1;", "sub.u32 %n, %n, 2;"), 6)


def test_launches_add_up(ptx: str) -> None:
    """A branch that one launch takes and another does not went both ways."""
    (none,), (one,), (more,) = (run(ptx, count).coverage for count in (0, 1, 8))
    assert {branch.taken for branch in none.one_way} == {True}
    (merged,) = merge_coverages([none, one])
    assert [branch.taken for branch in merged.one_way] == [True]
    (merged,) = merge_coverages([none, one, more])
    assert merged.one_way == [] and [m.skipped for m in merged.missed] == [True]


def test_a_fault_in_what_did_not_run_is_not_found(ptx: str) -> None:
    """It is in a line that the report names, and found where that runs."""
    faults = [f for f in plant(ptx) if f.instruction.startswith("bar.sync")]
    assert faults
    for fault in faults:
        (coverage,) = run(fault.text, 8).coverage
        (before,) = run(ptx, 8).coverage
        assert not before.reaches(fault.line) and coverage.reached == before.reached
        assert before.reaches(fault.line - 8)


class _Rows(HTMLParser):
    """The classes of the rows of a page, and all of its text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.classes: list[str | None] = []
        self.text = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)
        if tag == "tr":
            self.classes.append(dict(attributes).get("class"))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page(ptx: str) -> None:
    """One row for each line of the source, coloured; text is escaped; it needs nothing else."""
    page = as_html(by_file(run(ptx, 8).coverage))
    rows = _Rows()
    rows.feed(page)
    assert rows.open == [] and rows.classes == ["ran", "ran", "partly", "not", "not", "ran"]
    assert "add_one()  # a < b & c" in rows.text and "bar.sync 0 (not reached" in rows.text
    assert "http" not in page and "src=" not in page


def test_the_command_writes_it(
    ptx: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As HTML and as text; PTX without a source is its own."""
    monkeypatch.chdir(tmp_path)
    Path("a.ptx").write_text(ptx)
    Path("b.ptx").write_text("\n".join(s for s in ptx.split("\n") if s.strip()[:4] != ".loc"))
    arguments = [
        "--block",
        "1",
        "--arg",
        "u32[8]=arange",
        "--arg",
        "u32[1]=zeros",
        "--arg",
        "u32=8",
    ]
    for name, file in (("a.ptx", "a.html"), ("a.ptx", "a.txt"), ("b.ptx", "b.txt")):
        with pytest.raises(SystemExit):
            cli.main(["emulate", name, *arguments, "--coverage", file])
        assert f"wrote {file}" in capsys.readouterr().out
    assert Path("a.html").read_text().startswith("<!doctype html>")
    assert Path("a.txt").read_text().startswith(str(tmp_path / "sums.py"))
    assert Path("b.txt").read_text().startswith("sums: of ")
