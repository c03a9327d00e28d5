"""`fa4 cache`: the compiled kernels on disk: list them, delete them, make the common ones."""

from __future__ import annotations

import multiprocessing
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fa4.commands import emit
from fa4.commands.compile import ARCH_HELP, FLAVOUR_HELP, table

if TYPE_CHECKING:
    from fa4.compiled.cache import Entry, KernelCache

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
SHOWN_KEY = 12  # digits of a key that are shown to people

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Pattern = Annotated[
    str,
    typer.Argument(help="Beginning of a key, or a part of the description.", show_default="all"),
]
Age = Annotated[str, typer.Option(metavar="TIME", help="Only older ones: 30m, 12h, 7d, 4w.")]

cache = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="""List, delete or make the compiled kernels that are kept on disk.

They are in FA4_CACHE_DIR, else in fa4 under XDG_CACHE_HOME, else in ~/.cache/fa4. FA4_CACHE=0
switches the cache off.

Example: fa4 cache ls
""",
)


@cache.command()
def ls(as_json: Json = False) -> None:
    """List the compiled kernels, the newest first, and say which are damaged.

    Example: fa4 cache ls
    """
    found = opened()
    entries = found.entries(whole=True)
    emit(report_of(found, entries), as_json, render_entries)


@cache.command()
def clear(
    pattern: Pattern = "",
    older_than: Age = "",
    as_json: Json = False,
) -> None:
    """Delete compiled kernels: all, or those of a pattern or an age.

    Exit code 1 if one of them cannot be deleted.

    Example: fa4 cache clear causal --older-than 7d
    """
    age = seconds_of(older_than) if older_than else 0.0
    found = opened()
    tried = found.clear(pattern, age)
    emit(report_of(found, tried), as_json, render_cleared)
    if any(entry.problem for entry in tried):
        raise typer.Exit(1)


@cache.command()
def warm(
    arch: Annotated[str, typer.Option(help=ARCH_HELP)] = "sm_100a",
    flavour: Annotated[str, typer.Option(help=FLAVOUR_HELP)] = "",
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; default: cores.")] = None,
    as_json: Json = False,
) -> None:
    """Compile the common kernels that are not in the cache yet, in parallel.

    Head dims 64, 128 and (192, 128), bf16 and fp16, with and without causal mask. Exit code 1 if
    one of them does not compile.

    Example: fa4 cache warm --arch sm_103a --jobs 4
    """
    from fa4.commands.doctor import describe_machine

    opened()
    check(arch, flavour)
    start = time.perf_counter()
    rows = list(make_all(arch, flavour, jobs or describe_machine()["cores"] or 1))
    failed = [row for row in rows if row["problem"]]
    report = {"arch": arch, "seconds": time.perf_counter() - start, "kernels": rows}
    emit(report, as_json, render_warmed)
    if failed:
        raise typer.Exit(1)


def opened() -> KernelCache:
    """The cache. Raises ValueError if it is off."""
    from fa4.compiled.cache import open_cache

    found = open_cache()
    if found is None:
        raise ValueError("the cache of compiled kernels is off (FA4_CACHE) or has no folder")
    return found


def check(arch: str, flavour: str) -> None:
    """Raises what is wrong with the options, before processes are started."""
    from fa4.compiled.toolchain import find_toolchain, select_flavour
    from fa4.compiled.variants import GPUS

    if arch not in GPUS:
        raise ValueError(f"arch must be one of {', '.join(GPUS)}; got {arch!r}")
    if flavour:
        select_flavour(flavour)
    else:
        find_toolchain()


def seconds_of(text: str) -> float:
    """Seconds of "30m", "12h", "7d", "4w" or "90s"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text)
    if match is None:
        raise ValueError(
            f"--older-than must be a number and one of {', '.join(UNITS)}, as in 7d; got {text!r}"
        )
    return float(match[1]) * UNITS[match[2]]


def report_of(found: KernelCache, entries: Sequence[Entry]) -> dict[str, Any]:
    """The entries as plain data."""
    rows = [
        {
            "key": entry.key,
            "arch": entry.header.get("arch"),
            "spec": entry.text,
            "compiler": entry.header.get("metadata", {}).get("compiler"),
            "size_bytes": entry.size_bytes,
            "age_seconds": entry.age_seconds,
            "problem": entry.problem,
        }
        for entry in entries
    ]
    return {"folder": found.folder, "kernels": rows}


def make_all(arch: str, flavour: str, jobs: int) -> Iterator[dict[str, Any]]:
    """Builds the common kernels; shows progress on a terminal."""
    from rich.progress import Progress

    from fa4.compiled.variants import GPUS, common_specs

    count = len(list(common_specs(GPUS[arch])))
    pool = _pool(min(jobs, count))
    try:
        with Progress(transient=True, console=_stderr()) as progress:
            task = progress.add_task("compiling", total=count)
            futures = [pool.submit(make_one, arch, flavour, index) for index in range(count)]
            for future in as_completed(futures):
                progress.advance(task)
                yield future.result()
    finally:  # after Ctrl-C the processes end with this one, in the middle of their kernels
        pool.shutdown(wait=False, cancel_futures=True)


def make_one(arch: str, flavour: str, index: int) -> dict[str, Any]:
    """Builds one of the common kernels, in a process of the pool."""
    import warnings

    from fa4.compiled.build import build
    from fa4.compiled.identity import describe, spec_text
    from fa4.compiled.toolchain import select_flavour
    from fa4.compiled.variants import GPUS, common_specs

    spec = list(common_specs(GPUS[arch]))[index]
    started, start = time.time(), time.perf_counter()
    row = {"spec": spec_text(describe(spec)), "key": "", "made": False, "problem": ""}
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        try:
            if flavour:
                select_flavour(flavour)
            artifact = build(spec, arch)
        except Exception as error:  # of the compiler, whatever it raises: the others go on
            first = str(error).strip().partition("\n")[0]
            row["problem"] = f"{type(error).__name__}: {first}"
        else:
            row |= {"key": artifact.key, "made": artifact.metadata["created"] >= started}
    row["notes"] = [str(note.message) for note in notes]
    return row | {"seconds": time.perf_counter() - start}


def render_entries(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """The list for people."""
    rows = [
        (
            row["key"][:SHOWN_KEY],
            row["arch"] or "-",
            (row["compiler"] or {}).get("flavour", "-"),
            row["spec"],
            f"{row['size_bytes'] / 1e6:.2f} MB",
            age_text(row["age_seconds"]),
        )
        for row in report["kernels"]
    ]
    problems = [f"{row['key']}: {row['problem']}" for row in report["kernels"] if row["problem"]]
    total = sum(row["size_bytes"] for row in report["kernels"]) / 1e6
    summary = f"{report['folder']}: {count_text(rows)}, {total:.1f} MB"
    if not rows:
        return (summary,)
    return table(("key", "arch", "compiler", "spec", "size", "age"), rows), *problems, summary


def render_cleared(report: Mapping[str, Any]) -> str:
    """How much was deleted, and what could not be."""
    rows = [row for row in report["kernels"] if not row["problem"]]
    total = sum(row["size_bytes"] for row in rows) / 1e6
    left = [f"not deleted: {row['problem']}" for row in report["kernels"] if row["problem"]]
    return "\n".join([*left, f"{report['folder']}: deleted {count_text(rows)}, {total:.1f} MB"])


def render_warmed(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """What was made and what was there, with the time of each."""
    rows = [
        (
            row["key"][:SHOWN_KEY] or "-",
            row["spec"],
            row["problem"] or ("compiled" if row["made"] else "was there"),
            f"{row['seconds']:.2f} s",
        )
        for row in report["kernels"]
    ]
    notes = dict.fromkeys(note for row in report["kernels"] for note in row["notes"])
    return (
        table(("key", "spec", "result", "time"), rows),
        *(f"note: {note}" for note in notes),
        f"{count_text(rows)} for {report['arch']} in {report['seconds']:.1f} s",
    )


def count_text(rows: Sequence[Any]) -> str:
    """ "1 kernel", "2 kernels"."""
    return f"{len(rows)} kernel{'s' * (len(rows) != 1)}"


def age_text(seconds: float) -> str:
    """The largest unit that fits: "5 m", "3 d"."""
    fitting = [name for name, size in UNITS.items() if seconds >= size] or ["s"]
    return f"{seconds / UNITS[fitting[-1]]:.0f} {fitting[-1]}"


def _pool(jobs: int) -> Executor:
    """Processes that begin anew: forked ones would inherit a half-started compiler."""
    from fa4.sim.sweep import prepare_worker

    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(jobs, mp_context=spawn, initializer=prepare_worker)


def _stderr() -> Any:
    from rich.console import Console

    return Console(stderr=True)
