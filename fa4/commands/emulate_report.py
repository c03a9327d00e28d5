"""What `fa4 emulate` prints for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fa4.commands import emulate_witness

if TYPE_CHECKING:
    from rich.table import Table

TOP_OPCODES, TOP_OF_A_ROLE, LISTED_OPCODES = 12, 4, 16
NAME_LENGTH = 60
MOST_SOURCES, MOST_RANGES = 4, 12


def render(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """The report for people: findings, what ran, what changed."""
    shape = " x ".join(str(tuple(report[name])) for name in ("grid", "block"))
    seeds = report["seeds"]
    order = report["schedule"]
    if order not in ("fifo", "replay"):
        order += f", seed {seeds[0]}" if len(seeds) == 1 else f", seeds {seeds[0]} to {seeds[-1]}"
    parts: list[Any] = [
        f"{_shortened(', '.join(report['kernels']))}: {shape} threads; schedule {order}"
        f"{'' if report['checks'] else '; without race checks'}",
        *(f"  {line}" for line in report["output"]),
        *render_findings(report["findings"]),
        render_opcodes(report),
        *(f"\n{render_coverage(one)}" for one in report["coverage"]),
        _table(("array", "type", "changed", "least", "most", "inf or NaN"), _array_rows(report)),
    ]
    parts += [
        f"{name} differs between seed {seeds[0]} and seed {seed}"
        for name, seed in report["differing"].items()
    ]
    parts += render_accepted(report)
    parts += [f"wrote {path}" for path in [*report["written"].values(), *report["reports"]]]
    if report["trace"]:
        parts.append(f"wrote {report['trace']}; open it at https://ui.perfetto.dev")
    parts += emulate_witness.render_steering(report["steering"])
    if report["witness"]:
        parts += emulate_witness.render(report["witness"])
    count = sum(finding["severity"] != "style" for finding in report["findings"])
    where = f" with seed {seeds[-1]}" if count and order not in ("fifo", "replay") else ""
    parts.append(f"{count or 'no'} finding{'s' if count != 1 else ''}{where}")
    return tuple(parts)


def render_findings(findings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each finding; of style, which fails nothing, a line."""
    style = [finding for finding in findings if finding["severity"] == "style"]
    shown = [render_finding(one) for one in findings if one["severity"] != "style"]
    places = [one["source"] or f"PTX line {one['line']}" for one in style]
    return shown + [
        f"\nstyle, {one['kind']} at {place}: {one['message'].rpartition('; ')[2]}"
        for one, place in zip(style, places, strict=True)
    ]


def render_finding(finding: Mapping[str, Any]) -> str:
    """Kind and message, then where: PTX line with its text, source line, CTA and warp."""
    hint = "\n    if it only takes long, raise --max-steps" * (finding["kind"] == "step-limit")
    where = f"PTX line {finding['line']}" if finding["line"] else "no PTX line"
    where += f": {finding['text']}" * bool(finding["text"])
    if finding["source"]:
        where += f"\n    from {finding['source']}"
    who = f"CTA {finding['cta']}" if finding["cta"] >= 0 else ""
    who += f" warp {finding['warp']}" if finding["warp"] >= 0 else ""
    who = f"\n    {who}" * bool(who)
    why = f"\n    {finding['severity']}; {finding['why']}"
    return f"\n{finding['kind']}: {finding['message']}\n    {where}{who}{why}{hint}"


def render_accepted(report: Mapping[str, Any]) -> list[str]:
    """Findings that rules or a baseline cover, a line each, and rules that cover nothing."""
    lines = [
        f"accepted ({one['reason']}): {one['kind']} at {one['source'] or one['line']}"
        for one in report["accepted"]
    ]
    return lines + [f"covers nothing: --ignore {rule}" for rule in report["unused_rules"]]


def render_coverage(coverage: Mapping[str, Any]) -> str:
    """How much of a kernel ran, and where what did not stands."""
    missed, total = coverage["missed"], coverage["instructions"]
    name = _shortened(coverage["kernel"])
    if not missed:
        return f"{name}: all of its {total} instructions ran{_one_way(coverage['branches'])}"
    lines = _lines(sorted({one["line"] for one in missed}))
    text = f"{name}: {coverage['reached']} of {total} instructions ran; not: PTX lines {lines}"
    if sources := sorted({one["source"] for one in missed if one["source"]}):
        shown = ", ".join(sources[:MOST_SOURCES])
        text += f"\n  of {shown}" + (", ..." if len(sources) > MOST_SOURCES else "")
    text += _one_way(coverage["branches"])
    if waits := sum(one["synchronises"] for one in missed):
        text += f"\n  {waits} of them synchronise: no fault there can be found by this run"
    return text


def _one_way(branches: Sequence[Mapping[str, Any]]) -> str:
    """How many branches went one way only, and where they stand."""
    reached = [branch for branch in branches if branch["taken"] is not None]
    if not reached:
        return ""
    lines = _lines(sorted({branch["line"] for branch in reached}))
    what = "branch" if len(reached) == 1 else "branches"
    return f"\n  {len(reached)} {what} went one way only: PTX lines {lines}"


def _lines(numbers: Sequence[int]) -> str:
    """Not all of them where they are in many places."""
    from fa4.emulator.machine.coverage import number_ranges

    return number_ranges(numbers, MOST_RANGES)


def render_opcodes(report: Mapping[str, Any]) -> str:
    """How much was executed, how fast, and of what."""
    top = list(report["instructions"].items())
    listed = [f"{opcode} {count}" for opcode, count in top[:TOP_OPCODES]]
    rest = sum(count for _, count in top[TOP_OPCODES:])
    lines = [
        f"\n{report['thread_instructions']} thread-instructions in {report['seconds']:.3f} s, "
        f"{report['thread_instructions_per_s'] / 1e6:.2f} M/s (loading: "
        f"{report['load_seconds']:.3f} s)",
        "  " + ", ".join(listed) + (f", others {rest}" if rest else ""),
    ]
    for role in report["roles"]:
        common = [f"{opcode} {n}" for opcode, n in list(role["top"].items())[:TOP_OF_A_ROLE]]
        warps = ", ".join(map(str, role["warps"]))
        lines.append(f"  warps {warps}: {role['name']}; {', '.join(common)}")
    return "\n".join(lines)


def _array_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for row in report["arrays"]:
        size = 1
        for extent in row["shape"]:
            size *= extent
        limits = ["-" if row[name] is None else f"{row[name]:g}" for name in ("min", "max")]
        shape = f"{row['dtype']}{row['shape']}"
        yield row["name"], shape, f"{row['changed']} of {size}", *limits, str(row["not_finite"])


def render_kernels(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """--list for people: one paragraph per kernel."""
    parts = [f"{report['file']}: PTX {report['version']} for {report['target']}"]
    for kernel in report["kernels"]:
        dynamic = " and dynamic" if kernel["uses_dynamic_smem"] else ""
        mix = [f"{opcode} {n}" for opcode, n in list(kernel["mix"].items())[:LISTED_OPCODES]]
        named = [f".{name} {', '.join(map(str, v))}" for name, v in kernel["directives"].items()]
        parts += [
            f"\n{kernel['name']}: {kernel['instructions']} instructions",
            *(f"  parameter {p['name'].removeprefix(kernel['name'] + '_')}: .{p['type']}, "
              f"{p['bytes']} bytes"
              for p in kernel["parameters"]),
            f"  shared memory: {kernel['static_smem_bytes']} bytes static{dynamic}",
            f"  registers: {', '.join(f'{n} {k}' for k, n in kernel['registers'].items())}",
            f"  directives: {'; '.join(named) or 'none'}",
            f"  {', '.join(mix)}{', ...' if len(kernel['mix']) > LISTED_OPCODES else ''}",
            *(f"  unsupported, line {p['line']}: {p['text']} ({p['reason']})"
              for p in kernel["unsupported"]),
        ]  # fmt: skip
    return tuple(parts)


def render_support(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """--support for people: the table, then how many rows rest on what."""
    rows = [(row["forms"], row["sections"], row["basis"]) for row in report["instructions"]]
    total = ", ".join(f"{count} {what}" for what, count in report["counts"].items())
    return _table(("instruction and forms", "PTX ISA", "confirmed by"), rows), total


def _shortened(name: str) -> str:
    """CuTe-DSL's kernel names hold the types of all arguments."""
    return name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 3]}..."


def _table(headings: Sequence[str], rows: Any) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(*headings, box=SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    return table
