"""How `lab/benchmarks/codegen_backward.py` counts and judges a backward kernel's code."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from fa4.inspect import loops
from fa4.inspect.codegen import KernelCode
from fa4.inspect.cubin import Resources
from fa4.inspect.loops import LoopReport, Mark

PRODUCTS = 40  # MMA instructions of a query tile in one CTA of head dim 128


@pytest.fixture
def backward(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", list(sys.path))  # a compiler's folder is added to it
    return importlib.import_module("lab.benchmarks.codegen_backward")


def loop(kind: str, length: int, header: int = 0, mma: int = 0, barriers: int = 0) -> LoopReport:
    marks = (Mark("BAR.SYNC", 50.0),) * barriers
    columns = MappingProxyType({"MMA": mma} if mma else {})
    return LoopReport(kind, header, length, length, 0, columns, 0, None, 0, marks)


def code(*found: LoopReport) -> KernelCode:
    return KernelCode(Resources("kernel", 128, 0, 0, 0), None, None, 2000, 0, 0, found)


GOOD = code(
    loop(loops.GRADIENTS, 327), loop(loops.GRADIENTS_MASKED, 439),
    loop(loops.MMA, 227, mma=PRODUCTS), loop(loops.REDUCE, 114),
)  # fmt: skip
PEER = code(
    loop(loops.GRADIENTS_MASKED, 391, barriers=2), loop(loops.MMA, 236, mma=PRODUCTS),
    loop(loops.REDUCE, 123),
)  # fmt: skip


def found(backward: Any, maker: str, kernel: KernelCode, **more: Any) -> Any:
    wanted = backward.Wanted(maker, 128, 128, False, backward=True)
    return backward.Found(wanted, kernel, 1.0, **more)


def test_a_loop_inside_counts_as_often_as_it_runs(backward: Any) -> None:
    """252 instructions with 40 of 48 products, of which 8 are in a loop of 43 that runs twice."""
    outer, inner = loop(loops.OTHER, 252, 0x100, 40), loop(loops.MMA, 43, 0x200, 8)
    behind = loop(loops.MMA, 56, 0x2000, 8)  # after the last query tile
    work_tiles = loop(loops.OTHER, 400, 0x80, 48)
    assert backward.mma_slots(code(outer, inner, behind), 48) == 252 + 43
    assert backward.mma_slots(code(work_tiles, loop(loops.MMA, 236, 0x90, 40)), 40) == 236
    assert backward.mma_slots(code(inner), 48) is None


def test_a_masked_loop_stands_for_both(backward: Any) -> None:
    figures = backward.figures(found(backward, backward.CUDNN, PEER))
    assert (figures["compute_slots"], figures["masked_slots"], figures["barriers"]) == (391, 391, 2)


@pytest.mark.parametrize(
    ("kind", "length", "goal"),
    [
        (loops.GRADIENTS, 392, "compute_slots"),
        (loops.GRADIENTS_MASKED, 461, "masked_slots"),
        (loops.MMA, 237, "mma_slots"),
        (loops.REDUCE, 124, "reduce_slots"),
    ],
)
def test_planted_instructions_miss_a_goal(backward: Any, kind: str, length: int, goal: str) -> None:
    peers = [found(backward, backward.CUDNN, PEER)]
    assert backward.missed(found(backward, backward.OURS, GOOD), peers) == []
    changed = tuple(replace(x, length=length) if x.kind == kind else x for x in GOOD.loops)
    ours = found(backward, backward.OURS, replace(GOOD, loops=changed))
    assert backward.missed(ours, peers) == [goal]


@pytest.mark.parametrize(
    ("change", "goal"),
    [
        ({"spill_loads": 1}, "spill_instructions"),
        ({"resources": Resources("kernel", 128, 8, 8, 0)}, "frame_bytes"),
        ({"ignored_budgets": (152,)}, "ignored_budgets"),
    ],
)
def test_planted_spills_miss_a_goal(backward: Any, change: dict[str, Any], goal: str) -> None:
    ours = found(backward, backward.OURS, replace(GOOD, **change))
    assert backward.missed(ours, [found(backward, backward.CUDNN, PEER)]) == [goal]


def test_a_pair_is_compared_with_pairs(backward: Any) -> None:
    long = code(*GOOD.loops[:2], loop(loops.MMA, 301, mma=48), GOOD.loops[3])
    ours = found(backward, backward.OURS, long, pair=True)
    single = found(backward, backward.CUDNN, PEER)
    assert "mma_slots" not in backward.against(ours, [single])
    beside = code(*PEER.loops[:1], loop(loops.MMA, 295, mma=48), PEER.loops[2])
    pair = found(backward, backward.FLASH, beside, pair=True)
    assert backward.missed(ours, [single, pair]) == ["mma_slots"]
