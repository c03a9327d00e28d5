"""The oracle: attention by its definition, in float64. Every judgement of the package rests on it.

It stands alone: NumPy and nothing of fa4, so that no mistake in shared code can be in the judge and
in what it judges. Options are the keywords of `fa4.flash_attn_func` as the caller wrote them;
`definition` has the formulas, `visible` the masks, `dropout` the generator, `layouts` the batches.
"""

from __future__ import annotations

from fa4.oracle.definition import OracleGradients, attend, differentiate
from fa4.oracle.layouts import attend_batch, differentiate_batch

__all__ = ["OracleGradients", "attend", "attend_batch", "differentiate", "differentiate_batch"]
