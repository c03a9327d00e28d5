"""A program of a user, for the type checker: `mypy` says nothing of it, and would of each fault.

Lines with an ignored error are faults on purpose: were the public functions to take or give Any,
the checker would call the comments unused. `make lint` and tests/test_typed.py run it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import fa4

if TYPE_CHECKING:
    from typing_extensions import assert_type


class Foreign:
    """An array of a library that nobody knows, with DLPack."""

    shape = (1, 4, 1, 8)

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        """Its capsule."""


def right(q: np.ndarray, flag: bool) -> None:
    """What goes in comes out."""
    out = fa4.flash_attn_func(q, q, q, causal=True, softcap=15.0, window_size=(None, 4))
    pair = fa4.flash_attn_func(q, q, q, return_lse=True, config=fa4.ForwardConfig())
    any_of_both = fa4.flash_attn_func(q, q, q, return_lse=flag, impl="oracle")
    packed = fa4.flash_attn_varlen_func(q, q, q, max_seqlen_q=4, page_table=None)
    gradients = fa4.flash_attn_backward(out, q, q, q, out, pair.lse, causal=True)
    if TYPE_CHECKING:
        assert_type(out, np.ndarray)
        assert_type(pair, fa4.AttentionOutput)
        assert_type(any_of_both, Any)
        assert_type(packed, np.ndarray)
        assert_type(gradients, fa4.AttentionGradients)
        foreign = Foreign()
        assert_type(fa4.flash_attn_func(foreign, foreign, foreign), Foreign)


def wrong(q: np.ndarray) -> None:
    """Each of these is refused by the checker."""
    fa4.flash_attn_func("q", q, q)  # type: ignore[call-overload]
    fa4.flash_attn_func(q, q, q, softcap="15")  # type: ignore[call-overload]
    fa4.flash_attn_func(q, q, q, window=(1, 2))  # type: ignore[call-overload]
    fa4.flash_attn_func(q, q, q, page_table=q)  # type: ignore[call-overload]
    fa4.flash_attn_backward(q, q, q, q, q, "lse")  # type: ignore[arg-type]
    fa4.flash_attn_backward(q, q, q, q, q, q, softcap="15")  # type: ignore[arg-type]
    print(fa4.flash_attn_func(q, q, q).lse)  # type: ignore[attr-defined]
