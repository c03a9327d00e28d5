"""S_dmask: the probabilities of a call with dropout, those that were dropped with a minus sign.

Attention to the identity matrix in place of V is the matrix of probabilities, so two calls of the
reference give them, with and without dropout. Memory is quadratic; it is meant for tests.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from fa4.call.arrays import is_torch, like, to_numpy
from fa4.dropin.attend import Tensors, attend
from fa4.dropin.mods import Modification


def dropped_probabilities(
    tensors: Tensors, options: dict[str, Any], bias: Modification | None, *, varlen: bool
) -> Any:
    """(B, Hq, Sq, Sk), padded with 0 to the longest sequences where lengths differ."""
    k = to_numpy("k", tensors[1])
    offsets = [to_numpy("cu_seqlens", options[f"cu_seqlens_{x}"]) for x in "qk"] if varlen else []
    if varlen:
        longest = int(np.diff(offsets[1]).max(initial=0))
        local = np.concatenate([np.arange(b - a) for a, b in pairwise(offsets[1])])
        identity = np.eye(longest, dtype=k.dtype)[local][:, None]
    else:
        identity = np.eye(k.shape[1], dtype=k.dtype)[:, None]
    values = like(tensors[0], np.broadcast_to(identity, (*k.shape[:-1], identity.shape[-1])))
    given = [x.detach() if is_torch(x) else x for x in (*tensors[:2], values)]
    kept, all_of_them = (
        to_numpy("out", attend((given[0], given[1], given[2]), chosen, bias, varlen=varlen,
                               impl="reference"))
        for chosen in (options, options | {"dropout_p": 0.0})
    )  # fmt: skip
    signed = np.where(kept == 0, -all_of_them, all_of_them)
    if varlen:
        rows = np.diff(offsets[0])
        padded = np.zeros((len(rows), rows.max(initial=0), *signed.shape[1:]), signed.dtype)
        for b, (start, stop) in enumerate(pairwise(offsets[0])):
            padded[b, : stop - start] = signed[start:stop]
        signed = padded
    return like(tensors[0], np.ascontiguousarray(signed.swapaxes(1, 2)))
