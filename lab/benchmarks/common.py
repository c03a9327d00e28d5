"""What every benchmark shares: timing against a peer in the same run, and where its record goes."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from lab.records import record_path, write_record

__all__ = ["parse_output", "record_path", "time_against", "write_record"]


def time_against(
    ours: Callable[[], Any], peer: Callable[[], Any], *, repeats: int = 7
) -> dict[str, float]:
    """Seconds of both, run alternately on this noisy machine, and the ratio of their medians."""
    ours(), peer()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for function, seconds in zip((ours, peer), times, strict=True):
            start = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - start)
    mine, theirs = (median(seconds) for seconds in times)
    return {"seconds": mine, "peer_seconds": theirs, "ratio": mine / theirs}


def parse_output(description: str, name: str) -> argparse.Namespace:
    """Options that every benchmark takes: --output FILE."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", type=Path, default=record_path(name))
    return parser.parse_args()
