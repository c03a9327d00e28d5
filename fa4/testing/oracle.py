"""The right answer of a call: `fa4.oracle`, one sequence at a time.

Sequences of a packed, padded or paged call are given to the oracle one by one, with the options as
the back end got them, so that nothing that unpacks or reads options for a library is in the answer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fa4 import oracle
from fa4.testing.inputs import Inputs, SequenceInputs, of_rows


def oracle_forward(inputs: Inputs) -> list[dict[str, np.ndarray]]:
    """{"out": (Sq, Hq, dv), "lse": (Hq, Sq)} of every sequence, float64."""
    results = []
    for b, seq in enumerate(inputs.sequences):
        (q, k, v), options = _unscaled(seq, inputs.options, b)
        out, lse = oracle.attend(q, k, v, options, b)
        results.append({"out": out, "lse": lse})
    return results


def _unscaled(
    seq: SequenceInputs, options: dict[str, Any], batch: int
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """q, k, v and options; float64 values without descales where those are of blocks."""
    tables = {name: x for name, x in options.items() if name.endswith("_descale") and x.ndim > 2}
    arrays = []
    for name in "qkv":
        x, table = getattr(seq, name), tables.get(f"{name}_descale")
        if table is not None:
            heads = np.repeat(of_rows(table[batch], len(x)), x.shape[1] // table.shape[1], axis=0)
            x = x.astype(np.float64) * heads.T[..., None]
        arrays.append(x)
    return arrays, {name: x for name, x in options.items() if name not in tables}


def oracle_gradients(
    inputs: Inputs, *, with_dlse: bool = False
) -> tuple[list[dict[str, np.ndarray]], np.ndarray | None]:
    """{"dq": (Sq, Hq, d), "dk": ..., "dv": (Sk, Hk, dv)} of every sequence, and dsink (Hq,)."""
    results, dsink = [], None
    for b, seq in enumerate(inputs.sequences):
        grads = oracle.differentiate(
            (seq.q, seq.k, seq.v),
            seq.dout,
            inputs.options,
            dlse=seq.dlse if with_dlse else None,
            batch=b,
        )
        results.append({"dq": grads.dq, "dk": grads.dk, "dv": grads.dv})
        if grads.dsink is not None:
            dsink = grads.dsink if dsink is None else dsink + grads.dsink
    return results, dsink
