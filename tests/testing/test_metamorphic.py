"""Relations between calls: what is within the budget of every call is within theirs."""

from __future__ import annotations

import numpy as np
import pytest

from fa4.testing import Case, check_property, dense_inputs, load_backend
from fa4.testing.budget import expect_forward

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
