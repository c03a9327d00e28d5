"""What to compute: the features of one attention call, independent of any tiling.

`Attention` says how raw products become probabilities. Order of operations (all kernels):
scale (and FP8 descales) -> score_mod or softcap -> mask -> softmax with sink -> dropout -> V.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fa4.config import Window, require_finite

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)

# score_mod(score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors) -> score
# score_mod_bwd(grad, score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors) -> grad
# mask_mod(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors) -> keep?
# score and grad are (heads, rows, cols); head, q_idx, kv_idx broadcast against them.
Callback = Callable[..., Any]


class SeqlenInfo(NamedTuple):
    """Lengths of the sequence that a callback is looking at."""

    seqlen_q: int
    seqlen_k: int


@dataclass(frozen=True, kw_only=True)
class Dropout:
    """Drop each probability with `probability`, scale the kept ones by 1/(1 - probability).

    The choice for (batch, head, query, key) is a function of `seed` and these four numbers alone,
    so that the backward pass replays it and no tiling changes it.
    """

    probability: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check 0 <= probability < 1 and a 64-bit seed."""
        require_finite("dropout_p", self.probability, 0.0)
        if self.probability >= 1.0:
            raise ValueError(f"dropout_p must be below 1; got {self.probability}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"dropout_seed must be in [0, 2**64); got {self.seed}")


class BlockSparseTensors(NamedTuple):
    """Ragged lists of the KV blocks that each block of query rows visits.

    Counts are (B or 1, H or 1, q_blocks), indices (B or 1, H or 1, q_blocks, kv_blocks), int32.
    In "mask" blocks mask_mod applies, in "full" blocks every pair of the block is visible; blocks
    in neither list are skipped. block_size is (rows, columns) of a block.
    """

    mask_block_cnt: np.ndarray
    mask_block_idx: np.ndarray
    full_block_cnt: np.ndarray | None = None
    full_block_idx: np.ndarray | None = None
    block_size: tuple[int, int] = (256, 128)


class Descale(NamedTuple):
    """Per (batch, kv head) float32 factors that undo the quantisation of FP8 inputs."""

    q: np.ndarray | None = None
    k: np.ndarray | None = None
    v: np.ndarray | None = None


# Fields of Attention that are keywords of `fa4.flash_attn_func` under the same name.
_KEYWORDS = frozenset(
    {"softmax_scale", "softcap", "score_mod", "score_mod_bwd", "mask_mod", "aux_tensors"}
)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Features of one call. softmax_scale multiplies raw scores; softcap 0 means none.

    `sink` (Hq,) is a virtual logit per head, not scaled and without a value vector.
    """

    softmax_scale: float
    window: Window = (None, None)
    softcap: float = 0.0
    sink: np.ndarray | None = None
    score_mod: Callback | None = None
    score_mod_bwd: Callback | None = None
    mask_mod: Callback | None = None
    aux_tensors: Any = None
    block_sparse: BlockSparseTensors | None = None
    dropout: Dropout = Dropout()
    descale: Descale = Descale()  # noqa: RUF009 - a tuple

    def __post_init__(self) -> None:
        """Refuse combinations without a meaning."""
        require_finite("softmax_scale", self.softmax_scale)
        require_finite("softcap", self.softcap, 0.0)
        if self.softcap and self.score_mod is not None:
            raise ValueError(
                f"softcap and score_mod exclude each other; got softcap {self.softcap} and a "
                "score_mod (write tanh into the score_mod instead)"
            )
        if self.mask_mod is not None and self.window != (None, None):
            raise ValueError(
                "mask_mod replaces causal and window_size; got both: put the band into mask_mod"
            )

    @property
    def modifies_scores(self) -> bool:
        """Do scores go through softcap or score_mod (and so are scaled before the maximum)?"""
        return self.score_mod is not None or self.softcap > 0.0

    @property
    def keywords(self) -> dict[str, Any]:
        """The same features as keywords of `fa4.flash_attn_func`."""
        by_name = {name: value for name, value in vars(self).items() if name in _KEYWORDS}
        return by_name | {
            "window_size": self.window,
            "learnable_sink": self.sink,
            "block_sparse_tensors": self.block_sparse,
            "dropout_p": self.dropout.probability,
            "dropout_seed": self.dropout.seed,
            "q_descale": self.descale.q,
            "k_descale": self.descale.k,
            "v_descale": self.descale.v,
        }

    def head_scale(self, batch: int, heads_q: int) -> np.ndarray:
        """(Hq, 1, 1) float64 factor of the raw products: softmax_scale * q_descale * k_descale."""
        scale = np.full(heads_q, self.softmax_scale, np.float64)
        for factor in (self.descale.q, self.descale.k):
            if factor is not None:
                scale *= np.repeat(factor[batch].astype(np.float64), heads_q // factor.shape[1])
        return scale[:, None, None]

    def value_scale(self, batch: int, heads_q: int) -> np.ndarray:
        """(Hq, 1, 1) float64 factor of the output: v_descale."""
        if self.descale.v is None:
            return np.ones((heads_q, 1, 1))
        factor = self.descale.v
        repeated = np.repeat(factor[batch].astype(np.float64), heads_q // factor.shape[1])
        return repeated[:, None, None]


class Region(NamedTuple):
    """A rectangle of one sequence's score matrix: query rows x keys, for all its heads."""

    batch: int
    heads: np.ndarray  # (Hq,)
    rows: np.ndarray  # query indices
    cols: np.ndarray  # key indices
    info: SeqlenInfo

    @property
    def grid(self) -> tuple[Any, ...]:
        """(batch, head, q_idx, kv_idx, seqlen_info) as callbacks take them."""
        return (
            self.batch,
            self.heads[:, None, None],
            self.rows[None, :, None],
            self.cols[None, None, :],
            self.info,
        )


def modify_scores(spec: Attention, scaled: np.ndarray, region: Region) -> np.ndarray:
    """Apply softcap or score_mod to scaled scores (Hq, rows, cols)."""
    if spec.softcap > 0.0:
        return spec.softcap * np.tanh(scaled / spec.softcap)
    if spec.score_mod is not None:
        modified = np.asarray(spec.score_mod(scaled, *region.grid, spec.aux_tensors))
        return np.broadcast_to(modified, scaled.shape).astype(scaled.dtype)
    return scaled


def modify_gradient(
    spec: Attention, grad: np.ndarray, scaled: np.ndarray, region: Region
) -> np.ndarray:
    """Gradient to the scaled scores from the gradient to the modified ones.

    softcap: d(c tanh(s/c))/ds = 1 - tanh(s/c)^2. score_mod: the caller's score_mod_bwd.
    """
    if spec.softcap > 0.0:
        return grad * (1.0 - np.tanh(scaled / spec.softcap) ** 2)
    if spec.score_mod is not None:
        if spec.score_mod_bwd is None:
            raise ValueError("the backward pass of a score_mod needs score_mod_bwd; got None")
        chained = np.asarray(spec.score_mod_bwd(grad, scaled, *region.grid, spec.aux_tensors))
        return np.broadcast_to(chained, grad.shape).astype(grad.dtype)
    return grad


def apply_mask_mod(spec: Attention, region: Region) -> np.ndarray:
    """mask_mod over a region as bool, broadcast to (Hq, rows, cols)."""
    assert spec.mask_mod is not None
    keep = np.asarray(spec.mask_mod(*region.grid, spec.aux_tensors), bool)
    return np.broadcast_to(keep, (len(region.heads), len(region.rows), len(region.cols)))


BLOCK_SKIPPED, BLOCK_PARTIAL, BLOCK_FULL = 0, 1, 2


def block_states(sparse: BlockSparseTensors, batch: int, heads_q: int) -> np.ndarray:
    """(Hq, q_blocks, kv_blocks) int8 of BLOCK_SKIPPED, BLOCK_PARTIAL, BLOCK_FULL."""
    width = sparse.mask_block_idx.shape[-1]
    states = np.zeros((heads_q, sparse.mask_block_cnt.shape[-1], width), np.int8)
    lists = ((sparse.mask_block_cnt, sparse.mask_block_idx, BLOCK_PARTIAL),
             (sparse.full_block_cnt, sparse.full_block_idx, BLOCK_FULL))  # fmt: skip
    for counts, indices, state in lists:
        if counts is None or indices is None:
            continue
        b = batch if counts.shape[0] > 1 else 0
        for head in range(heads_q):
            h = head if counts.shape[1] > 1 else 0
            for m, count in enumerate(counts[b, h]):
                states[head, m, indices[b, h, m, :count]] = state
    return states
