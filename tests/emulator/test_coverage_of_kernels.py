"""What of a kernel ran: reports, sessions, the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fa4 import cli, emulator
from fa4.commands.emulate_report import render_coverage
from fa4.emulator.machine.coverage import merge_coverages

# Sums pairs; where the count is odd, the last number is added behind a barrier.
ODD = """
.version 8.8
.target sm_100a
.address_size 64
.visible .entry pairs(.param .u64 x, .param .u32 count)
{
  .reg .pred %p; .reg .b32 %n, %v, %w; .reg .b64 %x;
  ld.param.u64 %x, [x];
  ld.param.u32 %n, [count];
  ld.global.u32 %v, [%x];
  ld.global.u32 %w, [%x+4];
  add.u32 %v, %v, %w;
  and.b32 %n, %n, 1;
  setp.eq.u32 %p, %n, 0;
  @%p bra done;
  bar.sync 0;
  ld.global.u32 %w, [%x+8];
  add.u32 %v, %v, %w;
done:
  st.global.u32 [%x], %v;
  ret;
}
"""
LINES = [number for number, line in enumerate(ODD.split("\n"), 1) if "bar.sync" in line]


def run(count: int) -> emulator.Report:
    """The kernel with so many numbers."""
    return emulator.run_ptx(ODD, [np.arange(3, dtype=np.uint32), count], block=(1, 1, 1))


def test_what_did_not_run_is_listed() -> None:
    """The branch that an even count does not take; an odd count reaches all."""
    (even,), (odd,) = run(2).coverage, run(3).coverage
    assert [one.line for one in even.missed] == [LINES[0], LINES[0] + 1, LINES[0] + 2]
    assert [one.synchronises for one in even.missed] == [True, False, False]
    assert even.missed[1].text == "ld.global.u32 %w, [%x+8]"
    assert odd.missed == () and odd.reached == odd.instructions == even.instructions == 13
    (both,) = merge_coverages([even, odd, even])
    assert both.missed == () and merge_coverages([even, even]) == [even]
    other = emulator.KernelCoverage(kernel="other", ptx="", instructions=1, missed=())
    assert merge_coverages([even, other]) == [even, other]


def test_a_run_that_is_stopped_has_reached_less() -> None:
    """What stands behind a fatal finding did not run."""
    report = emulator.run_ptx(
        ODD, [np.arange(2, dtype=np.uint32), 3], block=(1, 1, 1), collect=True
    )
    (coverage,) = report.coverage
    assert report.findings and LINES[0] + 2 in [one.line for one in coverage.missed]


def test_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For people and for machines."""
    monkeypatch.chdir(tmp_path)
    Path("pairs.ptx").write_text(ODD)
    arguments = ["emulate", "pairs.ptx", "--block", "1", "--arg", "u32[3]=arange", "--arg", "u32=2"]
    with pytest.raises(SystemExit):
        cli.main(arguments)
    text = capsys.readouterr().out
    assert "pairs: 10 of 13 instructions ran; not: PTX lines 16-18" in text
    assert "1 of them synchronise: no fault there can be found by this run" in text
    with pytest.raises(SystemExit):
        cli.main([*arguments, "--json"])
    (coverage,) = json.loads(capsys.readouterr().out)["coverage"]
    assert (coverage["reached"], coverage["instructions"]) == (10, 13)
    assert (
        render_coverage(coverage | {"missed": [], "branches": []})
        == "pairs: all of its 13 instructions ran"
    )
