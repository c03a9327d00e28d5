"""A plan across GPUs: who computes which square of the mask in which step, and who sends what."""

from __future__ import annotations

from typing import Any

from fa4.distributed.forecast import CallShape, make_call_spec, make_model, own_fabric
from fa4.distributed.methods import make_plan
from fa4.distributed.picture import draw_plan, find_squares
from fa4.distributed.plan import Sizes
from fa4.distributed.simulate import time_plan
from fa4.figures.entry import Data, FigureEntry

GPUS, SEQLEN = 4, 32768


def collect_ring() -> Data:
    """A causal zigzag ring, timed: spans of each rank in ms."""
    sizes = Sizes(16, 4)
    fabric = own_fabric(GPUS, "h200", None, 1, "infiniband50", "peers")
    plan = make_plan(make_call_spec(CallShape(SEQLEN, sizes, causal=True), "zigzag", GPUS))
    times = time_plan(plan, make_model(sizes, "h200", fabric))
    rows = [
        [one.rank, span.kind, span.start_s * 1e3, span.end_s * 1e3, span.what]
        for one in times
        for span in (*one.spans, *one.sends)
    ]
    return {
        "title": f"A causal zigzag ring of {GPUS} H200s, {SEQLEN // 1024}k tokens: "
        "every rank has as much to do",
        "note": f"{len(find_squares(plan))} squares; 16 heads on 4 KV heads, copy engines. "
        "Predicted.",
        "columns": ["rank", "what", "start ms", "end ms", "of"],
        "rows": rows,
        "plan": plan,
        "times": times,
    }


def draw_ring(figure: Any, data: Data) -> None:
    """Mask and timeline."""
    draw_plan(figure, data["plan"], data["times"], data["title"])


RING = FigureEntry(
    name="ring",
    about="a plan across GPUs: who computes which square of the mask when, who sends what",
    sources="the plan that is executed; kernels simulated, NVLink as measured on two H200s",
    size_inches=(11, 5),
    collect=collect_ring,
    draw=draw_ring,
)
