"""The work tiles of the backward kernel as a small kernel, and a model of them by definition."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import cutlass
import numpy as np
from cutlass import Int32, cute
from cutlass.base_dsl.compiler import DumpDir
from cutlass.cute.runtime import make_fake_tensor

from fa4.sm100.backward.spec import BackwardSpec
from fa4.sm100.backward.tiles import BackwardProblem, locate

TILE, THREADS = 128, 256
FIELDS = ("block", "batch", "q_start", "q_stop", "whole_start", "whole_stop")
SIZES = ("seqlen_q", "seqlen_k", "left", "right")  # of a sequence; beyond them NOBODY
BLOCKS = 8  # KV tiles and query tiles of the longest sequence


@cute.kernel
def tiles_kernel(
    sizes: cute.Tensor, fields: cute.Tensor, turns: cute.Tensor, spec: cutlass.Constexpr
):
    """Work tile `thread` of all: FIELDS, and its turn at each query tile.

    sizes: (SIZES, batch), a window for each sequence.
    """
    thread = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    batch = thread // BLOCKS
    left = sizes[2, batch] if cutlass.const_expr(spec.window_left) else None
    right = sizes[3, batch] if cutlass.const_expr(spec.window_right) else None
    problem = BackwardProblem(
        spec, Int32(0), Int32(0), Int32(1), Int32(1), Int32(BLOCKS // spec.cta_group),
        Int32(BLOCKS), left, right, None, None, sizes[0, None], sizes[1, None],
    )  # fmt: skip
    with mock.patch.object(cute.arch, "block_idx", lambda: (thread, 0, 0)):
        tile = locate(problem)
    whole_start, whole_stop = tile.whole_tiles()
    values = (tile.block, tile.batch, tile.q_start, tile.q_stop, whole_start, whole_stop)
    for i, value in enumerate(values):
        fields[thread, i] = value
    for row_tile in cutlass.range_constexpr(BLOCKS):
        turns[thread, row_tile] = tile.keys_before(Int32(row_tile))


@cute.jit
def run_tiles(sizes: cute.Tensor, fields: cute.Tensor, turns: cute.Tensor, spec: cutlass.Constexpr):
    """Launch a thread per work tile."""
    grid = fields.shape[0] // THREADS
    tiles_kernel(sizes, fields, turns, spec).launch(grid=(grid, 1, 1), block=(THREADS, 1, 1))


def compile_tiles(spec: BackwardSpec, batch: int) -> Any:
    """The kernel for so many sequences, BLOCKS work tiles each."""

    def tensor(*shape: int) -> Any:
        return make_fake_tensor(Int32, shape, stride=(shape[1], 1), assumed_align=16)

    total = batch * BLOCKS
    arguments = tensor(len(SIZES), batch), tensor(total, len(FIELDS)), tensor(total, BLOCKS)
    with tempfile.TemporaryDirectory() as folder:
        options = (
            cute.EnableTVMFFI(True),
            cute.KeepPTX(True),
            cute.KeepCUBIN(True),
            cute.GPUArch("sm_100a"),
            DumpDir(folder),
        )
        return cute.compile[options](run_tiles, *arguments, spec)


@dataclass(frozen=True)
class Sequence:
    """Lengths, and the window where there is one."""

    seqlen_q: int
    seqlen_k: int
    left: int
    right: int


def rows_see(spec: BackwardSpec, one: Sequence) -> tuple[np.ndarray, np.ndarray]:
    """(first visible key, one past the last) of each row, within the sequence."""
    diagonal = np.arange(one.seqlen_q) + one.seqlen_k - one.seqlen_q
    start, stop = np.zeros_like(diagonal), np.full_like(diagonal, one.seqlen_k)
    if spec.mask is not None:
        start, stop = diagonal - diagonal % spec.mask.size, diagonal + 1
    if spec.window_left:
        start = diagonal - one.left
    if spec.causal or spec.window_right:
        stop = diagonal + 1 + (0 if spec.causal else one.right)
    start, stop = np.clip(start, 0, one.seqlen_k), np.clip(stop, 0, one.seqlen_k)
    return start, np.maximum(start, stop)


def meetings(spec: BackwardSpec, one: Sequence) -> tuple[np.ndarray, np.ndarray]:
    """(some pair of a query tile and a KV tile is visible, all of its 128 keys are to all rows)."""
    start, stop = rows_see(spec, one)
    tile = np.arange(BLOCKS) * TILE
    some = np.minimum(stop[:, None], tile + TILE) > np.maximum(start[:, None], tile)
    every = (start[:, None] <= tile) & (stop[:, None] >= tile + TILE)
    of_tile = [slice(m * TILE, (m + 1) * TILE) for m in range(BLOCKS)]
    return (
        np.stack([some[part].any(axis=0) for part in of_tile]),
        np.stack([every[part].all(axis=0) & bool(len(every[part])) for part in of_tile]),
    )


def tile_errors(
    spec: BackwardSpec, sequences: list[Sequence], fields: np.ndarray, turns: np.ndarray
) -> Iterator[str]:
    """What is wrong with the work tiles of a launch."""
    for batch, one in enumerate(sequences):
        part = slice(batch * BLOCKS, (batch + 1) * BLOCKS)
        some, every = meetings(spec, one)
        pairs = some.reshape(BLOCKS, -1, spec.cta_group).any(axis=2)  # their CTAs go together
        some = np.repeat(pairs, spec.cta_group, axis=1)
        by_tile: dict[tuple[int, int], list[int]] = {}
        for values, turn in zip(fields[part], turns[part], strict=True):
            tile = dict(zip(FIELDS, map(int, values), strict=True))
            what, n = f"{one}: {tile}", tile["block"] % BLOCKS
            visited = range(tile["q_start"], tile["q_stop"])
            whole = range(tile["whole_start"], tile["whole_stop"])
            if tile["batch"] != batch or set(visited) != set(np.flatnonzero(some[:, n])):
                yield f"{what} should visit {np.flatnonzero(some[:, n])}"
            elif set(whole) != set(np.flatnonzero(every[:, n])):
                yield f"{what} should have whole tiles {np.flatnonzero(every[:, n])}"
            elif not visited.start <= whole.start <= whole.stop <= visited.stop:
                yield f"{what}: whole tiles are not among the visited"
            for m in visited:
                by_tile.setdefault((m, n % spec.cta_group), []).append(int(turn[m % BLOCKS]))
        if sorted(fields[part, 0]) != list(range(BLOCKS)):
            yield f"{one}: KV tiles {fields[part, 0]}"
        for (m, _), order in by_tile.items():  # of launch
            if spec.deterministic and order != list(range(len(order))):
                yield f"{one}: turns at query tile {m} are {order}"
