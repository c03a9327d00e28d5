"""FlashAttention-4's ideas: what each is called, and the settings without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Idea:
    """One idea, what happens without it, the settings for that, and whether a pipeline uses it."""

    name: str
    without: str
    settings: Mapping[str, str]
    used: Callable[[Any], bool]


FORWARD_IDEAS = (
    Idea(name="two Q tiles", without="one Q tile per CTA", settings={"q_tiles": "1"},
         used=lambda p: p.numerics.q_tiles == 2),
    Idea(name="ping-pong", without="PV0, PV1, then QK0, QK1", settings={"ping_pong": "no"},
         used=lambda p: p.ping_pong and p.numerics.q_tiles == 2),
    Idea(name="correction warpgroup", without="softmax warps rescale O",
         settings={"correction": "inline"}, used=lambda p: p.correction == "warpgroup"),
    Idea(name="P in tensor memory", without="P in shared memory", settings={"p_space": "smem"},
         used=lambda p: p.p_space == "tmem"),
    Idea(name="split P", without="PV waits for all of P", settings={"split_p": "1"},
         used=lambda p: p.split_p < 1.0),
    Idea(name="software exp2", without="all exponentials on MUFU",
         settings={"exp2_frequency": "0"},
         used=lambda p: p.numerics.exp2.share(p.numerics.tile_n) > 0),
    Idea(name="conditional rescaling", without="tau 0", settings={"tau": "0"},
         used=lambda p: p.numerics.rescale_threshold_log2 > 0),
    Idea(name="CTA pairs", without="each CTA alone", settings={"cta_group": "1"},
         used=lambda p: p.cta_group == 2),
    Idea(name="longest first (LPT)", without="row blocks in order",
         settings={"scheduler": "naive"}, used=lambda p: p.scheduler in ("lpt", "clc")),
)  # fmt: skip
BACKWARD_IDEAS = (
    Idea(name="CTA pairs", without="each CTA alone", settings={"cta_group": "1"},
         used=lambda p: p.numerics.cta_group == 2),
    Idea(name="dQ in any order", without="deterministic order of sums",
         settings={"deterministic": "yes"}, used=lambda p: not p.deterministic),
)  # fmt: skip
