"""Stand-ins for bugs of masks and of what changes scores."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.testing.atlas.stand_in import StandIn
from tests.testing.planted.fault import lengths_differ, replaced
from tests.testing.planted.gradients import GradientKernel as Honest
from tests.testing.planted.kernel import State, finite

PADDED_TO = 128


def _clip_right(kernel: Any, sides: Any) -> Any:
    left, right = sides
    return left, right if right is None else min(right, kernel.keys)


def _left_plus(by: int) -> Any:
    def change(kernel: Any, sides: Any) -> Any:
        left, right = sides
        return left if left is None else max(0, left + by), right

    return change


def _is_sliding(kernel: Any) -> bool:
    return kernel.options.causal and kernel.options.is_windowed


def _is_packed(kernel: Any) -> bool:
    return kernel.options.layout == "packed"


def _minus_one_counts(kernel: Any, sides: Any) -> Any:
    given = kernel.options.window_size[0]
    return (-1 if given == -1 and sides[1] == 0 else sides[0]), sides[1]


def _tiles_of_rows(kernel: Any) -> Any:
    return [tile for tile in Honest.tiles(kernel) if tile.start < kernel.rows]


def _with_padded_keys(kernel: Any, state: State, cols: slice) -> State:
    new = Honest.step(kernel, state, cols)
    padded = -(cols.stop - cols.start) % PADDED_TO
    return new._replace(total=new.total + padded * np.exp(-finite(new.top)))


def _sixteen_bit_positions(kernel: Any, cols: slice) -> np.ndarray:
    keys = np.arange(cols.start, cols.stop).astype(np.int16)
    rows = (np.arange(kernel.rows) + kernel.diagonal()).astype(np.int16)
    return keys.astype(np.int64) - rows.astype(np.int64)[:, None]


def _nan_of_masked_tile(kernel: Any, state: State, cols: slice) -> State:
    new = Honest.step(kernel, state, cols)
    if kernel.options.causal:
        return new
    return new._replace(out=np.where(np.isneginf(new.top)[..., None], np.nan, new.out))


def _unguarded(kernel: Any, state: State) -> np.ndarray:
    if kernel.options.mask_mod is None:
        return Honest.normalised(kernel, state)
    return state.out / state.total[..., None]


def _rows_as_if_packed(kernel: Any, cols: slice) -> np.ndarray:
    keys, rows = np.arange(cols.start, cols.stop), np.arange(kernel.rows) // kernel.group
    return keys - rows[:, None] - kernel.diagonal()


def _mask_of_kv_head(kernel: Any, cols: slice) -> tuple[Any, ...]:
    batch, heads, *rest = kernel.grid(cols)
    return (batch, heads // kernel.group, *rest)


def _nothing_beyond_first_entry(kernel: Any, cols: slice) -> np.ndarray:
    chosen = Honest.chosen(kernel, cols)
    lost = kernel.options.mask_mod is not None and kernel.place.batch > 0 and kernel.rows < 16
    return np.zeros_like(chosen) if lost else chosen


def listed_as(
    kernel: Any, lists: tuple[Any, Any], cols: slice, row_blocks: np.ndarray, block_keys: int
) -> np.ndarray:
    """As the honest `listed`, with the row block of each row and the keys of a block given."""
    counts, indices = lists
    member = np.zeros((kernel.heads, kernel.rows, cols.stop - cols.start), bool)
    if counts is None:
        return member
    row_blocks = np.minimum(row_blocks, counts.shape[2] - 1)
    key_blocks = np.arange(cols.start, cols.stop) // block_keys
    b = kernel.place.batch % counts.shape[0]
    for head in range(kernel.heads):
        h = head % counts.shape[1]
        used = np.arange(indices.shape[-1]) < counts[b, h][:, None]
        table = np.where(used, indices[b, h], -1)[row_blocks]
        member[head] = (table[:, :, None] == key_blocks).any(axis=1)
    return member


def _row_block_over_group(kernel: Any, counts: Any, indices: Any, cols: slice) -> np.ndarray:
    block_rows, block_keys = kernel.options.block_sparse_tensors.block_size
    row_blocks = np.arange(kernel.rows) // block_rows // kernel.group
    return listed_as(kernel, (counts, indices), cols, row_blocks, block_keys)


def _default_block_size(kernel: Any, counts: Any, indices: Any, cols: slice) -> np.ndarray:
    return listed_as(kernel, (counts, indices), cols, np.arange(kernel.rows) // 128, 128)


MASK_STAND_INS = (
    StandIn("flash-attention#895", replaced("sides", lambda x: True, _clip_right)),
    StandIn("transformers#39408", replaced("sides", _is_sliding, _left_plus(1))),
    StandIn("vllm#3385", replaced("sides", _is_packed, _left_plus(-1))),
    StandIn("TransformerEngine#3528", replaced("sides", lambda x: True, _minus_one_counts)),
    StandIn(
        "executorch#22426",
        replaced("diagonal", lambda x: x.options.causal and lengths_differ(x), 0),
    ),
    StandIn(
        "jax#19237",
        replaced("sides", lambda x: x.options.causal, lambda x, sides: (sides[0], None)),
    ),
    StandIn("jax#24491", {"tiles": _tiles_of_rows}),
    StandIn("jax#27224", {"step": _with_padded_keys}),
    StandIn(
        "xformers#1185",
        replaced(
            "sides", lambda x: x.options.causal and _is_packed(x), lambda x, sides: (sides[0], None)
        ),
    ),
    StandIn("tpu-inference#2756", {"distance": _sixteen_bit_positions}),
    StandIn("aiter#5364", {"step": _nan_of_masked_tile}),
    StandIn("pytorch#103963", {"normalised": _unguarded}),
    StandIn("flash-attention#2528", {"distance": _rows_as_if_packed}),
    StandIn("xformers#952", {"mask_grid": _mask_of_kv_head}),
    StandIn("pytorch#139462", {"chosen": _nothing_beyond_first_entry}),
    StandIn("pytorch#171271", {"listed": _row_block_over_group}),
    StandIn("pytorch#188484", {"listed": _default_block_size}),
)


def _times_tanh(kernel: Any, scaled: np.ndarray, cols: slice) -> np.ndarray:
    cap = kernel.softcap()
    if not cap:
        return Honest.bent(kernel, scaled, cols)
    share = scaled / kernel.work.type(cap)
    return share * np.tanh(share)


def _nan_of_empty_rows(kernel: Any, state: State) -> State:
    new = Honest.add_sink(kernel, state)
    if kernel.sink() is None:
        return new
    return new._replace(out=np.where(np.isneginf(state.top)[..., None], np.nan, new.out))


def _sink_outside_maximum(kernel: Any, state: State) -> State:
    sink = kernel.sink()
    if sink is None:
        return state
    return state._replace(total=state.total + np.exp(sink - finite(state.top)))


def _foreign_sinks(kernel: Any, sink: np.ndarray | None) -> np.ndarray | None:
    if sink is None:
        return None
    read = sink.copy()
    read[kernel.heads - kernel.heads % 4 :] = 6.0
    return read


MODIFICATION_STAND_INS = (
    StandIn("sgl-kernel-xpu#491", replaced("softcap", lambda x: True, 0.0)),
    StandIn("flash-attention#2396", {"bent": _times_tanh}),
    StandIn("ik_llama.cpp#2344", {"add_sink": _nan_of_empty_rows}),
    StandIn("flash-attention#2752", {"add_sink": _sink_outside_maximum}),
    StandIn(
        "TransformerEngine#2541",
        replaced("sink", lambda x: True, None),
        {"add_dsink": lambda call, dsink, part: dsink},
    ),
    StandIn("flashinfer#4525", replaced("sink", lambda x: x.heads > 4, _foreign_sinks)),
)
