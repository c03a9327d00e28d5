"""Calls of the main backward kernel on a Hopper GPU.

With "products", plain instructions stand in for the tensor core, and the gradients are judged.
Without, products are left out, and every sum is of small integers (`tmem_value`).
"""

from __future__ import annotations

from typing import Any

OUTPUTS = ("dq_accum", "dk", "dv", "turns")
REPEATS, SLOW_REPEATS = 200, 20  # launches of a case
ONLY_ON_THE_GPU = ("many tiles, fixed order", "fixed order, eight KV tiles")  # too long to emulate
D64, D128 = ({"head_dim": dim, "head_dim_v": dim} for dim in (64, 128))
PACKED = {"packed_q": True, "packed_k": True}


def cases() -> dict[str, dict[str, Any]]:
    """By name: fields of the spec, lengths, (heads of keys, queries' for each), and a window."""
    return {
        "products": {"spec": D64, "lengths": [(200, 300)], "heads": (1, 2), "products": True},
        "products, fixed order": {
            "spec": {**D128, "causal": True, "deterministic": True}, "products": True,
            "lengths": [(300, 300)], "heads": (1, 2),
        },
        "products, packed, fixed order": {
            "spec": {**D64, **PACKED, "causal": True, "window_left": True, "deterministic": True},
            "products": True, "lengths": [(200, 300), (1, 130), (0, 50), (150, 0), (90, 64)],
            "heads": (2, 2), "window": (100, None),
        },
        "fixed order, eight KV tiles": {
            "spec": {**D128, "causal": True, "deterministic": True}, "products": True,
            "lengths": [(1000, 1000)] * 2, "heads": (2, 2),
        },
        "d128": {"spec": D128, "lengths": [(700, 500)] * 2, "heads": (2, 1)},
        "packed, fixed order": {
            "spec": {**D128, **PACKED, "causal": True, "deterministic": True},
            "lengths": [(300, 700), (1, 130), (0, 50), (513, 257)], "heads": (2, 2),
        },
        "window, fixed order": {
            "spec": {**D64, "window_left": True, "window_right": True, "deterministic": True},
            "lengths": [(800, 800)], "heads": (1, 2), "window": (200, -30),
        },
        "many tiles, fixed order": {
            "spec": {**D128, "causal": True, "deterministic": True},
            "lengths": [(4096, 4096)] * 2, "heads": (4, 2),
        },
    }  # fmt: skip


def repeats(name: str) -> int:
    """Launches of a case on the GPU."""
    return SLOW_REPEATS if cases()[name].get("products") else REPEATS


def same_every_time(name: str) -> tuple[str, ...]:
    """Outputs whose bits must be those of the first launch: all in a fixed order of sums.

    Sums of small integers are exact in any order.
    """
    case = cases()[name]
    free = case.get("products") and not case["spec"].get("deterministic")
    return tuple(output for output in OUTPUTS if not (free and output == "dq_accum"))
