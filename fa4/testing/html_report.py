"""A report as one HTML file that needs nothing else: what was drawn, what failed and why.

Made of what `VerifyReport.as_dict` gives, so that a stored JSON report can be shown too. Whatever a
function under test has said is escaped.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from fa4.testing.causes import OUTPUT_NAMES
from fa4.testing.levels import FEATURES, may_meet

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --bad: #c62828; --good: #2e7d32; --some: #b26a00 }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; margin-top: 2.2rem }
table { border-collapse: collapse; margin: .6rem 0 } th { text-align: left }
th, td { padding: .15rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top }
td.n { text-align: right; font-variant-numeric: tabular-nums }
pre { overflow-x: auto; padding: .7rem; background: #8881; border-radius: .3rem; font-size: 13px }
.bad { color: var(--bad) } .good { color: var(--good) } .some { color: var(--some) }
.cause { border-left: 4px solid var(--bad); padding: .1rem 1rem; margin: 1rem 0 }
.cause.some { border-color: var(--some); color: inherit } .cause h3 { margin: .4rem 0 }
.pairs td { text-align: center; min-width: 1.6rem; font-size: 12px } .pairs .none { color: #8886 }
.pairs .few { background: #c6282844 } .pairs .enough { background: #2e7d3233 }
.pairs thead th { writing-mode: vertical-rl; font-weight: normal } summary { cursor: pointer }
"""
_LEAST = 3  # cases of a pair, below which it is marked
_CLASSES = {"passed": "good", "failed": "bad", "not robust": "some"}


def html_report(report: Mapping[str, Any]) -> str:
    """The page; report: as `VerifyReport.as_dict` gives it."""
    name = escape(report["backend"])
    parts = [
        f"<h1>{name}: {_verdict(report)}</h1>",
        _summary(report),
        *_causes(report),
        *_drawn(report),
        *_not_covered(report),
        *_properties(report),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{name}: fa4 verify</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _verdict(report: Mapping[str, Any]) -> str:
    if report["passed"]:
        return '<span class="good">passed</span>'
    if not report["counts"]["failed"]:
        return '<span class="bad">nothing could be checked</span>'
    causes = sum(group["status"] == "failed" for group in report["failures"])
    return f'<span class="bad">failed, {causes} cause{"s" * (causes != 1)}</span>'


def _summary(report: Mapping[str, Any]) -> str:
    counts = report["counts"]
    words = ", ".join(f"{n} {status.replace('_', ' ')}" for status, n in counts.items() if n)
    skipped = f" {len(report['skipped'])} were not run." if report["skipped"] else ""
    return (
        f"<p>Properties: {words}.{skipped} {report['cases']:,} cases were judged in "
        f"{report['seconds']:.0f} s. Every element of each output was held against a float64 "
        "oracle, within twice the error of plain attention in the same element type and a band "
        f"for rounding.</p>\n<p>Again: <code>{escape(again(report))}</code></p>"
    )


def again(report: Mapping[str, Any]) -> str:
    """The command that draws the same cases."""
    return shlex.join(["fa4", "verify", "--backend", report["backend"], *report["words"]])


def _causes(report: Mapping[str, Any]) -> Iterable[str]:
    if report["failures"]:
        open_ones = sum(group["status"] != "failed" for group in report["failures"])
        more = f", and {open_ones} that may be left open" if open_ones else ""
        yield f"<h2>Causes ({len(report['failures']) - open_ones}{more})</h2>"
        yield (
            "<p>Features were left out one after another as long as the same output was wrong; "
            "failures that need the same ones are one cause.</p>"
        )
    for group in report["failures"]:
        names = group["properties"]
        listed = ", ".join(map(escape, names))
        kind = "" if group["status"] == "failed" else " some"
        yield f'<div class="cause{kind}"><h3>{escape(group["cause"])}</h3>'
        yield f"<p>{escape(group['error'])}</p>"
        yield f"<p>The smallest case found: <code>{escape(group['example'])}</code></p>"
        opened = " open"  # the first; calls that follow one another are shown as a test alone
        for title, key in (("NumPy", "numpy"), ("torch", "torch"), ("as a test", "test")):
            if group[key]:
                code = escape(group[key])
                yield f"<details{opened}><summary>{title}</summary><pre>{code}</pre></details>"
                opened = ""
        shown = f"{len(names)} properties show it" if len(names) > 1 else "one property shows it"
        mark = "" if group["status"] == "failed" else " (may be left open: not robust)"
        yield f"<details><summary>{shown}{mark}</summary><p>{listed}</p></details></div>"


def _drawn(report: Mapping[str, Any]) -> Iterable[str]:
    yield "<h2>What was drawn</h2>"
    yield _table(
        ("output", "pairs of feature levels", "judged at least three times", "rarest pair"),
        (
            (OUTPUT_NAMES[output], row["pairs"], row["pairs"] - len(row["few"]), row["least"])
            for output, row in report["coverage"].items()
        ),
    )
    few = {pair for row in report["coverage"].values() for pair in row["few"]}
    if few:
        yield (
            f"<details><summary>{len(few)} pairs were judged less often for some output</summary>"
            f"<p>{escape(', '.join(sorted(few)))}</p></details>"
        )
    yield "<p>Cases that were judged with both features, by their rarest levels:</p>"
    yield _matrix(report["levels"]["pairs"])


def _matrix(pairs: Mapping[str, int]) -> str:
    """Features against features."""
    names = list(FEATURES)
    head = "".join(f"<th>{escape(name)}</th>" for name in names[:-1])
    rows = []
    for at, row in enumerate(names[1:], 1):
        cells = "".join(_cell(pairs, row, column) for column in names[:at])
        rows.append(f"<tr><th>{escape(row)}</th>{cells}</tr>")
    return (
        f'<table class="pairs"><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _cell(pairs: Mapping[str, int], a: str, b: str) -> str:
    if not may_meet(a, b):
        return '<td class="none">·</td>'
    levels = [" x ".join(sorted((x, y))) for x in FEATURES[a] for y in FEATURES[b]]
    least = min(pairs.get(level, 0) for level in levels)
    return f'<td class="{"enough" if least >= _LEAST else "few"}">{least}</td>'


def _not_covered(report: Mapping[str, Any]) -> Iterable[str]:
    if report["not_covered"]:
        yield "<h2>Not covered</h2><p>What the function does not offer, which is not passed:</p>"
        yield _table(("what", "why"), report["not_covered"].items())


def _properties(report: Mapping[str, Any]) -> Iterable[str]:
    rows = sorted(report["properties"], key=lambda row: row["status"] == "passed")
    yield f"<h2>Properties ({len(rows)})</h2><details><summary>all of them</summary>"
    yield (
        "<table><tr><th>property</th><th>what must hold</th><th>result</th><th>cases</th>"
        "<th>error / budget</th><th>s</th></tr>"
    )
    for row in rows:
        share = "" if row["worst_share"] is None else f"{row['worst_share']:.3f}"
        why = f": {row['reason']}" if row["reason"] else ""
        yield (
            f"<tr><td>{escape(row['name'])}</td><td>{escape(row['description'])}</td>"
            f'<td class="{_CLASSES.get(row["status"], "")}">{escape(row["status"] + why)}</td>'
            f'<td class="n">{row["cases"]}</td><td class="n">{share}</td>'
            f'<td class="n">{row["seconds"]:.1f}</td></tr>'
        )
    yield "</table></details>"


def _table(heads: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="n">{cell:,}</td>' if isinstance(cell, int) else f"<td>{escape(cell)}</td>"
            for cell in row
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{top}</tr>{body}</table>"
