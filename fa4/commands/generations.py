"""`fa4 generations`: standard attention and FlashAttention 1 to 4 on one problem, side by side.

Exactness against the float64 oracle, HBM traffic, exponentials and rescales as each paper's
algorithm has them, and the memory that its NumPy form allocates.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from fa4.commands import emit
from fa4.commands.outliers import ROWS, compare_outliers, render_outliers

if TYPE_CHECKING:
    from fa4.reference import ForwardResult

T = TypeVar("T")

DTYPES = ("bf16", "fp16", "fp32", "fp64")

MOST_SRAM_KIB = 2**30  # 1 TiB, far beyond any chip

# Score elements of all heads: the oracle holds about six float64 matrices of them, here 3 GiB.
MOST_SCORES = 2**26
MOST_BLOCKS = 2**16  # of one generation, visited in a Python loop: about half a minute


def generations(
    seqlen: Annotated[
        int | None,
        typer.Option(help="Queries and keys.", show_default="1024; with --outliers 8192"),
    ] = None,
    heads: Annotated[int, typer.Option(help="Query and KV heads.")] = 2,
    head_dim: Annotated[
        int | None,
        typer.Option(
            help="Elements of a query, key or value.", show_default="64; with --outliers 128"
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Input type: bf16, fp16, fp32 or fp64.")] = "bf16",
    causal: Annotated[bool, typer.Option("--causal", help="Hide later keys.")] = False,
    sram_kib: Annotated[int, typer.Option(help="On-chip memory that sizes fa1's blocks.")] = 192,
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
    outliers: Annotated[
        bool,
        typer.Option("--outliers", help="Errors of FP8 on data with outliers, as FA3's paper."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Compare standard attention and FlashAttention 1 to 4: error, traffic, exps and rescales.

    Example: fa4 generations --seqlen 2048 --causal --sram-kib 64
    """
    usual = (8192, 128) if outliers else (1024, 64)
    problem: dict[str, Any] = {
        "seqlen": usual[0] if seqlen is None else seqlen,
        "heads": heads,
        "head_dim": usual[1] if head_dim is None else head_dim,
        "dtype": dtype,
        "causal": causal,
        "sram_bytes": sram_kib * 1024,
        "seed": seed,
    }
    if outliers:
        check_outliers(problem)
        emit(compare_outliers(problem), as_json, render_outliers)
        return
    check(problem)
    emit(compare(problem), as_json, render)


def check_outliers(problem: Mapping[str, Any]) -> None:
    """Refuse sizes that are never computed, and options that say nothing of this comparison."""
    from fa4.config import require

    usual = {"dtype": "bf16", "causal": False, "sram_bytes": 192 * 1024}
    spellings = {"dtype": "--dtype", "causal": "--causal", "sram_bytes": "--sram-kib"}
    for name, spelling in spellings.items():
        if problem[name] != usual[name]:
            raise ValueError(
                f"--outliers compares element types without a mask: leave out {spelling}"
            )
    check_sizes(problem)
    scores = problem["heads"] * ROWS * problem["seqlen"]
    rule = f"heads * {ROWS} * seqlen must be at most {MOST_SCORES} with --outliers"
    require(scores <= MOST_SCORES, rule, scores)


def check_sizes(problem: Mapping[str, Any]) -> None:
    """Refuse numbers that are none of a length, heads, a head dim and a seed."""
    from fa4.config import require_int

    require_int("seqlen", problem["seqlen"], 1)
    require_int("heads", problem["heads"], 1)
    require_int("head_dim", problem["head_dim"], 1, 1024)
    require_int("seed", problem["seed"], 0)


def check(problem: Mapping[str, Any]) -> None:
    """Refuse sizes and types that no generation computes, with one line each."""
    from fa4.config import require, require_int

    check_sizes(problem)
    require(problem["dtype"] in DTYPES, f"dtype must be one of {DTYPES}", problem["dtype"])
    require_int("sram_kib", problem["sram_bytes"] // 1024, 1, MOST_SRAM_KIB)
    scores = problem["heads"] * problem["seqlen"] * max(problem["seqlen"], problem["head_dim"])
    rule = f"heads * seqlen * (seqlen or head_dim) must be at most {MOST_SCORES}"
    require(scores <= MOST_SCORES, rule, scores)
    check_blocks(problem)


def check_blocks(problem: Mapping[str, Any]) -> None:
    """Refuse on-chip memory that holds no block, or so small ones that walking them never ends."""
    from fa4.config import DTYPE_BITS
    from fa4.reference.generations import Flash1Config, Flash2Config

    heads, seqlen, dim = (problem[name] for name in ("heads", "seqlen", "head_dim"))
    kib, item_bytes = problem["sram_bytes"] // 1024, DTYPE_BITS[problem["dtype"]] // 8
    try:
        blocks = Flash1Config(sram_bytes=problem["sram_bytes"]).block_sizes(dim, dim, item_bytes)
        tiles = Flash2Config.for_sram(problem["sram_bytes"], 2 * dim, item_bytes)
    except ValueError as error:
        raise ValueError(f"--sram-kib {kib} is too small: {error}") from None
    shapes = ((1, *blocks), (heads, tiles.tile_m, tiles.tile_n))
    count = max(n * -(-seqlen // rows) * -(-seqlen // cols) for n, rows, cols in shapes)
    if count > MOST_BLOCKS:
        raise ValueError(
            f"--sram-kib {kib} makes {count} blocks of {heads} heads of {seqlen} x {seqlen} "
            f"scores; at most {MOST_BLOCKS} are walked: raise it or lower --seqlen"
        )


def compare(problem: Mapping[str, Any]) -> dict[str, Any]:
    """The report as plain data: the problem and one row per generation, oldest first."""
    import numpy as np

    from fa4.dtypes import round_to
    from fa4.oracle import attend_batch
    from fa4.reference import Attention
    from fa4.reference.generations import GENERATIONS, run_generation

    rng = np.random.default_rng(problem["seed"])
    shape = (1, problem["seqlen"], problem["heads"], problem["head_dim"])
    q, k, v = (round_to(rng.standard_normal(shape), problem["dtype"]) for _ in range(3))
    spec = Attention(
        softmax_scale=problem["head_dim"] ** -0.5,
        window=(None, 0 if problem["causal"] else None),
    )
    oracle = attend_batch(q, k, v, spec.keywords)
    rows = []
    for generation in GENERATIONS.values():
        run = partial(run_generation, generation.name, sram_bytes=problem["sram_bytes"])
        result, peak_bytes = with_peak(partial(run, q, k, v, spec))
        errors = errors_against(oracle, result)
        work = result.counters.as_dict() | {"emulated_share": result.counters.emulated_share}
        about = {"generation": generation.name, "title": generation.title}
        rows.append(about | errors | work | {"peak_memory_bytes": peak_bytes})
    return {"problem": dict(problem), "generations": rows}


def errors_against(oracle: tuple[Any, Any], result: ForwardResult) -> dict[str, float]:
    """Largest absolute errors of O and of the LSE; oracle is (out, lse)."""
    import numpy as np

    return {
        "max_error_out": float(np.abs(result.out.astype(np.float64) - oracle[0]).max()),
        "max_error_lse": float(np.abs(result.lse.astype(np.float64) - oracle[1]).max()),
    }


def with_peak(call: Callable[[], T]) -> tuple[T, int]:
    """What `call` returns, and the most bytes allocated at once during it (results included)."""
    already = tracemalloc.is_tracing()
    if not already:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        result = call()
        return result, tracemalloc.get_traced_memory()[1] - before
    finally:
        if not already:
            tracemalloc.stop()


def render(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """The report for people: one table, and what its columns count."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    problem = report["problem"]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("error O", "of LSE", "HBM MB", "exps", "emul.", "rescales", "GFLOP", "mem MB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in report["generations"]:
        possible = row["rescales_done"] + row["rescales_skipped"]
        table.add_row(
            row["generation"],
            f"{row['max_error_out']:.1e}",
            f"{row['max_error_lse']:.1e}",
            f"{(row['hbm_read_bytes'] + row['hbm_write_bytes']) / 1e6:.2f}",
            f"{row['exps'] / 1e6:.2f} M",
            f"{row['emulated_share']:.1%}",
            f"{row['rescales_done']}/{possible}",
            f"{row['matmul_flops'] / 1e9:.2f}",
            f"{row['peak_memory_bytes'] / 1e6:.2f}",
        )
    mask = "causal" if problem["causal"] else "no mask"
    sizes = f"seqlen {problem['seqlen']}, {problem['heads']} heads, head dim {problem['head_dim']}"
    return (
        f"{sizes}, {problem['dtype']}, {mask}, SRAM {problem['sram_bytes'] // 1024} KiB",
        table,
        "errors: largest, against the float64 oracle\n"
        "HBM: read and written by the paper's algorithm\n"
        "emul.: share of exponentials computed by polynomial\n"
        "rescales: done/possible, one per warp of 32 rows and KV tile after the first\n"
        "GFLOP: matrix products\n"
        "mem: peak allocation of the NumPy form, results included",
    )
