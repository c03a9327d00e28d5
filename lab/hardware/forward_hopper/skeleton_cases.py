"""Calls of the forward kernel on a Hopper GPU, and what they give by definition.

With "products", plain instructions stand in for the tensor core; without, products are left out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lab.hardware.forward_hopper.skeleton_ptx import tmem_value

TILE = 128
OUTPUTS = ("o", "lse")
REPEATS, SLOW_REPEATS = 200, 20  # launches of a case, which must all give the same bits


def cases() -> dict[str, dict[str, Any]]:
    """By name: fields of the spec, sizes of the call, and the number of SMs that it is told.

    kernel: the name of another one than the forward kernel.
    """
    return {
        "d64": {
            "spec": {"head_dim": 64, "head_dim_v": 64},
            "lengths": [(700, 500)] * 2, "heads": (2, 2), "sms": 4,
        },
        "causal": {
            "spec": {"head_dim": 128, "head_dim_v": 128, "causal": True, "scheduler": "lpt"},
            "lengths": [(600, 900)] * 2, "heads": (3, 3), "sms": 132,
        },
        "packed causal": {
            "spec": {"head_dim": 128, "head_dim_v": 128, "causal": True, "packed_q": True,
                     "packed_k": True, "group": 2},
            "lengths": [(300, 700), (1, 130), (0, 50), (513, 257)], "heads": (4, 2), "sms": 3,
        },
        "window": {
            "spec": {"head_dim": 96, "head_dim_v": 80, "window_left": True, "window_right": True},
            "lengths": [(800, 800)], "heads": (2, 1), "sms": 2, "window": (200, 70),
        },
        "(192, 128)": {
            "spec": {"head_dim": 192, "head_dim_v": 128},
            "lengths": [(900, 1100)], "heads": (2, 2), "sms": 3,
        },
        "one Q tile": {
            "spec": {"head_dim": 128, "head_dim_v": 128}, "q_tiles": 1,
            "lengths": [(100, 1000)] * 3, "heads": (2, 1), "sms": 4,
        },
        "products": {
            "spec": {"head_dim": 64, "head_dim_v": 64}, "products": True,
            "lengths": [(300, 400)], "heads": (2, 2), "sms": 2,
        },
        "products, causal": {
            "spec": {"head_dim": 128, "head_dim_v": 128, "causal": True, "scheduler": "lpt"},
            "products": True, "lengths": [(260, 520)] * 2, "heads": (2, 1), "sms": 132,
        },
        "products, packed causal": {
            "spec": {"head_dim": 128, "head_dim_v": 128, "causal": True, "packed_q": True,
                     "packed_k": True, "group": 2},
            "products": True, "lengths": [(200, 300), (1, 130), (0, 50), (150, 64)],
            "heads": (4, 2), "sms": 2,
        },
        "products, (192, 128)": {
            "spec": {"head_dim": 192, "head_dim_v": 128}, "products": True,
            "lengths": [(500, 700)], "heads": (1, 1), "sms": 1,
        },
        "products, window": {
            "spec": {"head_dim": 64, "head_dim_v": 64, "window_left": True, "window_right": True},
            "products": True, "lengths": [(600, 600)], "heads": (1, 1), "sms": 1,
            "window": (150, 40),
        },
        "many tiles": {
            "spec": {"head_dim": 128, "head_dim_v": 128},
            "lengths": [(2048, 4096)] * 2, "heads": (8, 8), "sms": 132,
        },
    }  # fmt: skip


def cases_of_halves() -> dict[str, dict[str, Any]]:
    """Those with two softmax warpgroups for each Q tile: five warpgroups share the registers."""
    return {
        "halves": {
            "spec": {"head_dim": 128, "head_dim_v": 128}, "kernel": "halves",
            "lengths": [(700, 900)] * 2, "heads": (3, 3), "sms": 4,
        },
        "halves, packed causal": {
            "spec": {"head_dim": 128, "head_dim_v": 128, "causal": True, "packed_q": True,
                     "packed_k": True, "group": 2},
            "kernel": "halves",
            "lengths": [(300, 700), (1, 130), (0, 50), (513, 257)], "heads": (4, 2), "sms": 3,
        },
        "halves, products": {
            "spec": {"head_dim": 128, "head_dim_v": 128, "causal": True, "scheduler": "lpt"},
            "kernel": "halves", "products": True,
            "lengths": [(260, 520)] * 2, "heads": (2, 1), "sms": 132,
        },
        "halves, products, one after the other": {
            "spec": {"head_dim": 64, "head_dim_v": 64}, "kernel": "halves", "products": True,
            "lengths": [(300, 400)], "heads": (2, 2), "sms": 2,
        },
        "halves, many tiles": {
            "spec": {"head_dim": 128, "head_dim_v": 128}, "kernel": "halves",
            "lengths": [(2048, 4096)] * 2, "heads": (8, 8), "sms": 132,
        },
    }  # fmt: skip


def find_case(name: str) -> dict[str, Any]:
    """A case of any suite."""
    return {**cases(), **cases_of_halves()}[name]


def repeats(name: str) -> int:
    """Launches of a case on the GPU."""
    return SLOW_REPEATS if find_case(name).get("products") else REPEATS


def visible(case: dict[str, Any], rows: int, keys: int) -> Any:
    """(rows, keys) of bool."""
    spec, (left, right) = case["spec"], case.get("window", (None, None))
    right = 0 if spec.get("causal") else right
    distance = np.arange(keys)[None, :] - (np.arange(rows)[:, None] + keys - rows)
    seen = np.ones((rows, keys), bool)
    if right is not None:
        seen &= distance <= right
    if left is not None:
        seen &= distance >= -left
    return seen


def expected(case: dict[str, Any], rows: int, keys: int, head: int, columns: dict[str, int]) -> Any:
    """(O, LSE) of one head of one sequence, by definition. head: within the packed group.

    O is what tensor memory holds, over the sum of exponentials relative to the reference maximum:
    that of the last KV tile with a visible key, which comes first. A row without keys divides by 1:
    there the tensor core would have left zeros.
    """
    spec = case["spec"]
    packed = np.arange(rows) * spec.get("group", 1) + head
    tile, lane = packed // TILE % (len(columns) // 2), packed % TILE
    key = np.arange(keys)
    s_column = np.where(tile == 0, columns["s0"], columns.get("s1", 0))[:, None] + key % TILE
    o_column = np.where(tile == 0, columns["o0"], columns.get("o1", 0))[:, None]
    o = tmem_value(lane[:, None], o_column + np.arange(spec["head_dim_v"])).astype(float)
    seen = visible(case, rows, keys)
    scores = np.where(seen, tmem_value(lane[:, None], s_column) * scale(spec), -np.inf)
    last = np.where(seen, key, -1).max(axis=1, initial=-1) // TILE
    first_tile = seen & (key // TILE == last[:, None])
    reference = np.where(first_tile, scores, -np.inf).max(axis=1, initial=-np.inf)
    empty = ~seen.any(axis=1)
    total = np.exp(scores - np.where(empty, 0, reference)[:, None]).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return o / np.where(empty, 1, total)[:, None], reference + np.log(total)


def attended(case: dict[str, Any], q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """(O, LSE, the sum of P |V|) of one head of one sequence, in float64."""
    seen = visible(case, len(q), len(k))
    scores = np.where(seen, q @ k.T * scale(case["spec"]), -np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = np.log(np.exp(scores - scores.max(axis=1, keepdims=True, initial=-1e30)).sum(axis=1))
        lse += scores.max(axis=1, initial=-1e30)
        p = np.where(seen, np.exp(scores - lse[:, None]), 0.0)
    return p @ v, np.where(seen.any(axis=1), lse, -np.inf), p @ np.abs(v)


def operand(name: str, shape: list[int]) -> Any:
    """Values of q, k or v as bits of bfloat16; q is so large that maxima rise by 8 and more."""
    values = np.random.default_rng(sum(map(ord, name))).standard_normal(shape)
    values = (values * (12.0 if name == "q" else 1.0)).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def widened(bits: Any) -> Any:
    """bfloat16 as float64."""
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(float)


def scale(spec: dict[str, Any]) -> float:
    """softmax_scale."""
    return float(spec["head_dim"]) ** -0.5


def view(raw: Any, place: dict[str, Any]) -> Any:
    """O (bfloat16 as uint16) or LSE, from its bytes."""
    dtype = {"bfloat16": np.uint16, "float32": np.float32}[place["dtype"]]
    return raw.view(dtype).reshape(place["shape"])


def errors(described: dict[str, Any], o: Any, lse: Any) -> tuple[float, float]:
    """Largest error of O, relative to what rounding is relative to, and of LSE.

    That is O, or the sum of P |V| where there are products. inf where one is not a number.
    """
    case = find_case(described["name"])
    values = widened(o)
    operands = {x: widened(operand(x, described["places"][x]["shape"])) for x in "qkv"}
    worst = [0.0, 0.0]
    starts = [0, 0]
    for batch, lengths in enumerate(case["lengths"]):
        stops = [start + length for start, length in zip(starts, lengths, strict=True)]
        for head in range(case["heads"][0]):
            place = slice(starts[0], stops[0]) if o.ndim == 3 else batch
            mine = values[place, ..., head, :], lse[(head, place) if o.ndim == 3 else (place, head)]
            if case.get("products"):
                key_head = head * case["heads"][1] // case["heads"][0]
                keys = slice(starts[1], stops[1]) if o.ndim == 3 else batch
                found = (operands["q"][place, ..., head, :], operands["k"][keys, ..., key_head, :],
                         operands["v"][keys, ..., key_head, :])  # fmt: skip
                *wanted, floor = attended(case, *found)
            else:
                packed = head % case["spec"].get("group", 1)
                wanted = expected(case, *lengths, packed, described["columns"])
                floor = np.abs(wanted[0])
            floors = np.maximum(floor, 1e-30), np.ones(lengths[0])
            for i, parts in enumerate(zip(mine, wanted, floors, strict=True)):
                worst[i] = max(worst[i], _error(*parts))
        starts = stops
    return worst[0], worst[1]


def _error(got: Any, want: Any, floor: Any) -> float:
    finite = np.isfinite(want)
    if not np.array_equal(np.isfinite(got), finite):
        return float("inf")
    error = np.abs(got[finite] - want[finite]) / floor[finite]
    return float(error.max(initial=0.0))
