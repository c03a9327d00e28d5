"""What a simulator has to beat: a roofline formula with eight parameters, and a random forest.

Both see the rows that the simulator's constants are fitted to, and predict the same other rows. The
forest needs scikit-learn (the extra `records`), which nothing else here does.
"""

from __future__ import annotations

import math

import numpy as np

from fa4.sim.measurements import Row

PEAK, SMS = 2.25e15, 148
# Shares of the peak forward and backward, us of a work tile, us of a call; factors of the time: a
# fixed order of sums, pairs in the forward pass, a mask, half the head dim.
START = (0.7, 0.65, 1.0, 5.0, 1.2, 1.1, 1.05, 1.3)
FIRM = 1e-3  # pull to the start: of what no row tells
TREES = 500


def flops_of(row: Row) -> int:
    """What the row's throughput counts."""
    problem = row.problem
    return problem.backward_flops if row.direction == "bwd" else problem.forward_flops


def formula_times(rows: list[Row], parameters: np.ndarray) -> np.ndarray:
    """Seconds by the formula."""
    forward, backward, per_tile_us, call_us, fixed_order, pair, masked, half_dim = parameters
    times = []
    for row in rows:
        problem, is_backward = row.problem, row.direction == "bwd"
        tiles = (
            problem.batch * problem.heads_q * -(-problem.seqlen_q // (128 if is_backward else 256))
        )
        seconds = flops_of(row) / (PEAK * (backward if is_backward else forward))
        seconds += (tiles / SMS * per_tile_us + call_us) * 1e-6
        seconds *= fixed_order if "deterministic" in row.software else 1.0
        seconds *= pair if "2-CTA" in row.software and not is_backward else 1.0
        seconds *= masked if problem.causal else 1.0
        times.append(seconds * half_dim ** math.log2(128 / problem.head_dim))
    return np.array(times)


def fit_formula(rows: list[Row]) -> np.ndarray:
    """The formula's parameters with the least squares of logarithms (Gauss-Newton)."""
    at = np.array(START)
    measured = np.array([flops_of(row) / row.tflops / 1e12 for row in rows])
    for _ in range(30):
        missed = np.log(formula_times(rows, at) / measured)
        slopes = np.stack([
            (np.log(formula_times(rows, at + step) / measured) - missed) / step.sum()
            for step in np.diag(0.001 * at)
        ], axis=1)  # fmt: skip
        held = np.vstack([slopes * at, FIRM * np.eye(len(at))])
        moved = -FIRM * np.log(at / np.array(START))
        move = np.linalg.lstsq(held, np.concatenate([-missed, moved]), rcond=None)[0]
        at = at * np.exp(np.clip(move, -0.5, 0.5))
    return at


def by_formula(rest: list[Row], out: list[Row]) -> np.ndarray:
    """TFLOP/s of the rows `out`, by the formula fitted to the rest."""
    flops = np.array([flops_of(row) for row in out])
    return flops / formula_times(out, fit_formula(rest)) / 1e12


def by_forest(rest: list[Row], out: list[Row]) -> np.ndarray:
    """The same by a random forest on the logarithm of throughput."""
    from sklearn.ensemble import RandomForestRegressor

    forest = RandomForestRegressor(n_estimators=TREES, random_state=0)
    forest.fit([_features(row) for row in rest], np.log([row.tflops for row in rest]))
    return np.exp(forest.predict([_features(row) for row in out]))


def _features(row: Row) -> list[float]:
    problem, name = row.problem, row.software
    return [
        float(row.direction == "bwd"),
        float(problem.causal),
        math.log2(problem.seqlen_q),
        math.log2(problem.batch * problem.heads_q),
        float(problem.head_dim),
        float(problem.head_dim_v),
        float("deterministic" in name),
        float("2-CTA" in name),
        float(row.gpu == "GB300"),
        math.log2(flops_of(row)),
    ]


def score(rows: list[Row], tflops: np.ndarray) -> dict[str, float | int]:
    """Mean and worst error in percent, and the rank correlation with what was measured."""
    measured = np.array([row.tflops for row in rows])
    missed = tflops / measured - 1.0
    ranks = [np.argsort(np.argsort(values, kind="stable")) for values in (measured, tflops)]
    rank = float(np.corrcoef(ranks)[0, 1]) if len(rows) > 1 else 1.0
    return {
        "points": len(rows),
        "mape_percent": round(100 * float(np.abs(missed).mean()), 2),
        "bias_percent": round(100 * float(missed.mean()), 2),
        "worst_percent": round(100 * float(missed[np.argmax(np.abs(missed))]), 2),
        "rank_correlation": round(rank, 3),
    }
