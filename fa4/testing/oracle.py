"""What the outputs of a call should be: the float64 oracle of `fa4`, one sequence at a time.

Dense calls go to the oracle as they are; sequences of a packed, padded or paged call one by one, so
that the unpacking code of the library has no part in the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import fa4
from fa4.testing.inputs import Inputs, SequenceInputs

# Options that say where sequences lie or how to compute, not what.
_LAYOUT = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "page_table")
_HOW = ("config", "num_splits")


def oracle_forward(inputs: Inputs) -> list[dict[str, np.ndarray]]:
    """{"out": (Sq, Hq, dv), "lse": (Hq, Sq)} of every sequence, float64."""
    if not inputs.is_varlen:
        out, lse = _forward(inputs.q, inputs.k, inputs.v, _meaning(inputs.options))
        return [{"out": out[b], "lse": lse[b]} for b in range(len(inputs.sequences))]
    results = []
    for b, seq in enumerate(inputs.sequences):
        options = _of_sequence(inputs.options, b)
        out, lse = _forward(seq.q[None], seq.k[None], seq.v[None], options)
        results.append({"out": out[0], "lse": lse[0]})
    return results


def oracle_gradients(
    inputs: Inputs, *, with_dlse: bool = False
) -> tuple[list[dict[str, np.ndarray]], np.ndarray | None]:
    """{"dq": (Sq, Hq, d), "dk": ..., "dv": (Sk, Hk, dv)} of every sequence, and dsink (Hq,)."""
    results, dsink = [], None
    for b, seq in enumerate(inputs.sequences):
        grads = _backward(seq, _of_sequence(inputs.options, b), with_dlse)
        results.append({"dq": grads.dq[0], "dk": grads.dk[0], "dv": grads.dv[0]})
        if grads.dsink is not None:
            dsink = grads.dsink if dsink is None else dsink + grads.dsink
    return results, dsink


def _meaning(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in _LAYOUT + _HOW}


def _of_sequence(options: dict[str, Any], batch: int) -> dict[str, Any]:
    """The options as a call with that batch entry alone needs them."""
    mine = _meaning(options)
    for name in ("q_descale", "k_descale", "v_descale"):
        if name in mine:
            mine[name] = mine[name][batch : batch + 1]
    for name, values_before in (("score_mod", 1), ("score_mod_bwd", 2), ("mask_mod", 0)):
        if name in mine:
            mine[name] = _shift_batch(mine[name], values_before, batch)
    sparse = mine.get("block_sparse_tensors")
    if sparse is not None:
        fields = {
            name: getattr(sparse, name)[batch : batch + 1]
            for name in ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx")
            if getattr(sparse, name) is not None and len(getattr(sparse, name)) > 1
        }
        mine["block_sparse_tensors"] = sparse._replace(**fields)
    return mine


def _shift_batch(function: Callable[..., Any], position: int, batch: int) -> Callable[..., Any]:
    """The callback with `batch` in place of the batch index at a position."""

    def shifted(*arguments: Any) -> Any:
        return function(*arguments[:position], batch, *arguments[position + 1 :])

    return shifted


def _forward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, options: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    options = {name: value for name, value in options.items() if name != "score_mod_bwd"}
    result = fa4.flash_attn_func(q, k, v, impl="oracle", return_lse=True, **options)
    return result.out, result.lse


def _backward(seq: SequenceInputs, options: dict[str, Any], with_dlse: bool) -> Any:
    rows, heads, _ = seq.q.shape
    # The oracle computes both itself.
    out, lse = np.zeros((1, rows, heads, seq.v.shape[-1])), np.zeros((1, heads, rows))
    return fa4.flash_attn_backward(
        seq.dout[None], seq.q[None], seq.k[None], seq.v[None], out, lse,
        dlse=seq.dlse[None] if with_dlse else None, impl="oracle", **options,
    )  # fmt: skip
