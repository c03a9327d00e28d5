"""Correct styles of attention, none of which may be rejected: orders, precisions, sums, tiles.

Each is the honest back end with methods replaced, as a fault is, but by what is right too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.testing.planted.fault import Fault, Method
from tests.testing.planted.gradients import GradientKernel as Honest
from tests.testing.planted.gradients import Saved
from tests.testing.planted.kernel import State

STYLE = "correct styles"


def tiles_of(keys: int, *, down: bool = False) -> dict[str, Method]:
    """Tiles of so many keys, from the first or from the last."""

    def tiles(kernel: Any) -> list[slice]:
        kernel.tile = keys
        found = Honest.tiles(kernel)
        return found[::-1] if down else found

    return {"tiles": tiles}


def _wide(kernel: Any, arrays: Any, place: Any, options: Any) -> None:
    """Everything in float64; P is not rounded."""
    Honest.__init__(kernel, arrays, place, options)
    kernel.work = np.dtype(np.float64)
    kernel.wide_q = kernel.operand(kernel.q)


def _not_rounded(kernel: Any, p: np.ndarray) -> np.ndarray:
    return p


def _two_passes(kernel: Any) -> State:
    """The maximum and the sum first, then normalised P, rounded, times V."""
    first = Honest.combined(kernel)
    top = np.where(np.isneginf(first.top), 0, first.top)
    total = np.where(first.total == 0, 1, first.total)
    out = np.zeros_like(first.out)
    for cols in kernel.tiles():
        keep = kernel.keep(cols)
        k, v = kernel.keys_and_values(cols, keep)
        p = np.exp(kernel.scores(k, keep, cols) - top[..., None]) / total[..., None]
        out = out + kernel.weights(p, cols) @ v
    return State(first.top, first.total, out * total[..., None])


def _kahan(kernel: Any, p: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Row sums with a compensation, key after key."""
    lost = np.zeros_like(total)
    for n in range(p.shape[-1]):
        term = p[..., n] - lost
        new = total + term
        lost, total = (new - total) - term, new
    return total


def _merged_last_first(kernel: Any) -> State:
    """Each tile a split of its own, merged from the last to the first."""
    state = kernel.start()
    for tile in reversed(kernel.tiles()):
        state = kernel.merge(kernel.part([tile]), state)
    return kernel.add_sink(state)


def _heads_rounded(kernel: Any, x: np.ndarray) -> np.ndarray:
    """Each head in the element type, their sum in float32, as flash-attn 2 does it."""
    narrow = x.astype(kernel.dtype).astype(kernel.work)
    return narrow.reshape(kernel.heads_k, kernel.group, *x.shape[1:]).sum(axis=1)


def _row_dot_wide(kernel: Any, saved: Saved) -> np.ndarray:
    dots = (saved.dout.astype(np.float64) * saved.out).sum(axis=-1)
    return (dots - saved.dlse).astype(kernel.work)


def _base_2(kernel: Any, x: np.ndarray) -> np.ndarray:
    return np.exp2(x * kernel.work.type(np.log2(np.e)))


def _scaled_q(kernel: Any, k: np.ndarray) -> np.ndarray:
    """The scale on q, in float32."""
    q = kernel.wide_q * kernel.work.type(kernel.scale())
    return q @ k.transpose(0, 2, 1)


def _style(name: str, description: str, **methods: Any) -> Fault:
    return Fault(f"style_{name}", STYLE, description, (), **methods)


STYLES = (
    _style("float64", "float64 throughout", kernel={"__init__": _wide, "rounded_p": _not_rounded}),
    _style("tiles_of_32", "tiles of 32 keys", kernel=tiles_of(32)),
    _style("tiles_of_96_down", "tiles of 96 keys from the last", kernel=tiles_of(96, down=True)),
    _style("tiles_down", "tiles of 128 keys from the last", kernel=tiles_of(128, down=True)),
    _style("normalised", "P is normalised before it is rounded", kernel={"combined": _two_passes}),
    _style("kahan", "compensated row sums", kernel={"row_sum": _kahan}),
    _style("p_not_rounded", "P stays in float32", kernel={"rounded_p": _not_rounded}),
    _style("merged_last_first", "a split per tile", kernel={"combined": _merged_last_first}),
    _style("heads_rounded", "each head's dK and dV in 16 bits, summed in float32",
           kernel={"fold_dk": _heads_rounded, "fold_dv": _heads_rounded}),
    _style("row_dot_wide", "D in float64", kernel={"row_dot": _row_dot_wide}),
    _style("base_2", "exponentials of base 2", kernel={"exp": _base_2}),
    _style("scaled_q", "the scale on q", kernel={"scaled": _scaled_q}),
)  # fmt: skip
