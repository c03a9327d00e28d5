"""The compiled Hopper forward kernel as a function of a `Case`, run by the emulator.

The features are those of the SM100 tests, each set with other choices of the pipeline.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from fa4.compiled.artifact import compile_artifact
from fa4.compiled.forward import compile_warpgroup
from fa4.config import Exp2Split, ForwardConfig
from fa4.emulator.host.session import Session
from fa4.sm90.forward.spec import WarpgroupSpec
from tests.sm100.forward_kernel import SPECS as FEATURES
from tests.sm100.forward_kernel import Kernel

_EMULATED = ForwardConfig(exp2=Exp2Split(frequency=8, residue=4))

CHOICES: dict[str, dict[str, Any]] = {
    "plain": {"tile_n": 80, "ping_pong": False, "ahead": True, "consumers": 3},
    "causal": {"tile_n": 112, "consumers": 3, "scheduler": "snake", "ahead": True,
               "numerics": _EMULATED},
    "window": {"tile_n": 112, "p_source": "smem"},
    "decode": {"tile_n": 128, "consumers": 1, "overlap": False},
    "packed": {"tile_n": 80, "kv_stages": 3, "scheduler": "snake", "ahead": True},
    "packed_window": {"tile_n": 64, "kv_stages": 4, "consumers": 1, "p_source": "smem",
                      "overlap": False, "scheduler": "naive"},
    "padded": {"tile_n": 96, "consumers": 3, "ping_pong": True, "ahead": True,
               "columns": (64, 32)},
    "masked": {"tile_n": 48, "overlap": False, "ping_pong": True, "scheduler": "lpt"},
    "masked_softcap": {"tile_n": 176, "consumers": 1, "kv_stages": 1, "numerics": _EMULATED},
    "causal_mod": {"tile_n": 128, "p_source": "smem", "ping_pong": True, "scheduler": "lpt"},
    "wide": {"tile_n": 80, "scheduler": "snake"},
    "drawn": {"tile_n": 64, "scheduler": "queue", "ahead": True, "direct": True},
}  # fmt: skip
WIDE = {"head_dim": 256, "causal": True, "used_q": True, "sink": True}  # O may lie over Q


def spec_of(name: str, **changed: Any) -> WarpgroupSpec:
    """One of `CHOICES` with its features; head_dim_v is head_dim where it is not named."""
    features = dict(FEATURES.get(name, WIDE))
    features.pop("numerics", None)
    fields = {"head_dim_v": features["head_dim"], **features, **CHOICES[name], **changed}
    return WarpgroupSpec(**fields)


@cache
def kernel(name: str) -> Kernel:
    """One of `CHOICES`, compiled."""
    return build(spec_of(name))


def build(spec: WarpgroupSpec) -> Kernel:
    """A compiled kernel, for the emulator."""
    artifact = compile_artifact(spec, "sm_90a", compile_warpgroup)
    return Kernel(spec, artifact, Session(None, (), {}))
