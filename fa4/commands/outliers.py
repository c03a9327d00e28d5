"""`fa4 generations --outliers`: FlashAttention-3's comparison of errors on data with outliers.

N(0, 1) + N(0, 100) Bernoulli(0.001), arXiv 2407.08608, section 4.3: root mean square errors of
16-bit attention, of FP8 with one scale per tensor, and of FlashAttention-3's FP8 with and without
each of its two means, for several numbers of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from fa4.reference import Attention

ROWS = 256  # queries: rows are independent, and their number only makes means sharper
SHARES = (8, 2, 1)  # of --seqlen: the numbers of keys
PAPER_FACTOR = 2.6  # arXiv 2407.08608, abstract: FP8 with both means against FP8 without
RARE, SIZE = 0.001, 10.0  # probability and standard deviation of an outlier

BASELINE, BOTH = "fp8, one scale per tensor", "fa3-fp8"


def compare_outliers(problem: Mapping[str, Any]) -> dict[str, Any]:
    """The report as plain data: for each method its errors, one for each number of keys.

    problem: seqlen, heads, head_dim and seed, as `fa4 generations` checks them.
    """
    counts = sorted({max(1, problem["seqlen"] // share) for share in SHARES})
    errors: dict[str, list[float]] = {}
    for keys in counts:
        for name, error in _errors(problem, keys).items():
            errors.setdefault(name, []).append(error)
    factors = [a / b for a, b in zip(errors[BASELINE], errors[BOTH], strict=True)]
    rows = [{"method": name, "rmse": found} for name, found in errors.items()]
    return {
        "problem": {name: problem[name] for name in ("seqlen", "heads", "head_dim", "seed")},
        "rows": ROWS,
        "keys": counts,
        "methods": rows,
        "factors": factors,
        "paper_factor": PAPER_FACTOR,
    }


def draw_outliers(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """The paper's distribution."""
    rare = rng.random(shape) < RARE
    return rng.standard_normal(shape) + SIZE * rng.standard_normal(shape) * rare


def _errors(problem: Mapping[str, Any], keys: int) -> dict[str, float]:
    """Root mean square errors against the float64 oracle, inputs in fp16."""
    import numpy as np

    from fa4.dtypes import round_to
    from fa4.oracle import attend_batch
    from fa4.reference import Attention

    rng = np.random.default_rng([problem["seed"], keys])
    heads, dim = problem["heads"], problem["head_dim"]
    rows = min(ROWS, keys)
    shapes = [(1, length, heads, dim) for length in (rows, keys, keys)]
    q, k, v = (round_to(draw_outliers(rng, shape), "fp16") for shape in shapes)
    spec = Attention(softmax_scale=dim**-0.5, window=(None, None))
    oracle = attend_batch(q, k, v, spec.keywords)[0]
    return {
        name: float(np.sqrt(np.mean((run(q, k, v, spec).astype(np.float64) - oracle) ** 2)))
        for name, run in _methods().items()
    }


def _methods() -> dict[str, Callable[..., Any]]:
    """Each method's O for q, k, v in fp16."""
    from fa4.reference.generations import Flash3Fp8Config, run_generation

    def in_16_bits(generation: str) -> Callable[..., Any]:
        def run(q: Any, k: Any, v: Any, spec: Attention) -> Any:
            return run_generation(generation, q, k, v, spec).out

        return run

    def in_8_bits(**changes: Any) -> Callable[..., Any]:
        config = Flash3Fp8Config(**changes)

        def run(q: Any, k: Any, v: Any, spec: Attention) -> Any:
            wide = [x.astype("float32") for x in (q, k, v)]  # so that O is not rounded
            return run_generation("fa3-fp8", wide[0], wide[1], wide[2], spec, config=config).out

        return run

    return {
        "fp16, standard": in_16_bits("standard"),
        "fp16, fa3": in_16_bits("fa3"),
        BASELINE: in_8_bits(scales="tensor", incoherent=False),
        BOTH: in_8_bits(),
        "fa3-fp8 without block scales": in_8_bits(scales="tensor"),
        "fa3-fp8 without rotation": in_8_bits(incoherent=False),
    }


def render_outliers(report: Mapping[str, Any]) -> tuple[Any, ...]:
    """The report for people: a table, and why the factor is what it is."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("root mean square error of O", no_wrap=True)
    for keys in report["keys"]:
        table.add_column(f"{keys} keys", justify="right", no_wrap=True)
    for row in report["methods"]:
        table.add_row(row["method"], *(f"{error:.1e}" for error in row["rmse"]))
    table.add_section()
    table.add_row(f"{BASELINE} / {BOTH}", *(f"{factor:.1f}" for factor in report["factors"]))
    problem = report["problem"]
    return (
        f"{report['rows']} queries, {problem['heads']} heads, head dim {problem['head_dim']}, "
        f"N(0, 1) with outliers of {SIZE:g} in one of {1 / RARE:g} elements, inputs in fp16",
        table,
        f"The paper's abstract says {report['paper_factor']}. The factor grows with the keys and "
        "with the head dim, where both Q and K have\noutliers: it is one if only V has. In some "
        "rows those of Q and K meet, and one key takes much of the probability;\nthe more keys, "
        "the more such rows. With the rotation errors stay the same.",
    )
