"""Findings as SARIF 2.1.0: what its schema requires is there, and what was found is in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from fa4 import cli, emulator
from fa4.emulator.errors import KernelFinding
from fa4.emulator.kinds import KINDS
from fa4.emulator.tools.sarif import sarif_log
from tests.emulator.test_cli_emulate import EXCHANGE

RACY = EXCHANGE.replace("SYNC", "")
# What the schema of the standard (OASIS, SARIF 2.1.0) requires of the objects that are used here,
# and which properties it knows of them.
REQUIRED = {
    "log": ({"version", "runs"}, {"$schema"}),
    "run": ({"tool"}, {"results", "columnKind"}),
    "tool": ({"driver"}, set()),
    "driver": ({"name"}, {"rules"}),
    "rule": ({"id"}, {"shortDescription", "defaultConfiguration"}),
    "result": (
        {"message"},
        {"ruleId", "ruleIndex", "level", "locations", "partialFingerprints", "suppressions"},
    ),
    "suppression": ({"kind"}, {"justification"}),
    "location": (set(), {"physicalLocation", "logicalLocations"}),
    "physical": (set(), {"artifactLocation", "region"}),
}
LEVELS = {"none", "note", "warning", "error"}


def check(name: str, value: Any) -> None:
    """An object has what it must have, and nothing that the standard does not know."""
    required, known = REQUIRED[name]
    assert required <= value.keys() <= required | known, (name, sorted(value))


def check_log(log: Any) -> list[Any]:
    """Its results, after all was looked at."""
    check("log", log)
    assert log["version"] == "2.1.0"
    for run in log["runs"]:
        check("run", run)
        check("tool", run["tool"])
        driver = run["tool"]["driver"]
        check("driver", driver)
        for rule in driver["rules"]:
            check("rule", rule)
            assert rule["shortDescription"]["text"]
            assert rule["defaultConfiguration"]["level"] in LEVELS
        for result in run["results"]:
            check("result", result)
            assert result["message"]["text"] and result["level"] in LEVELS
            assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
            check_places(result)
    results: list[Any] = log["runs"][0]["results"]
    return results


def check_places(result: Any) -> None:
    """Of one result."""
    for location in result["locations"]:
        check("location", location)
        if "physicalLocation" in location:
            check("physical", location["physicalLocation"])
            uri = location["physicalLocation"]["artifactLocation"]["uri"]
            assert urlsplit(uri).scheme in ("", "file") and " " not in uri
            assert location["physicalLocation"].get("region", {"startLine": 1})["startLine"] >= 1
    for suppression in result.get("suppressions", []):
        check("suppression", suppression)
        assert suppression["kind"] in ("inSource", "external")


def test_findings_become_results(tmp_path: Path) -> None:
    """Kind, severity, place and message; paths below the folder are relative."""
    source = str(tmp_path / "my kernels" / "a.py")
    findings = [
        KernelFinding("race", "both write", 18, f"{source}:9", 0, 1, kernel="k", text="st.shared"),
        KernelFinding("race", "both write", 18, f"{source}:9", 5, 1, kernel="k", text="st.shared"),
        KernelFinding("deadlock", "nobody arrives"),
        KernelFinding("odd", "new", 3, "/elsewhere/b.py:0", excuse="unfenced-init"),
        KernelFinding("race", "style", 5, "/elsewhere/c.py:1", excuse="same-value"),
    ]
    accepted = [(KernelFinding("exit", "m", 7, kernel="k"), "exit:k")]
    results = check_log(sarif_log(findings, accepted, root=tmp_path, ptx_file=tmp_path / "k.ptx"))
    assert [r["ruleId"] for r in results] == ["race", "deadlock", "odd", "race", "exit"]
    assert [r["level"] for r in results] == ["warning", "error", "note", "note", "error"]
    places = [r["locations"][0]["physicalLocation"] for r in results]
    assert places[0]["artifactLocation"]["uri"] == "my%20kernels/a.py"
    assert places[0]["region"] == {"startLine": 9} and "region" not in places[2]
    assert places[2]["artifactLocation"]["uri"] == "file:///elsewhere/b.py"
    assert places[4]["artifactLocation"]["uri"] == "k.ptx"
    assert results[0]["message"]["text"] == (
        f"both write\nPTX line 18: st.shared\nCTA 0 warp 1\nPTX ISA 8.7.1: {KINDS['race'].why}"
    )
    assert results[4]["suppressions"] == [{"kind": "external", "justification": "exit:k"}]
    assert len({r["partialFingerprints"]["fa4Emulate/v1"] for r in results}) == 5
    assert check_log(sarif_log([])) == []


def test_the_check_notices_what_is_missing() -> None:
    """Each required property, left out."""
    for path in (("version",), ("runs", 0, "tool"), ("runs", 0, "results", 0, "message")):
        log: Any = sarif_log([KernelFinding("race", "m")])
        part = log
        for key in path[:-1]:
            part = part[key]
        del part[path[-1]]
        with pytest.raises((AssertionError, KeyError)):
            check_log(log)


def test_the_command_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a PTX file with lines of a source, findings that are accepted too."""
    monkeypatch.chdir(tmp_path)
    Path("racy.ptx").write_text(RACY)
    with pytest.raises(SystemExit):
        cli.main([
            "emulate", "racy.ptx", "--block", "64", "--ignore", "race", "--sarif", "out/a.sarif"
        ])  # fmt: skip
    assert "wrote out/a.sarif" in capsys.readouterr().out
    results = check_log(json.loads(Path("out/a.sarif").read_text()))
    kinds = {(r["ruleId"], "suppressions" in r) for r in results}
    assert kinds == {("race", True), ("uninitialised", False)}
    found = emulator.run_ptx(RACY, [], block=(64, 1, 1), collect=True).findings
    lines = {int(f.source.partition(":")[2]) for f in found}
    assert {r["locations"][0]["physicalLocation"]["region"]["startLine"] for r in results} == lines
