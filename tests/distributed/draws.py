"""What the tests of plans draw: layouts, masks, methods and sizes that fit each other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
from hypothesis import strategies as st

from fa4.distributed.blocks import SequenceMask
from fa4.distributed.exact import ExactCalculator
from fa4.distributed.execute import run_here
from fa4.distributed.layout import LAYOUTS, make_layout
from fa4.distributed.methods import METHODS, make_plan
from fa4.distributed.plan import Sizes, Spec
from fa4.oracle import attend_batch, differentiate_batch

RANKS = (1, 2, 3, 4, 8)
SIDES = st.none() | st.integers(0, 12)
PREFILL = tuple(name for name in METHODS if name != "tree")


@st.composite
def specs(draw: st.DrawFn, methods: tuple[str, ...] = PREFILL) -> Spec:
    """Forward specs of up to 60 rows; documents of length 0 and 1 among them."""
    ranks, name = draw(st.sampled_from(RANKS)), draw(st.sampled_from(LAYOUTS))
    lengths = draw(st.lists(st.integers(0, 20), min_size=1, max_size=4))
    if name != "documents" and draw(st.booleans()):
        lengths = [sum(lengths)]
    offsets = tuple(accumulate(lengths, initial=0))
    tile = draw(st.sampled_from((1, 1, 3)))
    layout = make_layout(name, offsets[-1], ranks, cu_seqlens=offsets, tile=tile)
    left, right = draw(SIDES), draw(st.just(0) | SIDES)
    method = draw(st.sampled_from(methods))
    heads_k = draw(st.sampled_from((1, 2)))
    each = ranks if method == "ulysses" else draw(st.sampled_from((1, 3)))
    degree = draw(st.sampled_from([x for x in (1, 2, 4) if ranks % x == 0]))
    if method == "ring+ulysses":
        each = degree
    sizes = Sizes(heads_k * each, heads_k, 4, 3, 1, 8)
    mask = SequenceMask(left, right, offsets)
    groups = draw(st.integers(1, 3))
    return Spec(method, layout, layout, mask, sizes, degree=degree, head_groups=groups)


@dataclass(frozen=True)
class Inputs:
    """q, k, v and dO of one batch entry, and what the options of the oracle are."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    options: dict[str, Any]

    @classmethod
    def of(cls, spec: Spec, seed: int, **options: Any) -> Inputs:
        """Random ones of a spec."""
        rng, sizes, rows = np.random.default_rng(seed), spec.sizes, spec.rows.seqlen
        heads = ((sizes.heads_q, sizes.head_dim), (sizes.heads_k, sizes.head_dim))
        values = ((sizes.heads_k, sizes.head_dim_v), (sizes.heads_q, sizes.head_dim_v))
        drawn = (rng.standard_normal((rows, *shape)) for shape in (*heads, *values))
        offsets = np.array(spec.mask.documents)
        mask = {"window_size": (spec.mask.left, spec.mask.right)}
        given = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, **mask, **options}
        return cls(*drawn, given)

    def attend(self) -> tuple[np.ndarray, np.ndarray]:
        """The oracle's O and LSE, LSE as (rows, heads, 1)."""
        out, lse = attend_batch(self.q, self.k, self.v, self.options)
        return out, np.moveaxis(lse, 0, 1)[..., None]

    def gradients(self) -> tuple[np.ndarray, ...]:
        """The oracle's dQ, dK and dV."""
        found = differentiate_batch((self.q, self.k, self.v), self.dout, None, self.options)
        return found.dq, found.dk, found.dv


def forward_here(spec: Spec, inputs: Inputs, calculator: Any = None) -> tuple[Any, Any]:
    """O and LSE of all rows by the plan, in this process."""
    calculator = calculator or ExactCalculator(spec.sizes, spec.sizes.head_dim**-0.5)
    layout = spec.rows
    cut = [[layout.shard(x[None], r) for x in (inputs.q, inputs.k, inputs.v)]
           for r in range(spec.ranks)]  # fmt: skip
    given = [{"q": (q,), "kv": (k, v)} for q, k, v in cut]
    found = run_here(make_plan(spec), calculator, given)
    return tuple(layout.unshard([x["o"][i] for x in found])[0] for i in range(2))


def backward_here(
    spec: Spec, inputs: Inputs, saved: tuple[Any, Any], calculator: Any = None
) -> tuple[Any, ...]:
    """dQ, dK and dV of all rows by the plan; saved: O and LSE of all keys."""
    calculator = calculator or ExactCalculator(spec.sizes, spec.sizes.head_dim**-0.5)
    spec, layout = replace(spec, backward=True), spec.rows
    out, lse = saved
    delta = (inputs.dout * out).sum(-1, keepdims=True)
    rows = (inputs.q, inputs.dout, lse, delta)
    given = [
        {
            "q": tuple(layout.shard(x[None], r) for x in rows),
            "kv": tuple(layout.shard(x[None], r) for x in (inputs.k, inputs.v)),
        }
        for r in range(spec.ranks)
    ]
    found = run_here(make_plan(spec), calculator, given)
    parts = (("dq", 0), ("dkv", 0), ("dkv", 1))
    return tuple(layout.unshard([x[name][i] for x in found])[0] for name, i in parts)


def worst(found: Any, wanted: Any) -> float:
    """The largest difference; infinite where only one is infinite or NaN."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.shape == wanted.shape
    same = (found == wanted) | (np.isneginf(found) & np.isneginf(wanted))
    apart = np.where(same, 0.0, np.abs(np.where(same, 0.0, found) - np.where(same, 0.0, wanted)))
    return float(np.nan_to_num(apart, nan=np.inf).max(initial=0.0))
