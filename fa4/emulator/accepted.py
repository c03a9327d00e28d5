"""Findings that a user has looked at and accepts: rules, files of rules, and baselines.

A rule is KIND, KIND:FILE or KIND:FILE:LINE. KIND may be `*`, `style` or `formal`. FILE is a source
file, its last parts or a pattern of either; for kernels without lines of a source it is the
kernel's name, and LINE that of the PTX. A baseline lists what a run found, to be told from what a
later run finds: it knows a finding by its kind and the text of its source line, so that lines may
move.
"""

from __future__ import annotations

import hashlib
import json
import linecache
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fa4.emulator.errors import KernelFinding, LaunchError
from fa4.emulator.kinds import KINDS, SEVERITIES

BASELINE_VERSION = 1
EXCUSED = SEVERITIES[:2]  # those that a rule may name instead of a kind


@dataclass(frozen=True, kw_only=True)
class AcceptRule:
    """text: as written. kind: of findings, or one of EXCUSED, or "*". file: a pattern, "*" for all.
    line: 0 for all."""

    text: str
    kind: str
    file: str
    line: int

    def covers(self, finding: KernelFinding) -> bool:
        """Whether it accepts a finding."""
        if self.kind not in ("*", finding.kind, finding.severity):
            return False
        file, line = place_of(finding)
        if self.line not in (0, line):
            return False
        return self.file == "*" or any(
            fnmatchcase(file, pattern) for pattern in (self.file, f"*/{self.file}")
        )


def place_of(finding: KernelFinding) -> tuple[str, int]:
    """(source file, its line); without lines of a source (kernel, PTX line)."""
    file, _, line = finding.source.rpartition(":")
    return (file, int(line)) if file else (finding.kernel, finding.line)


def parse_rule(text: str) -> AcceptRule:
    """Raises LaunchError for what is no rule."""
    kind, _, rest = text.strip().partition(":")
    file, colon, last = rest.rpartition(":")
    if not colon or not last.isdigit():
        file, last = rest, "0"
    allowed = (*KINDS, *EXCUSED)
    if kind != "*" and kind not in allowed:
        listed = ", ".join(allowed)
        raise LaunchError(f"ignore {text!r}: no finding is called {kind!r}; {listed} are")
    if rest and not file:
        raise LaunchError(f"ignore {text!r}: expected KIND, KIND:FILE or KIND:FILE:LINE")
    return AcceptRule(text=text.strip(), kind=kind, file=file or "*", line=int(last))


def read_rules(path: Path) -> list[AcceptRule]:
    """The rules of a file, one on a line; `#` begins a comment. Raises LaunchError."""
    rules = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        if text := line.partition("#")[0].strip():
            try:
                rules.append(parse_rule(text))
            except LaunchError as error:
                raise LaunchError(f"{path} line {number}: {error}") from None
    return rules


def fingerprint(finding: KernelFinding) -> str:
    """16 hexadecimal digits that stay as lines move, and change with the text of the line."""
    file, line = place_of(finding)
    if finding.source:
        text = linecache.getline(file, line).strip() or finding.text
        parts = [finding.kind, Path(file).name, text]
    else:
        parts = [finding.kind, finding.kernel, finding.text]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def write_baseline(findings: Iterable[KernelFinding]) -> str:
    """The text of a baseline of these findings."""
    entries = {}
    for finding in findings:
        file, line = place_of(finding)
        entries[fingerprint(finding)] = {
            "fingerprint": fingerprint(finding),
            "kind": finding.kind,
            "severity": finding.severity,
            "file": Path(file).name if finding.source else file,
            "line": line,
            "message": finding.message,
        }
    rows = sorted(entries.values(), key=lambda row: (row["file"], row["line"], row["kind"]))
    return json.dumps({"version": BASELINE_VERSION, "findings": rows}, indent=2) + "\n"


def read_baseline(path: Path) -> frozenset[str]:
    """The fingerprints in a baseline. Raises LaunchError for a file that is none."""
    try:
        document: Any = json.loads(_read(path))
        version, rows = document["version"], document["findings"]
        known = frozenset(str(row["fingerprint"]) for row in rows)
    except (ValueError, KeyError, TypeError):
        raise LaunchError(f"{path} is no baseline: --write-baseline writes one") from None
    if version != BASELINE_VERSION:
        raise LaunchError(f"{path} has version {version}; this reads {BASELINE_VERSION}")
    return known


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise LaunchError(f"{path}: {reason}") from None


@dataclass(frozen=True)
class Accepted:
    """What is accepted: such findings fail nothing and are listed by themselves.

    rules: of the user. known: fingerprints in a baseline. used: texts of the rules that have
    covered a finding, for `unused`.
    """

    rules: tuple[AcceptRule, ...] = ()
    known: frozenset[str] = frozenset()
    used: set[str] = field(default_factory=set, compare=False)

    @classmethod
    def of(
        cls,
        ignore: Iterable[str] = (),
        files: Iterable[str | Path] = (),
        baseline: str | Path | None = None,
    ) -> Accepted:
        """Of rules, files of rules, and a baseline. Raises LaunchError for what is none."""
        rules = [parse_rule(text) for text in ignore]
        for path in files:
            rules += read_rules(Path(path))
        known = read_baseline(Path(baseline)) if baseline is not None else frozenset()
        return cls(tuple(rules), known)

    def reason(self, finding: KernelFinding) -> str:
        """Why a finding is accepted: a rule's text, "baseline", or "" if it is not."""
        for rule in self.rules:
            if rule.covers(finding):
                self.used.add(rule.text)
                return rule.text
        return "baseline" if self.known and fingerprint(finding) in self.known else ""

    def unused(self) -> list[str]:
        """Rules that have covered nothing."""
        return [rule.text for rule in self.rules if rule.text not in self.used]
