"""The compiled Hopper backward kernel as a function of a `Case`, run by the emulator.

The features are those of the SM100 tests, each set with head dims of this kernel; the main kernel
alone is run, on a workspace that NumPy prepares.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from fa4.hardware import H200
from fa4.sm90.backward.spec import WarpgroupBackwardSpec
from tests.sm100.backward_kernel import SPECS as FEATURES
from tests.sm100.backward_kernel import BackwardKernel, kept

CHOICES: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain_in_order": {"head_dim": 104, "head_dim_v": 72, "dtype": "fp16", "deterministic": True},
    "causal": {},
    "window": {"head_dim": 72, "head_dim_v": 16},
    "packed": {"head_dim": 96, "head_dim_v": 128},
    "padded": {},
    "biased": {},
    "biased_window": {},
    "masked": {},
    "masked_softcap": {},
    "chunked": {},
    "chunked_curved": {},
    "chunked_softcap": {},
    "capped": {},
}  # fmt: skip


# Two CTAs: most calls have more work tiles, which they draw one after the other.
FEW_SMS = replace(H200, sm_count=2)


def spec_of(name: str, **changed: Any) -> WarpgroupBackwardSpec:
    """One of `CHOICES` with its features; head_dim_v is head_dim where it is not named."""
    fields = {"gpu": FEW_SMS, **FEATURES.get(name, {}), **CHOICES[name], **changed}
    return WarpgroupBackwardSpec(**{"head_dim_v": fields["head_dim"], **fields})


@cache
def kernel(name: str) -> BackwardKernel:
    """One of `CHOICES`, compiled once on this machine as long as no source changes."""
    return kept(spec_of(name))
