"""order="exact": the same bits for any number of ranks, gradients included."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.distributed.blocks import SequenceMask
from fa4.distributed.check import check_plan
from fa4.distributed.execute import run_here
from fa4.distributed.layout import make_layout
from fa4.distributed.methods import make_plan
from fa4.distributed.plan import Sizes, Spec
from fa4.distributed.public import PublicCalculator, PublicKernel
from fa4.dtypes import round_to

TILE, ROWS = 8, 70
SIZES = Sizes(4, 2, 8, 8)


def make_spec(ranks: int, layout: str, method: str, mask: SequenceMask, tile: int = TILE) -> Spec:
    """Runs cut at multiples of the tile."""
    rows = make_layout(layout, ROWS, ranks, cu_seqlens=mask.documents, tile=TILE)
    return Spec(method, rows, rows, mask, SIZES, tile=tile)


def compute(spec: Spec, dtype: str) -> list[np.ndarray]:
    """O, LSE, dQ, dK and dV of all rows by the reference, as bytes."""
    rng, layout = np.random.default_rng(0), spec.rows
    q, k, v, dout = (
        round_to(rng.standard_normal((1, ROWS, heads, 8)), dtype) for heads in (4, 2, 2, 4)
    )
    calculator = PublicCalculator(SIZES, PublicKernel("reference"), q, 8**-0.5)

    def shards(x: np.ndarray) -> list[np.ndarray]:
        return [layout.shard(x, rank) for rank in range(spec.ranks)]

    def whole(found: list[dict[str, Any]], name: str, number: int) -> np.ndarray:
        return np.asarray(layout.unshard([x[name][number] for x in found]))

    keys = [{"kv": pair} for pair in zip(shards(k), shards(v), strict=True)]
    given = [{"q": (x,), **y} for x, y in zip(shards(q), keys, strict=True)]
    found = run_here(make_plan(spec), calculator, given)
    out, lse = whole(found, "o", 0).astype(q.dtype), whole(found, "o", 1)
    rows = zip(*(shards(x) for x in (q, dout, lse, out)), strict=True)
    given = [{"q": x, **y} for x, y in zip(rows, keys, strict=True)]
    back = run_here(make_plan(replace(spec, backward=True)), calculator, given)
    names = (("dq", 0), ("dkv", 0), ("dkv", 1))
    return [x.view(np.uint8) for x in (out, lse, *(whole(back, *name) for name in names))]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "mask",
    [
        SequenceMask(None, 0, (0, ROWS)),
        SequenceMask(11, 0, (0, ROWS)),
        SequenceMask(None, None, (0, 29, 29, ROWS)),
    ],
    ids=["causal", "window", "documents"],
)
def test_bits_do_not_depend_on_the_ranks(mask: SequenceMask, dtype: str) -> None:
    """P = 1, 2, 4, 8, layouts and both ways to gather."""
    layouts = ("documents",) if len(mask.documents) > 2 else ("zigzag", "contiguous")
    wanted = compute(make_spec(1, layouts[0], "all_gather", mask), dtype)
    for ranks, method in ((2, "halo"), (4, "all_gather"), (8, "halo")):
        for layout in layouts:
            found = compute(make_spec(ranks, layout, method, mask), dtype)
            assert all(np.array_equal(x, y) for x, y in zip(found, wanted, strict=True))


def test_bits_of_a_ring_do() -> None:
    """So the comparison sees a difference: merges round."""
    mask = SequenceMask(None, 0, (0, ROWS))
    wanted = compute(make_spec(1, "zigzag", "all_gather", mask), "bf16")
    found = compute(make_spec(4, "zigzag", "ring", mask, tile=0), "bf16")
    assert not all(np.array_equal(x, y) for x, y in zip(found, wanted, strict=True))


@settings(max_examples=20)
@given(st.integers(1, 8), st.none() | st.integers(0, 30), st.booleans())
def test_exact_plans_are_right(ranks: int, left: int | None, backward: bool) -> None:
    """Each pair once, also where dK and dV are computed from the keys' side."""
    spec = make_spec(ranks, "zigzag", "halo", SequenceMask(left, 0, (0, ROWS)))
    assert check_plan(make_plan(replace(spec, backward=backward))).findings == ()


def test_what_cannot_be_exact_is_refused() -> None:
    """One line."""
    spec = make_spec(3, "zigzag", "ring", SequenceMask(None, 0, (0, ROWS)))
    with pytest.raises(ValueError, match="all_gather or halo; got ring"):
        make_plan(spec)
    striped = make_layout("striped", ROWS, 3)
    with pytest.raises(ValueError, match="multiples of 8 rows"):
        make_plan(replace(spec, method="halo", rows=striped, keys=striped))
