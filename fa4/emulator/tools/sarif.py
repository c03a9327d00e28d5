"""Findings as SARIF 2.1.0: what code hosts show beside the lines of a change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fa4.emulator.accepted import fingerprint, place_of
from fa4.emulator.errors import KernelFinding
from fa4.emulator.kinds import KINDS, kind_of

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {"error": "error", "hazard": "warning", "formal": "note", "style": "note"}


def sarif_log(
    findings: Sequence[KernelFinding],
    accepted: Iterable[tuple[KernelFinding, str]] = (),
    *,
    ptx_file: Path | None = None,
    root: Path | None = None,
) -> dict[str, Any]:
    """The log of one run, as plain data.

    accepted: findings that are suppressed, and what suppresses each. ptx_file: where PTX lines are,
    of kernels without lines of a source. root: paths below it are written relative to it (default:
    the working directory).
    """
    folder = (root or Path()).resolve()
    # One result for a finding that several launches made.
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for finding, reason in [*((one, "") for one in findings), *accepted]:
        result = _result(finding, reason, ptx_file, folder)
        rows.setdefault((finding.kind, str(result["locations"])), result)
    kinds = [*KINDS, *sorted({f.kind for f in findings} - KINDS.keys())]
    for row in rows.values():
        row["ruleIndex"] = kinds.index(row["ruleId"])
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": {"name": "fa4 emulate", "rules": [_rule(k) for k in kinds]}},
                "columnKind": "unicodeCodePoints",
                "results": list(rows.values()),
            }
        ],
    }


def _rule(name: str) -> dict[str, Any]:
    kind = kind_of(name)
    section = f" (PTX ISA {kind.section})" if kind.section else ""
    return {
        "id": name,
        "shortDescription": {"text": f"{kind.why}{section}"},
        "defaultConfiguration": {"level": _LEVELS[kind.severity]},
    }


def _result(
    finding: KernelFinding, reason: str, ptx_file: Path | None, root: Path
) -> dict[str, Any]:
    path, line = place_of(finding)
    if not finding.source:
        path = str(ptx_file) if ptx_file is not None else ""
    location: dict[str, Any] = {}
    if path:
        location["physicalLocation"] = {"artifactLocation": {"uri": _uri(path, root)}}
        if line > 0:
            location["physicalLocation"]["region"] = {"startLine": line}
    if finding.kernel:
        location["logicalLocations"] = [{"name": finding.kernel, "kind": "function"}]
    who = f"CTA {finding.cta}" * (finding.cta >= 0)
    who += f" warp {finding.warp}" * (finding.warp >= 0)
    where = f"PTX line {finding.line}: {finding.text}" if finding.line else ""
    text = "\n".join(filter(None, [finding.message, where, who, finding.why]))
    result: dict[str, Any] = {
        "ruleId": finding.kind,
        "level": _LEVELS[finding.severity],
        "message": {"text": text},
        "locations": [location] if location else [],
        "partialFingerprints": {"fa4Emulate/v1": fingerprint(finding)},
    }
    if reason:
        result["suppressions"] = [{"kind": "external", "justification": reason}]
    return result


def _uri(path: str, root: Path) -> str:
    """Relative below the root, else a file URI."""
    full = (root / path).resolve()
    if full.is_relative_to(root):
        return quote(full.relative_to(root).as_posix())
    return full.as_uri()
