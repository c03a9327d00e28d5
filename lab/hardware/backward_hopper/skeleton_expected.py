"""What the backward kernel gives where products are left out: sums of `tmem_value`."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from fa4.sm100.backward.workspace import dq_offset
from lab.hardware.forward_hopper.skeleton_ptx import tmem_value

TILE = 128


def integer_error(spec: Any, inputs: Any, space: Any, dk: Any, dv: Any) -> float:
    """0 if every gradient is as defined, else infinity.

    dQ of a tile is what tensor memory holds, times the KV tiles that see it; dK and dV are what it
    holds, once, or 0 where no query sees the tile.
    """
    lane, plan = np.arange(TILE)[:, None], spec.plan
    d, dim_v = spec.head_dim, spec.head_dim_v
    held = {
        name: tmem_value(lane, plan.buffer(name).start + np.arange(dim)).astype(np.float32)
        for name, dim in (("dq", d), ("dk", d), ("dv", dim_v))
    }
    row, col = np.meshgrid(np.arange(TILE), np.arange(d), indexing="ij")
    held["dk"] = held["dk"] * np.float32(d**-0.5)
    right = True
    for b, seq in enumerate(inputs.sequences):
        seen = meeting(seq.visible.any(axis=0))
        first = space.places[b][0]
        tiles = space.dq_accum[:, first : first + len(seen)]
        wanted = np.zeros(tiles.shape[1:], np.float32)
        wanted[:, dq_offset(row, col, d)] = seen.sum(axis=1)[:, None, None] * held["dq"]
        right &= bool((tiles == wanted).all())
        for name, got in (("dk", dk), ("dv", dv)):
            mine = got[inputs.kv_index[b]]
            rounded = held[name].astype(ml_dtypes.bfloat16)
            whole = np.concatenate([rounded * used for used in seen.any(axis=0)] or [rounded[:0]])
            right &= bool((mine == whole[: len(mine), None].astype(mine.dtype)).all())
    return 0.0 if right else float("inf")


def meeting(visible: Any) -> Any:
    """(query tiles, KV tiles) of bool: does some query see some key?"""
    rows, keys = (-(-n // TILE) for n in visible.shape)
    padded = np.zeros((rows * TILE, keys * TILE), bool)
    padded[: visible.shape[0], : visible.shape[1]] = visible
    return padded.reshape(rows, TILE, keys, TILE).any(axis=(1, 3))
