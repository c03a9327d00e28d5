"""The report as HTML, JUnit XML, badge and JSON: complete, escaped, in need of nothing."""

from __future__ import annotations

import json
import re
import shlex
import time
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest

import fa4.cli
from fa4.testing import VerifyOptions, verify
from fa4.testing.html_report import again, html_report
from fa4.testing.report import VerifyReport
from fa4.testing.report_files import badge_svg, junit_xml
from fa4.testing.schema import FIELDS, fields_of

PLANTED = "tests.testing.planted"
ONLY = ("plain", "causal", "masked_nan")
NASTY = "<script>alert('x')</script> & \x00\x1b[31m]]>"
VOID = {"meta", "br", "img", "link", "input"}


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """A run with something of every status."""
    found = verify(f"{PLANTED}:reads_masked_keys", only=ONLY, quick=True)
    wrong = verify(f"{PLANTED}:sink_twice", only=("sink", "gqa", "dropout"), quick=True)
    data, other = found.as_dict(), wrong.as_dict()
    data["properties"] += other["properties"]
    data["failures"] += other["failures"]
    data["counts"] = {name: n + other["counts"][name] for name, n in data["counts"].items()}
    data["passed"] = False
    data["not_covered"] = {"softcap": NASTY}
    data["failures"][0]["error"] = NASTY
    return json.loads(json.dumps(data))


class Page(HTMLParser):
    """Tags of a page, which must be closed in order, its text and what it would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Remember it."""
        self.tags.append(tag)
        self.open += [tag] * (tag not in VOID)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "data")]

    def handle_endtag(self, tag: str) -> None:
        """It is the last that was opened."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Text."""
        self.text += data


def test_html_says_everything(report: dict[str, Any]) -> None:
    """Causes with programs, pairs of each output, what is not covered, all properties."""
    page = Page()
    page.feed(html_report(report))
    assert not page.open and "script" not in page.tags and not page.fetched
    assert not re.search(r"url\(|@import|https?:", html_report(report))
    for group in report["failures"]:
        for key in ("cause", "error", "example", "numpy", "torch", "test"):
            assert group[key].replace("\x00", "") in page.text.replace("\x00", ""), key
    for row in report["properties"]:
        assert row["name"] in page.text and row["description"] in page.text
    assert "may be left open: not robust" in page.text and NASTY[:8] in page.text
    kinds = [kind == " some" for kind in re.findall('class="cause(.*?)"', html_report(report))]
    assert kinds == [group["status"] != "failed" for group in report["failures"]]
    failed = sum(group["status"] == "failed" for group in report["failures"])
    more = f", and {len(report['failures']) - failed} that may be left open"
    assert f"failed, {failed} cause" in page.text and f"Causes ({failed}{more})" in page.text
    for name in ("O", "LSE", "dQ", "dK", "dV", "dsink"):
        assert name in page.text


def test_html_marks_pairs_that_were_judged_less_often(report: dict[str, Any]) -> None:
    """Than three times; the rarest levels of two features count."""
    for least, kind in ((2, "few"), (3, "enough"), (40, "enough")):
        pairs = {pair: 99 for pair in report["levels"]["pairs"]} | {"causal x softcap": least}
        page = html_report(report | {"levels": report["levels"] | {"pairs": pairs}})
        assert f'<td class="{kind}">{least}</td>' in page


def test_html_of_a_run_that_passed_or_judged_nothing() -> None:
    """The headline says which."""
    passed = html_report(verify("reference", only=("plain",), quick=True).as_dict())
    assert ">passed</span>" in passed and "Causes" not in passed
    nothing = verify(f"{PLANTED}:minimal", only=("causal",), quick=True).as_dict()
    assert "nothing could be checked" in html_report(nothing)


def test_junit(report: dict[str, Any]) -> None:
    """A test case per property, with the cause as the message of a failure."""
    suite = ElementTree.fromstring(junit_xml(report).encode()).find("testsuite")
    assert suite is not None
    rows = report["properties"]
    cases = {case.get("name"): case for case in suite}
    assert list(cases) == [row["name"] for row in rows]
    assert suite.get("failures") == str(report["counts"]["failed"])
    assert suite.get("skipped") == str(
        report["counts"]["not_covered"] + report["counts"]["not_robust"]
    )
    failure = cases["sink"].find("failure")
    assert failure is not None and failure.get("message", "").endswith("wrong with sink")
    assert "def test_sink" in str(failure.text)
    assert cases["causal"].find("failure") is None and cases["causal"].find("skipped") is None
    row = next(row for row in rows if row["status"] == "passed")
    row["status"], row["reason"] = "not covered", NASTY
    ElementTree.fromstring(junit_xml(report).encode())  # what XML cannot say is left out


def test_badge(report: dict[str, Any]) -> None:
    """Words and a colour for failed, passed, passed in part and nothing."""
    counts = {"passed": 3, "failed": 0, "not_covered": 0, "not_robust": 0}
    for changed, passed, words, color in (
        ({"failed": 2}, False, "2 of 5 failed", "#c62828"),
        ({}, True, "3 passed", "#2e7d32"),
        ({"not_covered": 4}, True, "3 of 7 passed", "#2e7d32"),
        ({"passed": 0, "not_covered": 4}, False, "nothing checked", "#c62828"),
    ):
        svg = badge_svg(report | {"passed": passed, "counts": counts | changed})
        root = ElementTree.fromstring(svg)
        assert words in "".join(root.itertext()) and color in svg
        boxes = [float(x.get("width", 0)) for x in root.findall(".//{*}rect")]
        middles = [float(x.get("x", 0)) for x in root.findall(".//{*}text")]
        left = boxes[0] - boxes[1]
        assert boxes[0] == float(root.get("width", 0))
        assert middles == [left / 2, left + boxes[1] / 2]


def test_every_field_is_documented(report: dict[str, Any]) -> None:
    """And none that is not there; `printed` and `files` are the command's."""
    assert set(fields_of(report)) | {"printed", "files"} == set(FIELDS)
    assert str(report["schema_version"]) in FIELDS["schema_version"]


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `fa4 verify`."""
    with pytest.raises(SystemExit) as caught:
        fa4.cli.main(["verify", *arguments])
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def test_files_of_the_command(capsys, tmp_path) -> None:
    """All three, of one run; the report names them."""
    files = {"html": tmp_path / "new/r.html", "junit": tmp_path / "r.xml",
             "badge": tmp_path / "r.svg"}  # fmt: skip
    options = [text for kind, path in files.items() for text in (f"--{kind}", str(path))]
    code, out, _ = run(capsys, "--only", "plain", "--quick", "--json", *options)
    data = json.loads(out)
    assert code == 0 and data["files"] == {kind: str(path) for kind, path in files.items()}
    assert files["html"].read_text() == html_report(data)
    assert files["junit"].read_text() == junit_xml(data)
    assert files["badge"].read_text() == badge_svg(data)


def test_what_the_function_prints_is_no_part_of_the_report(capfd) -> None:
    """Standard output is one JSON document; how much was printed is said."""
    with pytest.raises(SystemExit):
        fa4.cli.main(["verify", "--backend", "tests.testing.bad_results:prints", "--json",
                      "--only", "plain", "--quick"])  # fmt: skip
    data = json.loads(capfd.readouterr().out)
    assert data["passed"] and data["printed"]["lines"] > 20
    assert data["printed"]["first"] in ("loading kernel", "compiled in 3 s")


def test_silence_is_told(monkeypatch, capsys) -> None:
    """A call that hangs in this process cannot be ended; what helps is said while it does."""
    from fa4.commands import verify_run

    monkeypatch.setattr(verify_run, "SILENT_SECONDS", 0.01)
    err, end = "", time.monotonic() + 30
    with verify_run.told_of_silence(lambda *_: None) as tell:
        tell(1, 2, "plain")
        while "plain" not in err and time.monotonic() < end:
            time.sleep(0.01)
            err += capsys.readouterr().err
    assert "no property has ended for 0.01 s (behind plain)" in err and "--timeout 60" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--html", "r.pdf"], "--html must end in .html or .htm; got 'r.pdf'"),
        (["--junit", "r.json"], "--junit must end in .xml"),
        (["--badge", f"{__file__}/r.svg"], "Not a directory"),
        (["--corpus", "--html", "r.html"], "--html must be left out"),
    ],
)
def test_bad_files(capsys, options: list[str], message: str) -> None:
    """Refused before anything runs."""
    code, out, err = run(capsys, *options)
    assert code == 2 and out == "" and message in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "chosen",
    [
        [],
        ["--quick"],
        ["--only", "plain", "--only", "causal*", "--dtype", "fp32", "--seed", "7"],
        ["--only", "causal", "-x", "--strict", "--max-examples", "3"],
        ["--only", "cache_*", "--steps", "20"],
    ],
)
def test_the_command_of_a_report_draws_the_same(capsys, monkeypatch, chosen: list[str]) -> None:
    """What the HTML file says to run gives the same options, whichever the run had."""
    asked: list[Any] = []

    def judged(backend: str, options: Any, files: Any) -> dict[str, Any]:
        asked.append(options)
        return VerifyReport(
            backend=backend, max_examples=options.max_examples, seed=options.seed, results=(),
            seconds=0.0, words=options.words,
        ).as_dict()  # fmt: skip

    monkeypatch.setattr("fa4.commands.verify_run.run_suite", judged)
    _, out, _ = run(capsys, "--backend", "oracle", *chosen, "--json")
    command = shlex.split(again(json.loads(out)))
    assert command[:2] == ["fa4", "verify"]
    run(capsys, *command[2:], "--json")
    assert asked[0] == asked[1] and asked[0].steps == (20 if "--steps" in chosen else 12)


def test_calls_in_a_row_are_shown_as_a_test() -> None:
    """The fewest steps; a program of one call would not show them."""
    report = verify(f"{PLANTED}:sibling_is_ancestor", VerifyOptions(only=("speculative_tree",)))
    (failure,) = report.as_dict()["failures"]
    assert not failure["numpy"] and "session.propose(" in failure["test"]
    page = html_report(report.as_dict())
    assert "<summary>NumPy" not in page and "<details open><summary>as a test" in page
