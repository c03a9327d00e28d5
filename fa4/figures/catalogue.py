"""All figures by name, and making them: every one whole, in memory, before a file is written."""

from __future__ import annotations

from collections.abc import Sequence

from fa4.figures.accuracy import MEASURED
from fa4.figures.across import RING
from fa4.figures.entry import FigureEntry
from fa4.figures.ideas import ABLATION, ROOFLINE
from fa4.figures.kernels import SMEM, TIMELINE
from fa4.figures.numerics import BUDGET, EXP2, RESCALES

FIGURES: dict[str, FigureEntry] = {
    entry.name: entry
    for entry in (ABLATION, ROOFLINE, MEASURED, TIMELINE, SMEM, EXP2, RESCALES, BUDGET, RING)
}


def choose(names: Sequence[str]) -> list[FigureEntry]:
    """The figures of these names, all of them if none is named. ValueError for an unknown one."""
    for name in names:
        if name not in FIGURES:
            raise ValueError(f"unknown figure {name!r}; there are {', '.join(FIGURES)}")
    return [FIGURES[name] for name in dict.fromkeys(names)] or list(FIGURES.values())
