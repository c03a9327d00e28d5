"""Features that are lost, or wrong, only in the presence of another one."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.testing.planted.fault import (
    Fault,
    Method,
    is_grouped,
    is_split,
    is_windowed,
    laid_out,
    replaced,
)
from tests.testing.planted.gradients import GradientKernel as Honest
from tests.testing.planted.kernel import Lengths


def _grid(method: str, condition: Any, change: Any) -> dict[str, Method]:
    """A callback's (batch, head, row, key, lengths) go through `change(kernel, grid)`."""

    def wrong(kernel: Any, cols: slice) -> tuple[Any, ...]:
        grid = kernel.grid(cols)
        return change(kernel, grid) if condition(kernel) else grid

    return {method: wrong}


def _kv_head(kernel: Any, grid: tuple[Any, ...]) -> tuple[Any, ...]:
    return (grid[0], grid[1] // kernel.group, *grid[2:])


def _first_batch(kernel: Any, grid: tuple[Any, ...]) -> tuple[Any, ...]:
    return (0, *grid[1:])


def _packed_keys(kernel: Any, grid: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*grid[:3], grid[3] + kernel.place.first_key, grid[4])


def _packed_rows(kernel: Any, grid: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*grid[:2], grid[2] + kernel.place.first_row, *grid[3:])


def _room_as_length(kernel: Any, grid: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*grid[:4], Lengths(kernel.rows, kernel.place.room))


def _in_each_split(kernel: Any, tiles: list[slice]) -> Any:
    state = Honest.part(kernel, tiles)
    return kernel.add_sink(state) if is_split(kernel) else state


def _sink_with_each_split(kernel: Any) -> Any:
    state = kernel.start()
    for tiles in kernel.splits():
        state = kernel.merge(state, kernel.part(tiles))
    return state if is_split(kernel) and kernel.tiles() else kernel.add_sink(state)


def _sink_of_kv_head(kernel: Any, sink: Any) -> Any:
    return None if sink is None else sink[np.arange(kernel.heads) // kernel.group]


def _coarse_tanh(kernel: Any, x: np.ndarray) -> np.ndarray:
    bent = np.tanh(x)
    if kernel.work != np.float32:
        return bent
    return (bent.view(np.uint32) & 0xFFFFF000).view(np.float32)


def _aux_of_first_batch(kernel: Any) -> bool:
    return kernel.options.aux_tensors is not None


def _many(kernel: Any) -> bool:
    return kernel.keys > 512


def _mask_mod_until(kernel: Any, cols: slice) -> np.ndarray:
    if cols.start >= 512:
        return np.ones((1, kernel.rows, cols.stop - cols.start), bool)
    return Honest.chosen(kernel, cols)


def _score_mod_until(kernel: Any, scaled: np.ndarray, cols: slice) -> np.ndarray:
    if cols.start >= 512 and kernel.score_mod() is not None:
        return scaled
    return Honest.bent(kernel, scaled, cols)


_PACKED = laid_out("packed", "paged")
_ANY_LAYOUT = laid_out("packed", "paged", "padded")
LOST = "feature lost in the presence of another"
COMBINATION_FAULTS = (
    Fault(
        "softcap_lost_with_window", LOST, "a window switches softcap off", ("softcap window",),
        replaced("softcap", is_windowed, 0.0),
    ),
    Fault(
        "softcap_lost_with_groups", LOST, "grouped heads switch softcap off", ("softcap gqa",),
        replaced("softcap", is_grouped, 0.0),
    ),
    Fault(
        "softcap_lost_with_splits", LOST, "splits switch softcap off", ("softcap split",),
        replaced("softcap", is_split, 0.0),
    ),
    Fault(
        "softcap_lost_in_varlen", LOST, "packed sequences have no softcap",
        ("softcap varlen", "softcap packed", "softcap paged"), replaced("softcap", _PACKED, 0.0),
    ),
    Fault(
        "softcap_lost_in_wide_heads", LOST, "no softcap where head_dim is above 128", ("softcap",),
        replaced("softcap", lambda x: x.dim > 128, 0.0),
    ),
    Fault(
        "softcap_coarse", LOST, "tanh of float32 scores keeps 11 bits", ("softcap",),
        {"tanh": _coarse_tanh},
    ),
    Fault(
        "sink_lost_with_window", LOST, "a window switches the sink off", ("sink window",),
        replaced("sink", is_windowed, None),
    ),
    Fault(
        "sink_lost_with_softcap", LOST, "softcap switches the sink off", ("sink softcap",),
        replaced("sink", lambda x: bool(x.softcap()), None),
    ),
    Fault(
        "sink_lost_in_varlen", LOST, "packed sequences have no sink",
        ("sink varlen", "sink packed", "sink paged"), replaced("sink", _PACKED, None),
    ),
    Fault(
        "sink_lost_in_padded", LOST, "padded sequences have no sink",
        ("sink seqused", "sink padded", "sink varlen"), replaced("sink", laid_out("padded"), None),
    ),
    Fault(
        "sink_lost_with_score_mod", LOST, "score_mod switches the sink off", ("sink score_mod",),
        replaced("sink", lambda x: x.score_mod() is not None, None),
    ),
    Fault(
        "sink_of_kv_head", LOST, "grouped heads share the sink that the KV head's number names",
        ("sink",), replaced("sink", is_grouped, _sink_of_kv_head),
    ),
    Fault(
        "sink_in_each_split", LOST, "each split counts the sink", ("split sink",),
        {"part": _in_each_split, "combined": _sink_with_each_split},
    ),
    Fault(
        "sink_lost_in_fp16", LOST, "fp16 inputs have no sink", ("sink",),
        replaced("sink", lambda x: x.dtype == np.float16, None),
    ),
    Fault(
        "score_mod_lost_with_window", LOST, "a window switches score_mod off",
        ("score_mod window",), replaced("score_mod", is_windowed, None),
    ),
    Fault(
        "score_mod_lost_with_causal", LOST, "causal switches score_mod off", ("score_mod causal",),
        replaced("score_mod", lambda x: x.options.causal, None),
    ),
    Fault(
        "score_mod_lost_with_splits", LOST, "splits switch score_mod off", ("score_mod split",),
        replaced("score_mod", is_split, None),
    ),
    Fault(
        "score_mod_of_kv_head", LOST, "score_mod of grouped heads gets the KV head",
        ("score_mod", "gqa score_mod"), _grid("score_grid", is_grouped, _kv_head),
    ),
    Fault(
        "score_mod_packed_keys", LOST, "score_mod gets the key's number in the packed tensor",
        ("score_mod varlen", "score_mod packed"),
        _grid("score_grid", laid_out("packed"), _packed_keys),
    ),
    Fault(
        "score_mod_room_as_length", LOST, "score_mod of padded sequences gets the padded length",
        ("score_mod seqused", "score_mod padded", "score_mod varlen"),
        _grid("score_grid", laid_out("padded"), _room_as_length),
    ),
    Fault(
        "score_mod_until_512", LOST, "score_mod is left out beyond 512 keys", ("score_mod",),
        {"bent": _score_mod_until},
    ),
    Fault(
        "mask_mod_until_512", LOST, "mask_mod is left out beyond 512 keys", ("mask_mod",),
        {"chosen": _mask_mod_until},
    ),
    Fault(
        "mask_mod_of_kv_head", LOST, "mask_mod of grouped heads gets the KV head",
        ("mask_mod", "gqa mask_mod"), _grid("mask_grid", is_grouped, _kv_head),
    ),
    Fault(
        "mask_mod_packed_rows", LOST, "mask_mod gets the row's number in the packed tensor",
        ("mask_mod varlen", "mask_mod packed", "mask_mod paged"),
        _grid("mask_grid", _PACKED, _packed_rows),
    ),
    Fault(
        "mask_mod_of_first_batch", "batch and head aliasing", "mask_mod gets batch entry 0",
        ("mask_mod",), _grid("mask_grid", lambda x: True, _first_batch),
    ),
    Fault(
        "aux_tensors_of_first_batch", "batch and head aliasing",
        "callbacks with aux_tensors get batch entry 0", ("aux",),
        _grid("score_grid", _aux_of_first_batch, _first_batch)
        | _grid("mask_grid", _aux_of_first_batch, _first_batch),
    ),
    Fault(
        "aux_tensors_lost_in_varlen", LOST, "packed calls hand on no batch entry but 0",
        ("aux varlen", "aux packed", "aux paged", "score_mod varlen", "mask_mod varlen"),
        _grid("score_grid", _ANY_LAYOUT, _first_batch)
        | _grid("mask_grid", _ANY_LAYOUT, _first_batch),
    ),
    Fault(
        "dropout_of_kv_head", LOST, "dropout of grouped heads draws by KV head", ("dropout gqa",),
        _grid("dropout_grid", is_grouped, _kv_head),
    ),
    Fault(
        "dropout_of_first_batch_in_varlen", LOST, "dropout of packed sequences draws for entry 0",
        ("dropout varlen", "dropout packed", "dropout paged", "dropout seqused"),
        _grid("dropout_grid", _ANY_LAYOUT, _first_batch),
    ),
    Fault(
        "dropout_of_window", LOST, "with a window dropout counts keys from its left edge",
        ("dropout window",),
        _grid(
            "dropout_grid", is_windowed,
            lambda x, grid: (*grid[:3], np.maximum(0, grid[3] - (x.sides()[0] or 0)), grid[4]),
        ),
    ),
    Fault(
        "window_lost_in_paged", LOST, "paged keys have no window",
        ("paged window",), replaced("sides", laid_out("paged"), lambda x, sides: (None, sides[1])),
    ),
    Fault(
        "window_lost_with_splits", LOST, "splits unbound the left side of a window",
        ("window split",), replaced("sides", is_split, lambda x, sides: (None, sides[1])),
    ),
    Fault(
        "window_lost_in_unequal_dims", LOST, "no window where head_dim_v differs from head_dim",
        ("window",),
        replaced("sides", lambda x: x.dim != x.dim_v and is_windowed(x), (None, None)),
    ),
    Fault(
        "causal_by_room_in_padded", LOST, "causal in padded sequences ends at the padded corner",
        ("causal seqused", "seqused", "padding"),
        replaced(
            "diagonal", laid_out("padded"), lambda x, _: x.place.room - x.rows
        ),
    ),
    Fault(
        "scale_lost_in_varlen", LOST, "packed sequences have the default scale",
        ("scale varlen", "scale packed", "scale paged", "scale seqused"),
        replaced("scale", _ANY_LAYOUT, lambda x, _: x.dim**-0.5),
    ),
    Fault(
        "scale_lost_with_softcap", LOST, "softcap brings back the default scale",
        ("scale softcap",),
        replaced("scale", lambda x: bool(x.softcap()), lambda x, _: x.dim**-0.5),
    ),
)  # fmt: skip
