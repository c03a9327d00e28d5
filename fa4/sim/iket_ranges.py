"""Ranges that were measured inside a kernel: the JSON that NVIDIA's `run-iket` writes.

Format: "IKET Profiling" in NVIDIA's CUTLASS documentation (`run-iket profile --postprocess json`),
which calls it experimental. Read of it: launches[] with kernelName and ranges[], of these
rangeName, startTs, endTs and warpLocs[] with ctaId (three numbers) and warpId; the rest is ignored.
Timestamps are taken for nanoseconds of one clock (IKET's timer has a granularity of 32 ns). Of a
file one CTA of one launch is shown; its first range or warp begins at 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fa4.base.files import read_text

MOST_NS = 10**12  # of a launch: beyond a quarter of an hour a time stamp is wrong
CtaId = tuple[int, int, int]


@dataclass(frozen=True)
class MeasuredRange:
    """What a warp said that it did, in nanoseconds from the start of its CTA."""

    name: str
    start_ns: int
    stop_ns: int


@dataclass(frozen=True)
class MeasuredLane:
    """Ranges of one warp that lie one after the other or within each other."""

    warp: int
    suffix: str
    ranges: tuple[MeasuredRange, ...]


@dataclass(frozen=True)
class MeasuredCta:
    """The lanes of one CTA, and which one it is."""

    lanes: tuple[MeasuredLane, ...]
    about: dict[str, Any]


def read_measured(path: Path) -> MeasuredCta:
    """The first CTA of the first launch in a file that has ranges.

    Raises OSError, and ValueError naming the file and what is wrong with it.
    """
    try:
        document = json.loads(read_text(path))
        launches = _list(_dict(document, "the file"), "launches", "the file")
        for number, launch in enumerate(launches):
            place = f"launches[{number}]"
            found = _read_launch(_dict(launch, place), place)
            if found:
                return _first_cta(found, str(launch.get("kernelName", "")), number, len(launches))
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{path} is no trace of run-iket in JSON: {error}") from error
    raise ValueError(f"{path} has no ranges: mark some in the kernel (iket.range_push)")


def _read_launch(launch: dict[str, Any], place: str) -> dict[CtaId, dict[int, list[MeasuredRange]]]:
    """CTA -> warp -> ranges, times as they stand in the file."""
    found: dict[CtaId, dict[int, list[MeasuredRange]]] = {}
    for number, item in enumerate(_list(launch, "ranges", place)):
        where = f"{place}.ranges[{number}]"
        item = _dict(item, where)
        name = item.get("rangeName")
        if not isinstance(name, str) or not name:
            raise ValueError(f"{where}.rangeName must be a name; got {name!r}")
        start, stop = (_whole(item, key, where) for key in ("startTs", "endTs"))
        if not start <= stop <= start + MOST_NS:
            raise ValueError(f"{where}: endTs must not be before startTs; got {start} and {stop}")
        for warp_number, location in enumerate(_list(item, "warpLocs", where)):
            at = f"{where}.warpLocs[{warp_number}]"
            location = _dict(location, at)
            cta, warp = _cta_id(location, at), _whole(location, "warpId", at)
            ranges = found.setdefault(cta, {}).setdefault(warp, [])
            ranges.append(MeasuredRange(name, start, stop))
    return found


def _first_cta(
    found: dict[CtaId, dict[int, list[MeasuredRange]]], kernel: str, launch: int, launches: int
) -> MeasuredCta:
    cta = min(found, key=lambda cta: cta[::-1])
    warps = found[cta]
    begun = min(item.start_ns for ranges in warps.values() for item in ranges)
    lanes = [
        lane
        for warp, ranges in sorted(warps.items())
        for lane in _lanes(warp, ranges, begun)
    ]  # fmt: skip
    about = {"kernel": kernel, "cta": list(cta), "launch": launch, "launches": launches,
             "ctas": len(found), "warps": len(warps),
             "ranges": sum(map(len, warps.values()))}  # fmt: skip
    return MeasuredCta(tuple(lanes), about)


def _lanes(warp: int, ranges: list[MeasuredRange], begun: int) -> Iterator[MeasuredLane]:
    """As few lanes as nesting allows: ranges of tokens may overlap in part."""
    lanes: list[tuple[list[MeasuredRange], list[MeasuredRange]]] = []  # (all, those still open)
    for item in sorted(ranges, key=lambda item: (item.start_ns, -item.stop_ns)):
        moved = MeasuredRange(item.name, item.start_ns - begun, item.stop_ns - begun)
        for every, still in lanes:
            while still and still[-1].stop_ns <= moved.start_ns:
                still.pop()
            if not still or moved.stop_ns <= still[-1].stop_ns:
                every.append(moved)
                still.append(moved)
                break
        else:
            lanes.append(([moved], [moved]))
    for number, (every, _) in enumerate(lanes):
        suffix = f" ({number + 1})" if number else ""
        yield MeasuredLane(warp, suffix, tuple(every))


def _dict(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{place} must be an object; got {type(value).__name__}")
    return value


def _list(value: dict[str, Any], key: str, place: str) -> list[Any]:
    found = value.get(key)
    if not isinstance(found, list):
        raise ValueError(f"{place} must have a list {key}; got {found!r:.80}")
    return found


def _whole(value: dict[str, Any], key: str, place: str) -> int:
    found = value.get(key)
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise ValueError(f"{place}.{key} must be a whole number, at least 0; got {found!r:.80}")
    return found


def _cta_id(location: dict[str, Any], place: str) -> CtaId:
    found = location.get("ctaId")
    if not isinstance(found, list) or len(found) != 3 or not all(type(x) is int for x in found):
        raise ValueError(f"{place}.ctaId must be three whole numbers; got {found!r:.80}")
    return found[0], found[1], found[2]
