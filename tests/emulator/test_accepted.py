"""Findings that are accepted: rules, files of rules, baselines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa4 import cli, emulator
from fa4.emulator.accepted import fingerprint, parse_rule, place_of, write_baseline
from fa4.emulator.errors import KernelFinding
from fa4.emulator.kinds import KINDS, SEVERITIES, kind_of
from tests.emulator.test_cli_emulate import EXCHANGE

RACY = EXCHANGE.replace("SYNC", "")
RACE = KernelFinding("race", "m", 18, "/a/b/exchange.py:9", kernel="exchange", text="ld.shared")


def racy(**options: Any) -> emulator.Report:
    """Two warps exchange words without a barrier: a race and a read of nothing, on one line."""
    return emulator.run_ptx(RACY, [], block=(64, 1, 1), **options)


@pytest.mark.parametrize(
    ("rule", "covers"),
    [
        ("race", True),
        ("*", True),
        ("*:exchange.py", True),
        ("race:exchange.py:9", True),
        ("race:b/exchange.py:9", True),
        ("race:/a/b/exchange.py", True),
        ("race:ex*.py:9", True),
        ("uninitialised", False),
        ("race:change.py", False),
        ("race:exchange.py:18", False),
        ("race:exchange", False),
    ],
)
def test_a_rule_covers(rule: str, covers: bool) -> None:
    """Kind, file and line; of files the last parts."""
    assert parse_rule(rule).covers(RACE) is covers


@given(st.sampled_from(sorted(KINDS)), st.sampled_from(["a.py", "x/y.py", "*.py"]), st.integers(1))
def test_a_rule_is_read_as_it_is_written(kind: str, file: str, line: int) -> None:
    """Whatever its parts are."""
    rule = parse_rule(f"{kind}:{file}:{line}")
    assert (rule.kind, rule.file, rule.line) == (kind, file, line)
    assert parse_rule(f"{kind}:{file}").line == 0 and parse_rule(kind).file == "*"


def test_without_lines_of_a_source_the_kernel_counts() -> None:
    """And the line is that of the PTX."""
    finding = KernelFinding("race", "m", 18, kernel="exchange")
    assert place_of(finding) == ("exchange", 18)
    assert parse_rule("race:exchange:18").covers(finding)
    assert not parse_rule("race:exchange:9").covers(finding)


def test_what_is_accepted_fails_nothing() -> None:
    """It stands by itself; the rest still fails; rules that cover nothing are named."""
    with pytest.raises(emulator.EmulationFailed):
        racy()
    accepted = emulator.Accepted.of(["race:exchange.py", "race:exchange.py:9", "deadlock"])
    report = racy(accepted=accepted, collect=True)
    assert {finding.kind for finding in report.findings} == {"uninitialised"}
    assert {(f.kind, reason) for f, reason in report.accepted} == {("race", "race:exchange.py")}
    assert accepted.unused() == ["race:exchange.py:9", "deadlock"]
    both = emulator.Accepted.of(["*:exchange.py:9", "race:exchange.py:7"])
    assert racy(accepted=both).ok and both.unused() == []


def test_a_fatal_finding_still_ends_the_run() -> None:
    """And the report says that the kernel did not come to its end."""
    text = EXCHANGE.replace("SYNC", "trap;")
    report = emulator.run_ptx(text, [], block=(64, 1, 1), accepted=emulator.Accepted.of(["trap"]))
    assert report.ok and report.ended_early and len(report.accepted) == 1
    assert not racy(collect=True).ended_early


def test_a_baseline_knows_what_was_found_before(tmp_path: Path) -> None:
    """Though lines move; another finding is new."""
    source, baseline = tmp_path / "kernel.py", tmp_path / "baseline.json"
    text = RACY.replace('"exchange.py"', f'"{source}"')
    source.write_text("\n" * 8 + "x[i] = y\n")
    found = emulator.run_ptx(text, [], block=(64, 1, 1), collect=True).findings
    baseline.write_text(write_baseline(found))
    assert {row["kind"] for row in json.loads(baseline.read_text())["findings"]} == {
        finding.kind for finding in found
    }
    moved = text.replace(".loc 1 9", ".loc 1 11").replace("ret;", "mov.u32 %a, 0; ret;")
    accepted = emulator.Accepted.of(baseline=baseline)
    source.write_text("\n" * 10 + "  x[i] = y\n")
    import linecache

    linecache.checkcache()
    assert emulator.run_ptx(moved, [], block=(64, 1, 1), accepted=accepted).ok
    source.write_text("\n" * 10 + "x[i] = z\n")
    linecache.checkcache()
    with pytest.raises(emulator.EmulationFailed):
        emulator.run_ptx(moved, [], block=(64, 1, 1), accepted=accepted)
    assert fingerprint(RACE) != fingerprint(KernelFinding("race", "m", 18, kernel="exchange"))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (["rase"], "ignore 'rase': no finding is called 'rase'; race, "),
        (["race::7"], "ignore 'race::7': expected KIND, KIND:FILE or KIND:FILE:LINE"),
        ([""], "no finding is called ''"),
    ],
)
def test_what_is_no_rule_is_refused(rules: list[str], message: str) -> None:
    """With what was given and what is allowed."""
    with pytest.raises(emulator.LaunchError) as error:
        emulator.Accepted.of(rules)
    assert message in str(error.value)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    """Named, with the line where that helps."""
    rules = tmp_path / "rules.txt"
    rules.write_text("# known\nrace:a.py  # judged\n\nrase\n")
    with pytest.raises(emulator.LaunchError, match=r"rules.txt line 4: ignore 'rase'"):
        emulator.Accepted.of(files=[rules])
    rules.write_text("# known\nrace:a.py  # judged\n\n")
    assert [rule.text for rule in emulator.Accepted.of(files=[rules]).rules] == ["race:a.py"]
    with pytest.raises(emulator.LaunchError, match="No such file"):
        emulator.Accepted.of(files=[tmp_path / "none"])
    with pytest.raises(emulator.LaunchError, match="is no baseline"):
        emulator.Accepted.of(baseline=rules)
    rules.write_text('{"version": 2, "findings": []}')
    with pytest.raises(emulator.LaunchError, match="has version 2; this reads 1"):
        emulator.Accepted.of(baseline=rules)


def test_every_kind_says_why() -> None:
    """Severity, section and a sentence; what nobody has named is an error."""
    for name, kind in KINDS.items():
        assert kind.severity in SEVERITIES and kind.why and not kind.why.endswith("."), name
        assert kind.section == "" or kind.section.replace(".", "").isdigit(), name
    assert kind_of("odd").severity == "error"
    assert str(RACE).endswith(f"hazard; PTX ISA 8.7.1: {KINDS['race'].why}")


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `fa4 emulate racy.ptx --block 64 <arguments>`."""
    with pytest.raises(SystemExit) as stop:
        cli.main(["emulate", "racy.ptx", "--block", "64", *map(str, arguments)])
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A baseline is written, then holds; rules; what is bad is said in a line."""
    monkeypatch.chdir(tmp_path)
    Path("racy.ptx").write_text(RACY)
    assert run(capsys)[0] == 1
    code, out, _ = run(capsys, "--baseline", "known.json", "--write-baseline")
    assert code == 0 and "wrote known.json" in out
    code, out, _ = run(capsys, "--baseline", "known.json", "--ignore", "tmem")
    assert code == 0 and "accepted (baseline): race at exchange.py:9" in out
    assert "covers nothing: --ignore tmem" in out and "no findings" in out
    Path("rules").write_text("*:exchange.py\n")
    code, out, _ = run(capsys, "--suppressions", "rules", "--json")
    assert code == 0 and {one["reason"] for one in json.loads(out)["accepted"]} == {"*:exchange.py"}
    for arguments, message in (
        (["--write-baseline"], "--write-baseline needs --baseline FILE"),
        (["--baseline", "none.json"], "none.json: No such file"),
        (["--ignore", "rase"], "ignore 'rase'"),
        (["--coverage", "x.pdf"], "--coverage x.pdf: expected FILE.html or FILE.txt"),
        (["--sarif", "."], ". is a directory"),
    ):
        code, _, error = run(capsys, *arguments)
        assert code == 2 and message in error
