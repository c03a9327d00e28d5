"""The forward kernels that benchmarks compile: every feature that changes the code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fa4.compiled.variants import tuned_spec
from fa4.hardware import B300
from fa4.sm100.forward.spec import ForwardSpec

D64, D128, D192 = (64, 64), (128, 128), (192, 128)
WINDOW = {"window_left": True, "window_right": True}
PACKED = {"packed_q": True, "packed_k": True}


def specs() -> Iterator[tuple[str, ForwardSpec]]:
    """(name, spec) of each, at the head dims where registers are scarcest."""
    for dims in (D64, D128, D192):
        for causal in (False, True):
            mask = "causal" if causal else "full"
            for pair in (1, 2):
                name = f"{dims} {mask}, {pair} CTA"
                yield name, tuned_spec(*dims, causal=causal, cta_group=pair)
        yield f"{dims} window", tuned_spec(*dims, **WINDOW)
    yield "(8, 8)", tuned_spec(8, 8)
    yield "(96, 96)", tuned_spec(96, 96)
    yield "fp16", tuned_spec(*D128, dtype="fp16")
    yield "B300", tuned_spec(*D128, B300)
    for scheduler in ("lpt", "clc"):
        yield f"causal, {scheduler}", tuned_spec(*D128, causal=True, scheduler=scheduler)
    yield "softcap", tuned_spec(*D128, softcap=True)
    yield "softcap, causal", tuned_spec(*D128, softcap=True, causal=True)
    yield "sink, 8 heads packed", tuned_spec(*D128, sink=True, group=8)
    yield "packed", tuned_spec(*D128, **PACKED)
    yield "packed, causal, 4 heads packed", tuned_spec(*D128, causal=True, group=4, **PACKED)
    yield "packed, window, 2 CTA", tuned_spec(*D128, cta_group=2, **PACKED, **WINDOW)
    yield "seqused, causal", tuned_spec(*D128, used_q=True, used_k=True, causal=True)
    plain = tuned_spec(*D128)
    yield "one Q tile", replace(plain, numerics=replace(plain.numerics, q_tiles=1))
