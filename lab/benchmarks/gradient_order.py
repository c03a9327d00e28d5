"""Which order of work tiles keeps L2 warm, and SMs busy, in Hopper's gradients: a model.

The random calls of `fa4 bench --random --backward` on an H100 and an H200, up to head dim 128 and
under a mask, each by every order: how many rounds of CTAs the last heads have whose longest tiles
begin first (`LAST_ROUNDS`), and whether CTAs walk the queries of a group's heads back together or
forwards, one head behind the other. An SM that
has ended a work tile takes the next one; steps take as long in all. L2 holds what it can of Q, dO
and dQ in float32, in tiles of 64 queries, and forgets what was used least recently.

Assumed: 60% of an H100's L2 for these; a step of 64 queries takes 2 us with more than 96 columns,
1.5 with more than 64, else 1.1; a work tile's end takes 0.65 steps; of steps and memory the longer
one counts whole, and a quarter of the other one. So only large differences mean something.
Usage: python -m lab.benchmarks.gradient_order [--output FILE]
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from statistics import geometric_mean
from typing import Any

import numba as nb
import numpy as np

from fa4.config import Problem
from fa4.hardware import H100
from fa4.plan.warpgroup_backward import LAST_ROUNDS
from fa4.plan.warpgroup_key_parts import KeyCtas, key_parts, seen_tiles
from lab.benchmarks.common import parse_output, write_record
from lab.records import read_record

RECORDS, MOST_STEPS = ("hopper_random_gradients", "hopper_random_gradients_h100"), 3e6
ROWS, KEYS, NARROW = 64, 128, 128  # of a query tile, of a KV tile; the widest head
L2_SHARE, END_STEPS, HIDDEN = 0.6, 0.65, 0.25
STEP_US = ((96, 2.0), (64, 1.5), (0, 1.1))  # columns above, microseconds
EXTRA_BYTES = 8  # of Q and dO in 16 bits, dQ in 32, by column
WRITTEN = 1.5  # bytes moved for each that is read: dQ, half of all, goes back
ROUNDS = (0, 1, 2)
WAYS = "forwards", "back"


@nb.njit(cache=True)
def run_list(
    tiles: np.ndarray, spans: np.ndarray, members: int, row_tiles: int, places: int, back: bool,
    sms: int,
) -> tuple[float, int]:  # fmt: skip
    """(steps until the last SM is done, query tiles that came into L2).

    tiles: (block, head) in their order. spans: of each block, the first query tile and one past the
    last. members: heads of a group; row_tiles: query tiles of a head; places: of L2.
    """
    count = row_tiles * members * (tiles[:, 1].max() + 1)
    head, tail = count, count + 1  # of a list, the latest first
    after, before = np.full(count + 2, -1), np.full(count + 2, -1)
    after[head], before[tail] = tail, head
    held, loads, end, given = 0, 0, 0.0, 0
    mine, done = np.full(sms, -1), np.zeros(sms, np.int64)
    due = [(0.0, sm) for sm in range(sms)]
    while due:
        now, sm = heapq.heappop(due)
        block = tiles[mine[sm], 0] if mine[sm] >= 0 else 0
        start, length = spans[block, 0], spans[block, 1] - spans[block, 0]
        if mine[sm] < 0 or done[sm] == members * length:
            if given == len(tiles):
                end = max(end, now)
                continue
            mine[sm], done[sm] = given, 0
            given += 1
            heapq.heappush(due, (now + END_STEPS, sm))
            continue
        step = done[sm]
        done[sm] += 1
        member, row = step // length, start + step % length
        if back:
            member, row = step % members, start + length - 1 - step // members
        key = (tiles[mine[sm], 1] * members + member) * row_tiles + row
        if before[key] >= 0:
            after[before[key]], before[after[key]] = after[key], before[key]
        else:
            loads, held = loads + 1, held + 1
            if held > places:
                oldest = before[tail]
                after[before[oldest]], before[tail] = tail, before[oldest]
                before[oldest], held = -1, held - 1
        following = after[head]
        after[head], before[key], after[key], before[following] = key, head, following, key
        heapq.heappush(due, (now + 1.0, sm))
    return end, loads


def order_tiles(heads: int, blocks: int, last: int) -> np.ndarray:
    """(block, head) of each work tile, the longest of the last heads first."""
    first = heads - min(last, heads)
    by_head = [(b, h) for h in range(first) for b in range(blocks)]
    return np.array(by_head + [(b, h) for b in range(blocks) for h in range(first, heads)])


def members_of(problem: Problem) -> int:
    """Query heads that a CTA has of a group."""
    p, group = problem, problem.heads_q // problem.heads_k
    tiles, longest = seen_tiles(p.seqlen_q, p.seqlen_k, p.window_size, KEYS)
    ctas = -(-p.seqlen_k // KEYS) * p.heads_k * p.batch
    work = KeyCtas(ctas=ctas, group=group, tiles=tiles, longest=longest)
    return group // key_parts(work, H100.sm_count)


def kernels_order(problem: Problem) -> tuple[int, bool]:
    """As `fa4.sm90.backward.order` has it."""
    shares = members_of(problem) > 1
    return LAST_ROUNDS[shares], shares and problem.window_size[0] is None


def judge(problem: Problem, rounds: int, back: bool) -> float:
    """Microseconds of a call by an order."""
    p, sms, members = problem, H100.sm_count, members_of(problem)
    left, right = p.window_size
    blocks, row_tiles = -(-p.seqlen_k // KEYS), -(-p.seqlen_q // ROWS)
    start = np.arange(0, p.seqlen_k, KEYS) - (p.seqlen_k - p.seqlen_q)
    first = np.clip(start - (right or 0), 0, p.seqlen_q) // ROWS
    stop = np.full(blocks, row_tiles)
    if left is not None:
        stop = np.maximum(first, -(-np.clip(start + KEYS + left, 0, p.seqlen_q) // ROWS))
    cols = (p.head_dim + p.head_dim_v) // 2
    tile_bytes = ROWS * cols * EXTRA_BYTES
    heads = p.batch * p.heads_q // members
    ordered = order_tiles(heads, blocks, -(-rounds * sms // blocks))
    steps, loads = run_list(
        ordered, np.stack([first, stop], axis=1), members, row_tiles,
        int(L2_SHARE * H100.l2_bytes / tile_bytes), back, sms,
    )  # fmt: skip
    computing = steps * next(us for least, us in STEP_US if cols > least)
    memory = loads * tile_bytes * WRITTEN / H100.hbm_bytes_per_s * 1e6
    return max(computing, memory) + HIDDEN * min(computing, memory)


def kind_of(problem: Problem) -> str:
    """In what the orders differ most."""
    if problem.window_size[0] is not None:
        return "windows"
    return "grouped heads" if members_of(problem) > 1 else "heads by themselves"


def calls_of(record: str) -> Iterator[Problem]:
    """The record's that the narrow kernel has, under a mask, not the largest."""
    for row in read_record(record)["rows"]:
        p = Problem(**{**row["problem"], "window_size": tuple(row["problem"]["window_size"])})
        steps = p.batch * p.heads_q * p.seqlen_q * p.seqlen_k / (ROWS * KEYS)
        masked, narrow = p.window_size[1] is not None, max(p.head_dim, p.head_dim_v) <= NARROW
        if masked and narrow and steps <= MOST_STEPS:
            yield p


def compare_orders() -> dict[str, Any]:
    """Of each kind of calls, times by each order, by those of the kernel's."""
    orders = {f"{n} rounds, {WAYS[back]}": (n, back) for back in (False, True) for n in ROUNDS}
    found: dict[str, list[list[float]]] = {}
    for p in (p for record in RECORDS for p in calls_of(record)):
        own = judge(p, *kernels_order(p))
        found.setdefault(kind_of(p), []).append([judge(p, *x) / own for x in orders.values()])
    return {
        kind: {
            "calls": len(rows),
            "times": {
                name: {"mean": geometric_mean(ratios), "most": max(ratios)}
                for name, ratios in zip(orders, zip(*rows, strict=True), strict=True)
            },
        }
        for kind, rows in sorted(found.items())
    }


if __name__ == "__main__":
    options = parse_output(__doc__ or "", "gradient_order")
    report = compare_orders()
    for kind, one in report.items():
        print(f"{kind}, {one['calls']} calls, times by the kernel's order:")
        for order, time in one["times"].items():
            print(f"  {order}: {time['mean']:.3f} in the mean, at most {time['most']:.2f}")
    write_record(options.output, report, ("numpy", "numba"))
