"""What the architecture-neutral kernels must give, by definition; nothing of the kernel."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from fa4.reference.exp2 import exp2_polynomial, fma_f32
from tests.sm100.neutral import COLUMNS, SIZES, TILE_FIELDS

TILE = 128
ROUNDED = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}
MUFU_ULP = 2  # docs/notes/2026-11-21-h200-exp2.md


def tile_errors(spec: Any, sizes: dict[str, int], out: NDArray[np.int32]) -> list[str]:
    """What is wrong with the work tiles of a call; empty if nothing is."""
    rows = TILE * spec.numerics.q_tiles
    blocks = -(-sizes["seqlen_q"] * spec.group // rows)
    heads = sizes["heads"] * sizes["batch"]
    order = _order(spec, sizes, blocks, heads)
    errors = []
    for index, (block, head) in enumerate(order[: len(out)]):
        tile = dict(zip(TILE_FIELDS, (int(x) for x in out[index]), strict=True))
        place = (block, head % sizes["heads"], head // sizes["heads"])
        if (tile["block"], tile["head"], tile["batch"]) != place:
            errors.append(f"tile {index}: {tile} is not at {place}")
            continue
        errors += [f"tile {index}: {tile}: {x}" for x in _range_errors(spec, sizes, tile, rows)]
    return errors


def _order(spec: Any, sizes: dict[str, int], blocks: int, heads: int) -> list[tuple[int, int]]:
    """(block, head) of every work tile, in order."""
    if spec.scheduler == "static":
        return [(block, head) for head in range(heads) for block in range(blocks)]
    head_bytes = sizes["seqlen_k"] * (spec.head_dim + spec.head_dim_v) * 2
    width = 1
    while width * 2 <= heads and width * 2 * head_bytes <= 50 << 20:
        width *= 2
    sections = [range(first, min(first + width, heads)) for first in range(0, heads, width)]
    return [(b, h) for section in sections for b in reversed(range(blocks)) for h in section]


def _range_errors(spec: Any, sizes: dict[str, int], tile: dict[str, int], rows: int) -> list[str]:
    """KV tiles with a visible key lie in [kv_start, kv_stop); whole tiles are seen whole."""
    first = tile["block"] * rows
    existing = range(first, min(first + rows, sizes["seqlen_q"] * spec.group))
    seen = {key // TILE for row in existing for key in _visible(spec, sizes, row)[:: TILE - 1]}
    seen |= {keys[-1] // TILE for row in existing if (keys := _visible(spec, sizes, row))}
    kept = range(tile["kv_start"], tile["kv_stop"])
    if len(kept) < 1 or kept.start < 0:
        return ["no KV tile"]
    errors = [] if seen <= set(kept) else [f"KV tiles {sorted(seen - set(kept))} are left out"]
    if seen and len(kept) > max(seen) - min(seen) + 1:
        errors.append(f"more KV tiles than {min(seen)} to {max(seen)}")
    for number in range(max(tile["whole_start"], kept.start), min(tile["whole_stop"], kept.stop)):
        keys = range(number * TILE, (number + 1) * TILE)
        for row in range(first, first + TILE):
            visible = _visible(spec, sizes, row)
            if not (visible and visible[0] <= keys[0] and keys[-1] <= visible[-1]):
                errors.append(f"KV tile {number} is not whole for row {row}")
                break
    return errors


def _visible(spec: Any, sizes: dict[str, int], row: int) -> range:
    """Keys that a packed row sees (bottom-right aligned)."""
    diagonal = row // spec.group + sizes["seqlen_k"] - sizes["seqlen_q"]
    stop = sizes["seqlen_k"]
    if spec.mask is not None:  # chunks
        start = max(0, diagonal // spec.mask.size * spec.mask.size)
        return range(start, max(start, min(stop, diagonal + 1)))
    if spec.causal or spec.window_right:
        stop = min(stop, diagonal + (0 if spec.causal else sizes["right"]) + 1)
    start = max(0, diagonal - sizes["left"]) if spec.window_left else 0
    return range(start, max(start, stop))


def row_errors(spec: Any, given: dict[str, Any], got: dict[str, Any]) -> list[str]:
    """What is wrong with a KV tile of softmax; empty if nothing is."""
    scale = np.float32(given["scale"])
    columns = np.arange(COLUMNS)
    start, stop = given["bounds"][:, :1], given["bounds"][:, 1:]
    masked = np.where((columns >= start) & (columns < stop), given["s"], np.float32(-np.inf))
    old = given["reference"]
    most = np.maximum(masked.max(axis=1), old)
    with np.errstate(over="ignore"):
        rise = (old - most) * scale
    tau = spec.numerics.rescale_threshold_log2
    keep = rise >= -tau if tau > 0 else np.zeros(len(old), bool)
    reference = np.where(keep, old, most)
    alpha = np.where(keep, np.float32(1.0), np.exp2(rise.astype(np.float64)))
    x = fma_f32(masked, scale, -(reference * scale)[:, None])
    emulated = np.array(spec.numerics.exp2.emulated_columns(COLUMNS))
    errors = []
    if not np.array_equal(got["stats"][:, 1], reference):
        errors.append("reference maximum")
    if not _close(got["stats"][:, 2], alpha):
        errors.append("alpha")
    exact = exp2_polynomial(x[:, emulated], spec.numerics.exp2.degree)
    if not np.array_equal(got["p"][:, emulated].view(np.uint32), exact.view(np.uint32)):
        errors.append("emulated exponentials, which must agree bit for bit")
    if not _close(got["p"][:, ~emulated], np.exp2(x[:, ~emulated].astype(np.float64))):
        errors.append("hardware exponentials")
    rounded = got["p"].astype(ROUNDED[spec.dtype]).view(np.uint32)
    if not np.array_equal(got["words"], rounded):
        errors.append("rounding of P to 16 bits")
    total = got["p"].astype(np.float64).sum(axis=1)
    if not np.allclose(got["stats"][:, 3], total, rtol=COLUMNS * 2.0**-24, atol=0):
        errors.append("row sum")
    return errors


def _close(got: NDArray[np.float32], exact: NDArray[np.float64]) -> bool:
    """Within MUFU_ULP of the correctly rounded value; below the normal range 0 is right too."""
    tiny = np.finfo(np.float32).tiny
    with np.errstate(over="ignore", under="ignore"):
        rounded = exact.astype(np.float32)
    near = np.abs(got.astype(np.float64) - rounded) <= MUFU_ULP * np.spacing(rounded)
    return bool(np.all(np.where(exact >= tiny, near, (got >= 0) & (got <= tiny))))


def sizes_array(sizes: dict[str, int]) -> NDArray[np.int32]:
    """The kernel's argument."""
    return np.array([sizes.get(name, 0) for name in SIZES], np.int32)
