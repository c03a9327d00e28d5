"""A report for other programs: JUnit XML for CI, a badge for a page."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from typing import Any
from xml.etree import ElementTree

from fa4.testing.html_report import html_report

_NO_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_CHARACTER_WIDTH = 6.6  # px of a character of 11 px Verdana, a little wide
_COLORS = {True: "#2e7d32", False: "#c62828"}


def junit_xml(report: Mapping[str, Any]) -> str:
    """JUnit XML: a test case per property; what is not covered, or may be left open, is skipped.

    report: as `VerifyReport.as_dict` gives it.
    """
    causes = {name: group["cause"] for group in reversed(report["failures"])
              for name in group["properties"]}  # fmt: skip
    rows = report["properties"]
    failed = sum(row["status"] == "failed" for row in rows)
    suite = ElementTree.Element(
        "testsuite",
        name=_clean(f"fa4 verify {report['backend']}"),
        tests=str(len(rows)),
        failures=str(failed),
        errors="0",
        skipped=str(sum(row["status"] in ("not covered", "not robust") for row in rows)),
        time=f"{report['seconds']:.3f}",
    )
    for row in rows:
        case = ElementTree.SubElement(
            suite, "testcase", classname=_clean(f"fa4.{report['backend']}"), name=row["name"],
            time=f"{row['seconds']:.3f}",
        )  # fmt: skip
        if row["status"] == "failed":
            cause = causes.get(row["name"], row["error"])
            found = ElementTree.SubElement(case, "failure", message=_clean(cause))
            found.text = _clean(f"{row['error']}\n\n{row['test']}")
        elif row["status"] != "passed":
            reason = row["reason"] or row["error"]
            ElementTree.SubElement(case, "skipped", message=_clean(f"{row['status']}: {reason}"))
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, "unicode") + "\n"


def badge_svg(report: Mapping[str, Any]) -> str:
    """An SVG of one line: "fa4 verify | 320 passed", or how many causes failed."""
    counts = report["counts"]
    judged = counts["passed"] + counts["failed"]
    if report["passed"]:
        right = f"{counts['passed']} of {judged + counts['not_covered']} passed"
        if not counts["not_covered"]:
            right = f"{counts['passed']} passed"
    else:
        right = f"{counts['failed']} of {judged} failed" if judged else "nothing checked"
    left = "fa4 verify"
    widths = [round(len(text) * _CHARACTER_WIDTH) + 12 for text in (left, right)]
    total, color = sum(widths), _COLORS[bool(report["passed"])]
    title = escape(f"{report['backend']}: {right}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="20" role="img" '
        f'aria-label="{title}"><title>{title}</title>'
        f'<rect width="{total}" height="20" rx="3" fill="#555"/>'
        f'<rect x="{widths[0]}" width="{widths[1]}" height="20" rx="3" fill="{color}"/>'
        f'<g fill="#fff" font-family="Verdana,sans-serif" font-size="11" '
        f'text-anchor="middle"><text x="{widths[0] / 2}" y="14">{left}</text>'
        f'<text x="{widths[0] + widths[1] / 2}" y="14">{escape(right)}</text></g></svg>\n'
    )


def _clean(text: str) -> str:
    """Without characters that XML has no way to write."""
    return _NO_XML.sub("?", text)


WRITERS = {"html": html_report, "junit": junit_xml, "badge": badge_svg}
