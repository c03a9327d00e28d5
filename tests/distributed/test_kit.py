"""The kit's properties of calls that are divided over ranks, each plan carried out in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fa4.distributed.exact import ExactCalculator
from fa4.distributed.execute import run_here
from fa4.distributed.layout import RowLayout, make_layout
from fa4.distributed.methods import make_plan
from fa4.distributed.plan import SequenceMask, Sizes, Spec
from fa4.testing import verify

RANKS = 3
ONLY = ("plain", "causal", "window", "gqa", "softmax_scale", "rows_without_keys",
        "causal_with_gqa", "window_with_gqa")  # fmt: skip


def last(layout: RowLayout, length: int) -> RowLayout:
    """The last rows of a layout of more, where each rank has them."""
    first = layout.seqlen - length
    cut = tuple(
        tuple(run[max(0, -(-(first - run.start) // run.step)) :] for run in runs)
        for runs in layout.shards
    )
    return RowLayout(f"last of {layout.name}", layout.seqlen, cut)


def divided(method: str, name: str, wrong: int = 0) -> Any:
    """Attention of all rows by the plan; wrong: keys by which the right side of a mask is off."""

    def spec_of(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool, window: Any) -> Spec:
        left, right = (None if x == -1 else x for x in window)
        if min(left or 0, right or 0) < 0:
            raise NotImplementedError("sides of a window below 0")
        right = 0 if causal else right
        right = right if right is None else right + wrong
        whole = make_layout(name, max(q.shape[1], k.shape[1], 1), RANKS)
        rows, keys = last(whole, q.shape[1]), last(whole, k.shape[1])
        mask = SequenceMask(left, right, (0, whole.seqlen))
        sizes = Sizes(q.shape[2], k.shape[2], q.shape[3], v.shape[3], 1, 8)
        return Spec(method, rows, keys, mask, sizes)

    def cut(layout: RowLayout, x: np.ndarray) -> list[np.ndarray]:
        """A rank's rows each, of the last ones of the layout."""
        first = layout.seqlen - x.shape[0]
        places = [np.array([i - first for run in runs for i in run], int) for runs in layout.shards]
        return [x[place][None].astype(np.float64) for place in places]

    def join(layout: RowLayout, parts: list[np.ndarray], length: int) -> np.ndarray:
        out = np.zeros((length, *parts[0].shape[2:]))
        for runs, part in zip(layout.shards, parts, strict=True):
            for n, i in enumerate(i for run in runs for i in run):
                out[i - (layout.seqlen - length)] = part[0, n]
        return out

    def attend(
        q: Any, k: Any, v: Any, *, causal: bool = False, window_size: Any = (None, None),
        softmax_scale: float | None = None,
    ) -> Any:  # fmt: skip
        spec = spec_of(q, k, v, causal, window_size)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        outs, lses = [], []
        for one, key, value in zip(q, k, v, strict=True):
            given = [
                {"q": (x,), "kv": (y, z)}
                for x, y, z in zip(cut(spec.rows, one), cut(spec.keys, key),
                                   cut(spec.keys, value), strict=True)
            ]  # fmt: skip
            found = run_here(make_plan(spec), ExactCalculator(spec.sizes, scale), given)
            out, lse = (join(spec.rows, [x["o"][n] for x in found], len(one)) for n in range(2))
            outs.append(out)
            lses.append(lse[..., 0].T)
        return np.stack(outs).astype(q.dtype), np.stack(lses)

    return attend


@pytest.mark.parametrize(("method", "layout"), [("ring", "zigzag"), ("all_gather", "striped")])
def test_a_divided_call_has_the_kits_properties(method: str, layout: str) -> None:
    """More rows than keys and fewer, rows without keys, ranks with nothing: all within budget."""
    report = verify(divided(method, layout), only=ONLY, max_examples=4, dtypes=("bf16", "fp32"))
    status = {result.name: result.status for result in report.results}
    assert set(status) == set(ONLY) and set(status.values()) == {"passed"}, report.results


def test_a_mask_that_is_off_by_a_key_is_found() -> None:
    """Planted: every rank sees one key too many."""
    report = verify(divided("ring", "zigzag", wrong=1), only=("plain", "causal"), max_examples=4)
    assert [result.status for result in report.results] == ["passed", "failed"]
