"""Relations between calls: what is within the budget of every call is within theirs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fa4.testing import Case, Outputs, check_property, dense_inputs, load_backend
from fa4.testing.budget import expect_forward
from fa4.testing.contract import Backend
from fa4.testing.inputs import Inputs

CASE = Case(seqlen_q=33, seqlen_k=130, heads_k=2, head_dim=16, head_dim_v=16, dtype="bf16")


def off_by(share: float):
    """The oracle with an LSE that is off by a share of what is allowed: above it for all of the
    keys, below it for a part of them."""

    def attend(q, k, v, *, return_lse: bool = False):
        expected = expect_forward(dense_inputs(q, k, v), "fp32")
        out, lse = (np.stack(expected[name].oracle) for name in ("out", "lse"))
        if not return_lse:
            return out.astype(q.dtype)
        sign = 1.0 if k.shape[1] == CASE.seqlen_k else -1.0
        wrong = lse + sign * share * np.stack(expected["lse"].allowed)
        return out.astype(q.dtype), wrong.astype(np.float32)

    return attend


@pytest.mark.parametrize("seed", range(3))
def test_parts_of_the_keys_have_errors_of_their_own(seed: int) -> None:
    """Merged by their LSE they may differ by what all three calls are allowed, not by far more."""
    case = Case(**{**vars(CASE), "seed": seed})
    assert 0.4 < check_property("kv_concatenation", load_backend(off_by(0.9)), case) <= 1.0
    with pytest.raises(AssertionError, match="lse"):
        check_property("kv_concatenation", load_backend(off_by(3.0)), case)


class Alternates(Backend):
    """The oracle with an output off by a share of what is allowed, above and below by turns."""

    output, share, calls = "", 0.0, 0

    def forward(self, inputs: Inputs, kept_guard: Any = None) -> Outputs:
        """The next call is off to the other side."""
        expected = expect_forward(inputs, "fp64")
        found = {name: np.stack(expected[name].oracle) for name in ("out", "lse")}
        off = self.share * np.stack(expected[self.output].allowed)
        found[self.output] = found[self.output] + (-1) ** self.calls * off
        object.__setattr__(self, "calls", self.calls + 1)
        return Outputs(**found)


# Of a dense problem; `batch_permutation` and `window_spellings` compare more than two calls.
RELATIONS = {
    "kv_permutation": {},
    "query_permutation": {},
    "batch_permutation": {"batch": 3},
    "head_permutation": {"group": 2},
    "gqa_repeats": {"group": 2},
    "v_linearity": {"values": "grid"},
    "kv_concatenation": {"seed": 3},
    "causal_prefix": {"causal": True, "seed": 3},
    "decode_row": {"causal": True},
    "keys_outside_window": {"window_size": (0, 3)},
    "logit_shift": {"values": "grid"},
    "q_scale": {"softmax_scale": 0.3},
    "split_invariance": {"num_splits": 3},
    "window_spellings": {"causal": True},
}
ALONE = {"constant_v": {}, "convexity": {"seqlen_k": 1}}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("name", "output"),
    [*((name, output) for name in RELATIONS for output in ("out", "lse")),
     *((name, "out") for name in ALONE)],
)  # fmt: skip
def test_calls_may_differ_by_what_they_are_allowed_together(
    name: str, output: str, dtype: str
) -> None:
    """Each off by nearly its budget, to different sides, is right; by three times it is not."""
    case = Case(**{**vars(CASE), "dtype": dtype, **(RELATIONS | ALONE)[name]})
    oracle = load_backend("oracle")
    backend = Alternates("alternates", oracle.function, oracle.varlen, oracle.backward)
    object.__setattr__(backend, "output", output)
    object.__setattr__(backend, "share", 0.95)
    share = check_property(name, backend, case)
    assert share is not None and 0.3 < share <= 1.0
    object.__setattr__(backend, "share", 3.2)
    with pytest.raises(AssertionError, match=rf"^{output}\[.*differ by"):
        check_property(name, backend, case)
