"""What of a source ran, line by line: as text and as a page of HTML."""

from __future__ import annotations

import html
import linecache
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fa4.emulator.execute import load_program
from fa4.emulator.machine.coverage import KernelCoverage, MissedInstruction, OneWayBranch

_WAYS = {True: "always taken", False: "never taken"}


@dataclass
class LineCoverage:
    """The instructions of one line. total: how many it has. missed: those that never ran.
    branches: those that went one way."""

    total: int = 0
    missed: list[MissedInstruction] = field(default_factory=list)
    branches: list[OneWayBranch] = field(default_factory=list)

    @property
    def state(self) -> str:
        """ "ran", "partly" or "not"."""
        if len(self.missed) == self.total:
            return "not"
        return "partly" if self.missed or self.branches else "ran"

    def remarks(self) -> Iterator[str]:
        """What did not run, an instruction or a branch each."""
        for one in self.missed:
            why = "predicate false for all lanes" if one.skipped else "not reached"
            what = "; synchronises: no fault there can be found" if one.synchronises else ""
            yield f"PTX line {one.line}: {one.text} ({why}{what})"
        for branch in self.branches:
            way = "not reached" if branch.taken is None else _WAYS[branch.taken]
            yield f"PTX line {branch.line}: {branch.text} ({way})"


@dataclass
class FileCoverage:
    """Of a source file, or of a kernel's PTX that has none (path: the kernel's name).

    texts: of all lines, as far as they can be read.
    """

    path: str
    texts: list[str]
    lines: dict[int, LineCoverage] = field(default_factory=dict)

    def counts(self) -> dict[str, int]:
        """How many lines with instructions are in each state."""
        counts = dict.fromkeys(("ran", "partly", "not"), 0)
        for line in self.lines.values():
            counts[line.state] += 1
        return counts


def by_file(coverages: Iterable[KernelCoverage]) -> list[FileCoverage]:
    """What launches covered, by the files that kernels were made from.

    An instruction of several kernels, or versions of one, counts in each: it ran where all did.
    """
    files: dict[str, FileCoverage] = {}
    for coverage in coverages:
        program = load_program(coverage.ptx, coverage.kernel)
        place_of: dict[tuple[int, str], tuple[str, int]] = {}
        for instruction in program.kernel.instructions:
            place = instruction.location or (coverage.kernel, instruction.written_line)
            place_of[instruction.written_line, instruction.text] = place
            if place[0] not in files:
                own = coverage.ptx.split("\n") if instruction.location is None else None
                files[place[0]] = FileCoverage(place[0], own or _texts(place[0]))
            files[place[0]].lines.setdefault(place[1], LineCoverage()).total += 1
        for missed in coverage.missed:
            path, line = place_of[missed.line, missed.text]
            files[path].lines[line].missed.append(missed)
        for branch in coverage.one_way:
            path, line = place_of[branch.line, branch.text]
            files[path].lines[line].branches.append(branch)
    return sorted(files.values(), key=lambda file: file.path)


def _texts(path: str) -> list[str]:
    return [line.rstrip("\n") for line in linecache.getlines(path)]


def as_text(files: Iterable[FileCoverage]) -> str:
    """A paragraph for each file: the lines that did not run, or in part, with what did not."""
    return "".join(f"{line}\n" for file in files for line in _paragraph(file))


def _paragraph(file: FileCoverage) -> Iterator[str]:
    counts = file.counts()
    yield (
        f"{file.path}: of {len(file.lines)} lines with instructions {counts['ran']} ran, "
        f"{counts['partly']} in part, {counts['not']} not"
    )
    for number, line in sorted(file.lines.items()):
        if line.state != "ran":
            done = line.total - len(line.missed)
            yield f"  line {number}: {done} of {line.total} instructions ran"
            yield from (f"    {remark}" for remark in line.remarks())


_STYLE = """
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; color-scheme: light dark; }
table { border-collapse: collapse; font: 13px/1.35 ui-monospace, monospace; }
td { padding: 0 .6em; vertical-align: top; white-space: pre-wrap; }
td.n, td.c { text-align: right; opacity: .7; }
tr.ran { background: #2a85; } tr.partly { background: #da35; } tr.not { background: #d445; }
summary { cursor: pointer; }
"""


def as_html(files: Iterable[FileCoverage]) -> str:
    """A page that stands alone: each line of each file, coloured by what of it ran."""
    sections = "".join(map(_section, files))
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>What ran</title>"
        f"<style>{_STYLE}</style></head><body>\n<h1>What ran</h1>\n"
        "<p>Green: all instructions of the line ran. Yellow: a part, or a branch went one way. "
        "Red: none. No finding says anything of what did not run.</p>\n"
        f"{sections}</body></html>\n"
    )


def _section(file: FileCoverage) -> str:
    counts = file.counts()
    texts = file.texts or [""] * max(file.lines, default=0)
    rows = []
    for number, text in enumerate(texts, 1):
        line = file.lines.get(number)
        shown = html.escape(text)
        if line is None:
            rows.append(f"<tr><td class='n'>{number}</td><td></td><td>{shown}</td></tr>\n")
            continue
        remarks = "\n".join(map(html.escape, line.remarks()))
        if remarks:
            shown = f"<details><summary>{shown}</summary>{remarks}</details>"
        done = line.total - len(line.missed)
        rows.append(
            f"<tr class='{line.state}'><td class='n'>{number}</td>"
            f"<td class='c'>{done}/{line.total}</td><td>{shown}</td></tr>\n"
        )
    listed = ", ".join(f"{count} {state}" for state, count in counts.items())
    name = html.escape(str(Path(file.path)))
    return f"<h2>{name}</h2>\n<p>Lines: {listed}</p>\n<table>\n{''.join(rows)}</table>\n"
