"""The "why" of a prediction on the screen and as plain data: `fa4 predict`, `ablate`, `sweep`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from fa4.sim.elasticity import Elasticities
    from fa4.sim.why import Why

BAR_COLUMNS, FULL_BAR = 30, 0.1  # a change of the time by 10% fills a bar
CHAIN_WIDTHS = (12, 32, 10)  # of role, work and unit
REASONS = {"role": "next", "unit": "unit was busy", "signal": "signal"}


def why_report(why: Why) -> dict[str, Any]:
    """All of it as plain data."""
    chain, best, gain = why.chain, why.best, why.gain
    return {
        **limit_report(why.elasticities),
        "chain": None if chain is None else {
            "cycles": chain.cycles, "steps": chain.steps, "settled": chain.settled,
            "rows": [asdict(row) for row in chain.rows],
        },
        "best_change": None if best is None else {
            "change": best.change, "speedup": best.speedup, "error": why.error,
            "within_error": None if why.error is None else gain <= why.error,
            "speedup_interval": why.interval and [why.interval.least, why.interval.most],
            "undecided": why.interval and why.interval.undecided,
        },
        "neighbours": [asdict(found) for found in why.neighbours],
    }  # fmt: skip


def limit_report(found: Elasticities) -> dict[str, Any]:
    """What the time depends on, as plain data."""
    from fa4.sim.why import limited_by, say_limit

    return {
        "limited_by": limited_by(found),
        "limit": say_limit(found),
        "elasticities": [asdict(row) for row in found.rows],
        "elasticity_sum": found.total,
        "elasticity_noise": found.noise,
        "neutral": list(found.neutral),
        "simulations": found.simulations,
    }


@contextmanager
def why_progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr for simulations (done, in all); nothing if stderr is no terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("what the time depends on", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def limit_of(settings: Mapping[str, object]) -> str | None:
    """What limits a call, in words; None if it has too many work tiles to ask, or none."""
    from fa4.sim.options import build
    from fa4.sim.why import MOST_WORK_TILES, elasticities, say_limit

    request = build(settings)
    if not 0 < request.predict().work_tiles <= MOST_WORK_TILES:
        return None
    with why_progress() as progress:
        return say_limit(elasticities(request, progress))


def render_why(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """The section of the screen: the largest elasticities, the chain, the best change."""
    from fa4.sim.why import TOP

    rows = report["elasticities"]
    shown = [row for row in rows if row["value"] > report["elasticity_noise"]][:TOP]
    rest = sum(row["used"] for row in rows) - len(shown)
    noise = report["elasticity_noise"] / 10
    parts: list[Any] = [
        f"\nlonger by, if a unit needs 10% more cycles, a latency is 10% longer or an efficiency "
        f"smaller (noise "
        f"{noise:.1%})",
        *((_slopes(shown),) if shown else ()),
        f"{rest}{' more matter less' if shown else ' do not stand out'}; all together "
        f"{report['elasticity_sum'] / 10:.1%}",
    ]
    if report["chain"] is not None:
        parts += render_chain(report["chain"])
    return (*parts, "\n" + say_best(report))


def _slopes(rows: list[Mapping[str, Any]]) -> Table:
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    for row in rows:
        change = row["value"] / 10
        filled = min(BAR_COLUMNS, round(change / FULL_BAR * BAR_COLUMNS))
        bar = "#" * filled + "." * (BAR_COLUMNS - filled)
        grid.add_row(row["name"], f"{bar} {change:5.1%}")
    return grid


def render_chain(chain: Mapping[str, Any]) -> Iterator[Any]:
    """The chain, a line for each stretch in the order of one role or of one unit."""
    from rich.table import Table

    many = "one step" if chain["steps"] == 1 else f"{chain['steps']} steps"
    steady = "" if chain["settled"] else ", not settled"
    yield f"\ncritical chain of {many}, {chain['cycles']:.0f} cycles{steady}"
    table = Table.grid(padding=(0, 2))
    for width in CHAIN_WIDTHS:
        table.add_column(max_width=width, overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for stretch in stretches(chain["rows"]):
        table.add_row(*stretch)
    yield table


def stretches(rows: list[Mapping[str, Any]]) -> Iterator[tuple[str, str, str, str, str]]:
    """(role, works, unit, cycles, why then) of rows in the order of one role, or of one unit."""
    together: list[Mapping[str, Any]] = []
    for row in rows:
        if together and not _goes_on(together, row):
            yield _stretch(together)
            together = []
        together.append(row)
    if together:
        yield _stretch(together)


def _goes_on(together: list[Mapping[str, Any]], row: Mapping[str, Any]) -> bool:
    """Does a row follow those in the program of their role, or in the queue of their unit?"""
    last = together[-1]
    if row["reason"] == "role":
        return all(x["role"] == row["role"] for x in together)
    return row["reason"] == "unit" and all(x["unit"] == row["unit"] for x in together) and (
        len(together) == 1 or last["reason"] == "unit"
    )  # fmt: skip


def _stretch(rows: list[Mapping[str, Any]]) -> tuple[str, str, str, str, str]:
    names = Counter(row["what"] for row in rows)
    roles = Counter(row["role"] for row in rows)
    units = dict.fromkeys(row["unit"] for row in rows if row["unit"])
    words = ", ".join(name if count == 1 else f"{count} {name}" for name, count in names.items())
    return (", ".join(roles), words, " ".join(units), f"{sum(row['cycles'] for row in rows):.0f}",
            REASONS[rows[0]["reason"]])  # fmt: skip


def say_best(report: Mapping[str, Any]) -> str:
    """The best single change, and how many neighbours were tried."""
    tried = report["neighbours"]
    refused = sum(found["speedup"] is None for found in tried)
    count = f"{len(tried) - refused} neighbours tried, {refused} do not fit"
    best = report["best_change"]
    if best is None:
        return f"best single change: none is faster ({count})"
    error = "the error is unknown"
    if best["error"] is not None:
        where = "within" if best["within_error"] else "beyond"
        error = f"{where} {best['error']:.0%}, the error of a ratio (nine of ten predictions)"
    gain = f"{best['speedup'] - 1:+.0%}"
    if best["speedup_interval"] is not None:
        least, most = best["speedup_interval"]
        verdict = "undecided, " if best["undecided"] else ""
        gain += f" ({verdict}{least - 1:+.0%} to {most - 1:+.0%} by all constants)"
    return f"best single change: {best['change']}: {gain}, {error} ({count})"
