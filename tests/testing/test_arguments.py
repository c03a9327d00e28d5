"""What a function is given has the shapes and types of the call, whatever kind of call it is.

Every size is another one: a head dim in the place of another, or of a number of heads, shows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fa4.dtypes import numpy_dtype
from fa4.testing import Case, build_inputs, dense_inputs, load_backend
from fa4.testing.case import LAYOUTS
from fa4.testing.contract import Backend

SIZES = Case(
    batch=2, seqlen_q=5, seqlen_k=9, heads_k=3, group=4, head_dim=32, head_dim_v=24, page_size=8
)
KINDS = {
    layout: SIZES if layout == "dense" else replace(
        SIZES, layout=layout, lengths=((5, 9), (7, 2)), causal=True
    )
    for layout in LAYOUTS
}  # fmt: skip


def shapes_of(layout: str) -> dict[str, tuple[int, ...]]:
    """Of the arrays of a call: heads and dims that its case states behind rows, or keys."""
    inputs = build_inputs(KINDS[layout])
    rows, keys = inputs.q.shape[:-2], inputs.k.shape[:-2]
    if layout == "dense":
        assert (rows, keys) == ((2, 5), (2, 9))
    heads = {"q": 12, "out": 12, "dout": 12, "k": 3, "v": 3}
    dims = {"q": 32, "k": 32, "v": 24, "out": 24, "dout": 24}
    found = {x: (*(keys if x in "kv" else rows), heads[x], dims[x]) for x in dims}
    return found | {f"d{x}": found[x] for x in "qkv"}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "e4m3"])
def test_outputs_that_a_function_asks_for(layout: str, dtype: str) -> None:
    """out, dq, dk and dv have the shapes of what is to be written there, full of NaN."""
    seen: dict[str, np.ndarray] = {}
    oracle = load_backend("oracle")

    def attend(q, k, v, *, out: Any = None, return_lse: bool = False, **options: Any) -> Any:
        seen["out"] = out
        function = oracle.varlen if layout != "dense" else oracle.function
        return function(q, k, v, return_lse=return_lse, **options)

    def backward(dout, q, k, v, out, lse, *, dq: Any, dk: Any, dv: Any, **options: Any) -> Any:
        seen.update(dq=dq, dk=dk, dv=dv, dout=dout)
        return tuple(np.zeros(x.shape, x.dtype) for x in (dq, dk, dv))

    backend = Backend("asks", attend, attend, backward)
    inputs = build_inputs(replace(KINDS[layout], dtype=dtype))
    backend.gradients(inputs, backend.forward(inputs))
    shapes = shapes_of(layout)
    for name, array in seen.items():
        assert array.shape == shapes[name], name
        wanted = "bf16" if dtype == "e4m3" and name == "out" else dtype
        assert array.dtype == numpy_dtype(wanted), name
        assert name == "dout" or np.isnan(array.astype(np.float64)).all(), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_a_call(layout: str) -> None:
    """dO has the shape of O and dLSE that of the LSE, as a whole and of each sequence."""
    inputs, shapes = build_inputs(KINDS[layout]), shapes_of(layout)
    for name in ("q", "k", "v", "dout"):
        assert getattr(inputs, name).shape == shapes[name], name
    assert inputs.dlse.shape == (*shapes["q"][:-3], 12, shapes["q"][-3])
    assert load_backend("oracle").forward(inputs).lse.shape == inputs.dlse.shape
    for part, (rows, keys) in zip(inputs.sequences, KINDS[layout].sequences, strict=True):
        assert part.dout.shape == (rows, 12, 24) and part.dlse.shape == (12, rows)
        assert part.visible.shape == (12, rows, keys)


def test_arrays_of_your_own() -> None:
    """The sequences are the arrays' entries; dO and dLSE are drawn from the seed, for each other.

    So that a gradient is asked for everywhere, and another one for another seed."""
    built = build_inputs(SIZES)
    inputs = dense_inputs(built.q, built.k, built.v, seed=3, causal=True)
    assert inputs.dout.shape == (2, 5, 12, 24) and inputs.dout.dtype == built.q.dtype
    assert inputs.dlse.shape == (2, 12, 5) and inputs.dlse.dtype == np.float32
    for b, part in enumerate(inputs.sequences):
        for name in ("q", "k", "v", "dout", "dlse"):
            assert np.array_equal(getattr(part, name), getattr(inputs, name)[b]), name
            assert len(np.unique(getattr(part, name))) > 1
    again, other = (dense_inputs(built.q, built.k, built.v, seed=n) for n in (3, 4))
    assert np.array_equal(again.dout, inputs.dout) and np.array_equal(again.dlse, inputs.dlse)
    assert not np.array_equal(other.dout, inputs.dout)
    assert np.array_equal(
        dense_inputs(built.q, built.k, built.v).dout,
        dense_inputs(built.q, built.k, built.v, seed=0).dout,
    )
