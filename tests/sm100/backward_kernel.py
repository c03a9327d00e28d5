"""The compiled backward kernel as a function of a `Case`, run by the emulator.

The main kernel alone: what the kernels around it would compute is done here by NumPy, so that a
fault is the main kernel's. `SPECS` names the code that the tests compile: few kernels, each with
several features at once. Sizes, values and schedules are drawn at run time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import cutlass
import numpy as np
import pytest
from cutlass import cute

from fa4.compiled.backward import fake_arguments
from fa4.compiled.build import build as build_cached
from fa4.compiled.host_code import compile_host
from fa4.config import normalize_window
from fa4.emulator.host.session import Session
from fa4.emulator.machine.options import Options
from fa4.kit.features import BackwardFeatures
from fa4.masks import Chunked
from fa4.oracle import attend
from fa4.sm90.backward import host as hopper
from fa4.sm90.backward.postprocess import unit_offset
from fa4.sm90.backward.spec import WarpgroupBackwardSpec
from fa4.sm100.backward import host
from fa4.sm100.backward.spec import BackwardSpec
from fa4.sm100.backward.workspace import dq_offset, first_tile, tiles_of
from fa4.testing.budget import Outputs
from fa4.testing.case import MASK_MODS, SCORE_MODS
from fa4.testing.inputs import Inputs
from tests.sm100.forward_kernel import (
    KERNELS,
    NOTHING,
    UNBOUNDED,
    aligned_copy,
    as_numpy,
    as_torch,
    biased,
    listed,
)

AnySpec: TypeAlias = BackwardSpec | WarpgroupBackwardSpec

REDUCE_WARPS = 4  # of a CTA, that add to a dQ tile


def passed(grad: Any, score: Any, b: Any, h: Any, i: Any, j: Any, info: Any, aux: Any) -> Any:
    """The derivative of a bias."""
    return grad


def curved(score: Any, b: Any, h: Any, i: Any, j: Any, info: Any, aux: Any) -> Any:
    """A score whose derivative depends on it, which no bias's and no factor's does."""
    return score - score * score * 0.015625


def curved_bwd(grad: Any, score: Any, b: Any, h: Any, i: Any, j: Any, info: Any, aux: Any) -> Any:
    """Its derivative."""
    return grad * (1.0 - score * 0.03125)


_BIAS, _DOCUMENTS = ("fp32", 2), ("int32", 1)
_BIASED = {"score_mod": biased, "score_mod_bwd": passed}
_TEMPERED = dict(zip(("score_mod", "score_mod_bwd"), SCORE_MODS["temper"], strict=True))
_CURVED = {"score_mod": curved, "score_mod_bwd": curved_bwd}
_STRIPES = MASK_MODS["stripes"]

SPECS: dict[str, dict[str, Any]] = {
    "plain": {"head_dim": 128},
    "causal": {"head_dim": 64, "dtype": "fp16", "causal": True, "deterministic": True},
    "window": {"head_dim": 72, "head_dim_v": 16, "window_left": True, "window_right": True,
               "packed_q": True, "packed_k": True, "deterministic": True, **_TEMPERED},
    "packed": {"head_dim": 64, "head_dim_v": 128, "causal": True, "window_left": True,
               "packed_q": True, "packed_k": True, "used_q": True, "used_k": True,
               "softcap": True, "deterministic": True},
    "padded": {"head_dim": 40, "head_dim_v": 24, "dtype": "fp16", "window_left": True,
               "window_right": True, "used_q": True, "used_k": True, "softcap": True},
    "biased": {"head_dim": 8, "head_dim_v": 120, "dtype": "fp16", "causal": True,
               "window_left": True, "used_q": True, "packed_k": True, "aux": (_BIAS,), **_BIASED},
    "biased_window": {"head_dim": 104, "window_right": True, "packed_q": True, "used_k": True,
                      "aux": (_BIAS,), "deterministic": True, "dtype": "fp16", **_BIASED},
    "masked": {"head_dim": 32, "packed_q": True, "packed_k": True, "used_q": True, "used_k": True,
               "mask_mod": listed, "aux": (_BIAS, _DOCUMENTS), "dtype": "fp16",
               "deterministic": True, **_BIASED},
    "masked_softcap": {"head_dim": 16, "head_dim_v": 88, "mask_mod": _STRIPES, "softcap": True,
                       "packed_q": True, "aux": (_BIAS,)},
    "chunked": {"head_dim": 128, "mask": Chunked(100), "packed_q": True, "packed_k": True,
                "used_q": True, "used_k": True, "deterministic": True, "dtype": "fp16"},
    "chunked_curved": {"head_dim": 96, "head_dim_v": 64, "mask": Chunked(200), "aux": (_BIAS,),
                       **_CURVED},
    "chunked_softcap": {"head_dim": 24, "head_dim_v": 32, "mask": Chunked(128), "softcap": True,
                        "aux": (_BIAS,)},
    "pair": {"head_dim": 128, "causal": True, "deterministic": True, "cta_group": 2},
    "pair_window": {"head_dim": 128, "dtype": "fp16", "window_left": True, "window_right": True,
                    "packed_q": True, "packed_k": True, "used_q": True, "used_k": True,
                    "cta_group": 2},
    "wide_pair": {"head_dim": 192, "head_dim_v": 128, "window_left": True, "deterministic": True,
                  "packed_q": True, "packed_k": True, "cta_group": 2},
    "capped": {"head_dim": 112, "softcap": True, "window_right": True, "packed_k": True,
               "aux": (_BIAS,)},
}  # fmt: skip


def spec_of(name: str) -> BackwardSpec:
    """One of `SPECS`; head_dim_v is head_dim where it is not named."""
    return BackwardSpec(**{"head_dim_v": SPECS[name]["head_dim"], **SPECS[name]})


# Of `fa4.compiled.launch.BackwardArguments`, what the main kernel is given.
PARAMETERS = (
    "q", "k", "v", "dout", "dk", "dv", "dq_accum", "stats", "turns", "drawn", "softmax_scale",
    "softcap", "window_left", "window_right", "max_seqlen_q", "max_seqlen_k", "cu_seqlens_q",
    "cu_seqlens_k", "seqused_q", "seqused_k", "aux",
)  # fmt: skip


@cute.jit
def gradients(q, k, v, dout, dk, dv, dq_accum, stats, turns, drawn, softmax_scale, softcap,
              window_left, window_right, longest_q, longest_k, cu_seqlens_q, cu_seqlens_k,
              seqused_q, seqused_k, aux, stream, spec: cutlass.Constexpr,
              trace: cutlass.Constexpr):  # fmt: skip
    """`host.gradients`, of Blackwell or Hopper, with one level of arguments."""
    machine: cutlass.Constexpr = hopper if isinstance(spec, WarpgroupBackwardSpec) else host
    counts: cutlass.Constexpr = (turns,) if machine is host else (turns, drawn)
    machine.gradients(
        q, k, v, dout, dk, dv, dq_accum, stats, *counts, softmax_scale, softcap,
        (window_left, window_right), (longest_q, longest_k),
        (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k), aux, stream, spec, trace,
    )  # fmt: skip


def compile_gradients(spec: AnySpec, arch: str = "sm_100a", trace: list[Any] | None = None) -> Any:
    """What `cute.compile` returns for the main kernel; see `compile_forward`."""
    given = fake_arguments(spec)
    return compile_host(gradients, [getattr(given, name) for name in PARAMETERS], spec, arch, trace)


@dataclass(frozen=True)
class Workspace:
    """What the kernels hand one another, as `workspace` describes it; NaN where no tile is.

    places: (first tile, rows) of each sequence. block_rows: of a tile.
    """

    dq_accum: np.ndarray
    stats: np.ndarray
    turns: np.ndarray
    places: tuple[tuple[int, int], ...]
    block_rows: int

    def tiles(self) -> Iterator[int]:
        """Every tile that a sequence has."""
        for first, rows in self.places:
            yield from range(first, first + -(-rows // self.block_rows))


def prepare(spec: AnySpec, inputs: Inputs, with_dlse: bool = False) -> Workspace:
    """Zeros where dQ is added up, and -LSE and -D."""
    stats, places = prepare_stats(spec, inputs, with_dlse)
    heads, count, d = *stats.shape[:2], spec.dq_dim
    accum = np.full((heads, count, spec.block_rows * d), np.nan, np.float32)
    turns = np.zeros((heads, count, spec.dq_counters), np.int32)
    space = Workspace(accum, stats, turns, places, spec.block_rows)
    accum[:, list(space.tiles())] = 0.0
    return space


def prepare_stats(
    spec: BackwardFeatures, inputs: Inputs, with_dlse: bool = False
) -> tuple[np.ndarray, tuple[tuple[int, int], ...]]:
    """-LSE and -D from the oracle, as float32 and from an O rounded to the element type; places."""
    heads, packed, step = inputs.q.shape[-2], spec.packed_q, spec.block_rows
    batch = len(inputs.sequences)
    lengths = [len(seq.q) for seq in inputs.sequences]
    rows = inputs.q.shape[0] if packed else inputs.q.shape[1]
    count = tiles_of(rows, batch, packed=packed, block_rows=step)
    stats = np.full((heads, count, 2, step), np.nan, np.float32)
    places = []
    for b, seq in enumerate(inputs.sequences):
        start = inputs.q_index[b][0].start if packed else 0
        first = first_tile(b, start, -(-rows // step), packed=packed, block_rows=step)
        blocks = -(-lengths[b] // step)
        places.append((first, lengths[b]))
        out, lse = attend(seq.q, seq.k, seq.v, inputs.options, b)
        out = out.astype(inputs.q.dtype).astype(np.float32)
        row_dot = (seq.dout.astype(np.float32) * out).sum(axis=-1).T
        if with_dlse:
            row_dot = row_dot - seq.dlse
        part = np.zeros((heads, 2, blocks * step), np.float32)
        part[:, 0] = -np.inf
        part[:, 0, : lengths[b]] = np.where(np.isinf(lse), 0.0, -lse * np.log2(np.e))
        part[:, 1, : lengths[b]] = -row_dot
        part = part.reshape(heads, 2, blocks, step).transpose(0, 2, 1, 3)
        stats[:, first : first + blocks] = part
    return stats, tuple(places)


def finish(spec: AnySpec, inputs: Inputs, space: Workspace, scale: float) -> np.ndarray:
    """dQ in the layout of q, scaled and rounded. AssertionError if other tiles were touched."""
    d, dq = spec.dq_dim, np.full_like(inputs.q, NOTHING)
    sums = space.dq_accum[:, :, dq_places(spec)]
    for index, (first, rows) in zip(inputs.q_index, space.places, strict=True):
        mine = sums[:, first : first + -(-rows // spec.block_rows)].reshape(len(sums), -1, d)
        mine = mine[:, :rows, : spec.head_dim].transpose(1, 0, 2) * np.float32(scale)
        dq[index] = mine.astype(dq.dtype)
    others = np.ones(sums.shape[1], bool)
    others[list(space.tiles())] = False
    assert np.isnan(space.dq_accum[:, others]).all(), "dQ of a tile that no sequence has"
    return dq


def dq_places(spec: AnySpec) -> np.ndarray:
    """Where each element of a dQ tile lies in it: (rows, padded head dim)."""
    d = spec.dq_dim
    row, col = np.meshgrid(np.arange(spec.block_rows), np.arange(d), indexing="ij")
    if isinstance(spec, BackwardSpec):
        return np.asarray(dq_offset(row, col, d))
    # Vectors of a quad's threads, each two columns of a row and of the row 8 below.
    unit = unit_offset(spec, row // 16 * 16 + row % 8, col // 8)
    return np.asarray(unit + col % 8 // 2 * 4 + row % 16 // 8 * 2 + col % 2)


@dataclass(frozen=True)
class BackwardKernel:
    """A compiled spec, with its host code loaded."""

    spec: AnySpec
    compiled: Any
    session: Session

    def __call__(
        self, inputs: Inputs, *, with_dlse: bool = False, **options: Any
    ) -> tuple[Outputs, Any]:
        """(gradients, report of the emulator); findings raise unless collect=True."""
        space = prepare(self.spec, inputs, with_dlse)
        report, outputs = self.launch(inputs, space, **options)
        return outputs, report

    def launch(self, inputs: Inputs, space: Workspace, **options: Any) -> tuple[Any, Outputs]:
        """The same on a workspace that is kept."""
        call = arguments(self.spec, inputs, space)
        self.session._options = Options(**options)
        self.session.reports.clear()
        self.session.call(self.compiled, call, {})
        (report,) = self.session.reports
        dk, dv = (as_numpy(x) for x in call[4:6])
        mine = np.zeros(dk.shape[:-2], bool)
        for index in inputs.kv_index:
            mine[index] = True
        for written in (dk, dv):
            assert (written[~mine] == NOTHING).all(), "a key beyond its sequence was written"
            assert surroundings_are_nan(written), "memory beside a gradient was written"
        dq = finish(self.spec, inputs, space, call[PARAMETERS.index("softmax_scale")])
        return report, Outputs(None, dq=dq, dk=dk.copy(), dv=dv.copy())


@cache
def kernel(name: str) -> BackwardKernel:
    """One of `SPECS`, compiled once on this machine as long as no source changes."""
    return kept(spec_of(name))


def kept(spec: AnySpec) -> BackwardKernel:
    """A kernel that is compiled once on this machine as long as no source changes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FA4_CACHE", "1")
        patch.setenv("FA4_CACHE_DIR", str(KERNELS))
        compiled = build_cached(spec, spec.gpu.arch, compiler=compile_gradients)
        return BackwardKernel(spec, compiled, Session(None, (), {}))


def build(spec: AnySpec, trace: list[Any] | None = None) -> BackwardKernel:
    """A kernel that is not kept. trace: collects its steps."""
    compiled = compile_gradients(spec, spec.gpu.arch, trace)
    return BackwardKernel(spec, compiled, Session(None, (), {}))


def arguments(spec: AnySpec, inputs: Inputs, space: Workspace) -> tuple[Any, ...]:
    """What `gradients` is called with, in its order; dK and dV hold `NOTHING`."""
    options = inputs.options
    operands = (inputs.q, inputs.k, inputs.v, inputs.dout)
    outputs = (np.full_like(x, NOTHING) for x in (inputs.k, inputs.v))
    left, right = normalize_window(options.get("window_size", (None, None)), spec.causal)
    scale, aux = options.get("softmax_scale"), options.get("aux_tensors")
    parts = [(len(seq.q), len(seq.k)) for seq in inputs.sequences]

    def optional(given: bool, value: Any) -> Any:
        return value if given else None

    def vector(name: str) -> Any:
        values = options.get(name)
        return None if values is None else np.ascontiguousarray(values, np.int32)

    return (
        *(as_torch(aligned_copy(x)) for x in (*operands, *outputs)),
        space.dq_accum,
        space.stats,
        optional(spec.deterministic, space.turns),
        optional(getattr(spec, "draws_work", False), np.zeros((1, 1), np.int32)),
        spec.head_dim**-0.5 if scale is None else scale,
        optional(spec.softcap, options.get("softcap")),
        optional(spec.window_left, UNBOUNDED if left is None else left),
        optional(spec.window_right, UNBOUNDED if right is None else right),
        max(1, *(rows for rows, _ in parts)),
        max(1, *(keys for _, keys in parts)),
        *map(vector, ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")),
        optional(bool(spec.aux), aux),
    )


def surroundings_are_nan(x: np.ndarray) -> bool:
    """Is what `aligned_copy` put around an array still there?"""
    heads, dim = x.shape[-2:]
    shape = (*x.shape[:-2], heads + 1, dim + 8)
    wide = np.lib.stride_tricks.as_strided(x, shape, x.strides)
    kept = np.isnan(wide.astype(np.float32))
    return bool(kept[..., heads, :].all() and kept[..., dim:].all())
