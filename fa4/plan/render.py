"""A `PipelinePlan` as Markdown and Mermaid: the tables, maps and graph that documentation shows.

The order is the plan's own everywhere, so that the same plan always gives the same text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fa4.plan.schema import (
    FOLLOWING,
    Amount,
    Arrive,
    Buffer,
    Copy,
    GlobalStore,
    Loop,
    Math,
    Mma,
    PipelinePlan,
    Program,
    Role,
    Signal,
    SmemAccess,
    Sync,
    TmemAccess,
    Wait,
    Work,
)

MAP_COLUMNS = 64  # characters that stand for the whole of a memory
UNITS = {"smem": "bytes", "tmem": "columns"}

Row = Sequence[object]


def render_plan(plan: PipelinePlan) -> str:
    """The whole plan as Markdown: roles, signals, memory, graph and programs."""
    parts = [
        f"# {plan.name}",
        f"{plan.warps} warps per CTA, {plan.cta_group} CTA(s) work together, "
        f"{plan.bytes_used('smem')} bytes of shared memory, "
        f"{plan.bytes_used('tmem')} columns of tensor memory.",
        "## Roles",
        render_roles(plan),
        "## Signals",
        render_signals(plan),
        "## Memory",
        render_memory(plan),
        "## Graph",
        f"```mermaid\n{render_graph(plan)}\n```",
        "## Programs",
        *(f"```text\n{render_program(role)}\n```" for role in plan.roles),
    ]
    return "\n\n".join(parts) + "\n"


def markdown_table(titles: Sequence[str], rows: Iterable[Row]) -> str:
    """A Markdown table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


ROLE_TITLES = ("role", "warps", "threads", "registers", "waits on", "arrives on")
SIGNAL_TITLES = ("signal", "kind", "stages", "arrivals", "count", "tx bytes", "waiters", "free")
BUFFER_TITLES = ("buffer", "space", "start", "stop", "size", "stages", "shares memory with")


def role_rows(plan: PipelinePlan) -> list[Row]:
    """One row per role for ROLE_TITLES."""
    rows: list[Row] = []
    for role in plan.roles:
        waits = [signal.name for signal in plan.signals if role.name in signal.waiters]
        arrives = [signal.name for signal in plan.signals if role.name in signal.arrivals]
        threads = 32 * len(role.warps)
        joined = (", ".join(waits) or "-", ", ".join(arrives) or "-")
        rows.append((role.name, span(role.warps), threads, role.registers, *joined))
    return rows


def signal_rows(plan: PipelinePlan) -> list[Row]:
    """One row per signal for SIGNAL_TITLES."""
    return [
        (
            signal.name,
            signal.kind + (", both CTAs" if signal.remote else ""),
            signal.stages,
            " + ".join(f"{name} {count}" for name, count in signal.arrivals.items()),
            signal.arrive_count,
            _transactions(signal),
            ", ".join(signal.waiters),
            signal.free,
        )
        for signal in plan.signals
    ]


def _transactions(signal: Signal) -> str:
    if not signal.tx_bytes:
        return "-"
    first = f" (first +{signal.first_tx_bytes})" if signal.first_tx_bytes else ""
    return f"{signal.tx_bytes}{first}"


def buffer_rows(plan: PipelinePlan) -> list[Row]:
    """One row per buffer for BUFFER_TITLES, by space and start."""
    return [
        (
            buffer.name,
            buffer.space,
            buffer.start,
            buffer.stop,
            buffer.size,
            buffer.stages,
            "; ".join(f"{name}: {why}" for name, why in buffer.overlaps.items()) or "-",
        )
        for buffer in _by_place(plan.buffers)
    ]


def span(warps: Sequence[int]) -> str:
    """0-3 for (0, 1, 2, 3); a list of numbers where they are not consecutive."""
    if len(warps) > 1 and list(warps) == list(range(warps[0], warps[0] + len(warps))):
        return f"{warps[0]}-{warps[-1]}"
    return ", ".join(map(str, warps))


def render_roles(plan: PipelinePlan) -> str:
    """Warps, registers and signals of each role."""
    return markdown_table(ROLE_TITLES, role_rows(plan))


def render_signals(plan: PipelinePlan) -> str:
    """Kind, stages, arrive counts and bytes of each signal."""
    return markdown_table(SIGNAL_TITLES, signal_rows(plan))


def render_memory(plan: PipelinePlan) -> str:
    """Both memories: a table of the buffers, and their places drawn to scale."""
    parts = [markdown_table(BUFFER_TITLES, buffer_rows(plan))]
    parts += [f"```text\n{draw_memory(plan, space)}\n```" for space in UNITS if _in(plan, space)]
    return "\n\n".join(parts)


def draw_memory(plan: PipelinePlan, space: str) -> str:
    """One memory as text: a line per buffer, below each other where they overlap.

    `#` marks memory of its own, `=` memory that the buffer shares with another one.
    """
    buffers, end = _in(plan, space), plan.bytes_used(space)
    if not buffers:
        return f"{space}: unused"
    width = max(len(buffer.name) for buffer in buffers)
    digits = len(str(end))
    lines = [f"{space}: {end} {UNITS[space]}"]
    for buffer in buffers:
        bar = [" "] * MAP_COLUMNS
        for cell in range(MAP_COLUMNS):
            low, high = cell * end / MAP_COLUMNS, (cell + 1) * end / MAP_COLUMNS
            if min(high, buffer.stop) - max(low, buffer.start) >= (high - low) / 2:
                shared = any(
                    other is not buffer and other.start < high and low < other.stop
                    and min(other.stop, buffer.stop) > max(other.start, buffer.start)
                    for other in buffers
                )  # fmt: skip
                bar[cell] = "=" if shared else "#"
        if not any(mark.strip() for mark in bar):  # thinner than half a character
            bar[min(MAP_COLUMNS - 1, buffer.start * MAP_COLUMNS // end)] = "|"
        place = f"[{buffer.start:>{digits}}, {buffer.stop:>{digits}})"
        lines.append(f"{buffer.name:<{width}} {place} |{''.join(bar)}|")
    return "\n".join(lines)


def _in(plan: PipelinePlan, space: str) -> list[Buffer]:
    return [buffer for buffer in _by_place(plan.buffers) if buffer.space == space]


def _by_place(buffers: Iterable[Buffer]) -> list[Buffer]:
    return sorted(buffers, key=lambda b: (b.space, b.start, -b.size * b.stages, b.name))


def render_graph(plan: PipelinePlan) -> str:
    """Roles as nodes and signals as edges from each arriver to each waiter, in Mermaid."""
    lines = ["flowchart LR"]
    lines += [f'    {role.name}["{role.name}<br/>{_warps(role)}"]' for role in plan.roles]
    edges: dict[tuple[str, str], list[str]] = {}
    for signal in plan.signals:
        for arriver in signal.arrivals:
            for waiter in signal.waiters:
                edges.setdefault((arriver, waiter), []).append(signal.name)
    for (arriver, waiter), names in edges.items():
        lines.append(f'    {arriver} -->|"{"<br/>".join(names)}"| {waiter}')
    return "\n".join(lines)


def _warps(role: Role) -> str:
    return f"warp {role.warps[0]}" if len(role.warps) == 1 else f"warps {span(role.warps)}"


def render_program(role: Role) -> str:
    """What a role does, one step per line, loop bodies indented."""
    lines = [f"{role.name} ({_warps(role)}, {role.registers} registers)"]
    if role.prologue:
        lines += ["  once per CTA:", *_steps(role.prologue, 2)]
    lines += ["  per work tile:", *_steps(role.program, 2)]
    if role.passing:
        lines += ["  for a tile that only others need:", *_steps(role.passing, 2)]
    if role.closing:
        lines += ["  at the end:", *_steps(role.closing, 2)]
    return "\n".join(lines)


def _steps(program: Program, depth: int) -> list[str]:
    lines, margin = [], "  " * depth
    for step in program:
        if isinstance(step, Loop):
            offset = f" {'-' if step.offset < 0 else '+'} {abs(step.offset)}" if step.offset else ""
            title = f"repeat {step.trip}{offset}"
            if step.trip == FOLLOWING:
                title = "if a work tile follows"
            lines += [f"{margin}{title}:", *_steps(step.body, depth + 1)]
        elif isinstance(step, Wait):
            lines.append(f"{margin}wait {step.signal}")
        elif isinstance(step, Arrive):
            after = f" after {step.after}" if step.after else ""
            lines.append(f"{margin}arrive {step.signal}{after}")
        else:
            lines.append(margin + describe_work(step))
    return lines


def describe_work(work: Work) -> str:
    """One piece of work in words: what, how much, from where to where."""
    text = f"{work.what}: {describe_amount(work.amount)}"
    if work.reads:
        text += f", reads {' '.join(work.reads)}"
    if work.writes:
        text += f", writes {' '.join(work.writes)}"
    if work.share:
        text += f", times {work.share}"
    return text + (", asynchronous" if work.asynchronous else "")


def describe_amount(amount: Amount) -> str:
    """An amount of work in a few words."""
    if isinstance(amount, Mma):
        pair = ", CTA pair" if amount.cta_group == 2 else ""
        return f"mma {amount.rows} x {amount.cols} x {amount.depth}{pair}"
    if isinstance(amount, Copy):
        return f"{amount.kind} {amount.num_bytes} B{' from HBM' if amount.cold else ''}"
    if isinstance(amount, TmemAccess):
        return f"tmem {amount.kind} {amount.cols} columns"
    if isinstance(amount, SmemAccess):
        return f"smem {amount.num_bytes} B"
    if isinstance(amount, GlobalStore):
        return f"global store {amount.num_bytes} B"
    if isinstance(amount, Math):
        used = [f"{pipe} {value:g}" for pipe, value in vars(amount).items() if value]
        return "math " + (" ".join(used) or "nothing") + " per thread"
    if isinstance(amount, Sync):
        return "barrier and fences" if amount.fenced else "barrier"
    return "poll a counter"
