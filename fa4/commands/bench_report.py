"""A report that `fa4 bench --json` wrote, read again: every value is looked at before one is shown.

What a file says of ratios is not read: they follow from the TFLOP/s.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fa4.commands import SCHEMA_VERSION
from fa4.commands.bench_timing import OURS

PASSES = ("forward pass", "backward pass", "backward pass, deterministic")
DTYPES = ("bf16", "fp16", "e4m3", "e5m2")
IMPLS = ("sm100", "sm90")


def read_report(path: Path, backends: Collection[str]) -> dict[str, Any]:
    """What --json wrote. Raises ValueError that names the value which it never writes."""
    from fa4.base.files import read_text

    text = read_text(path)
    try:
        report = json.loads(text)
        if not isinstance(report, dict):
            raise ValueError("it is no JSON object")
        return checked_report(report, backends)
    except (ValueError, RecursionError) as error:
        said = "it is no JSON" if isinstance(error, json.JSONDecodeError) else error
        raise ValueError(
            f"--from needs a file that fa4 bench --json wrote; got {path}: {said}"
        ) from None


def checked_report(report: Mapping[str, Any], backends: Collection[str]) -> dict[str, Any]:
    """The report with what is shown of it, or ValueError."""
    version = report.get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise ValueError(f"schema_version must be {SCHEMA_VERSION}; got {_short(version)}")
    found: dict[str, Any] = {"device": _text("device", report.get("device"))}
    for name, allowed in {"impl": IMPLS, "dtype": DTYPES, "pass": PASSES}.items():
        found[name] = value = report.get(name)
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {_short(value)}")
    rows = report.get("rows")
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"rows must be a list of one or more; got {_short(rows)}")
    found["rows"] = [
        checked_row(f"rows[{n}]", row, found["dtype"], backends) for n, row in enumerate(rows)
    ]
    if "random" in report:
        drawn = _mapping("random", report["random"])
        found["random"] = {
            name: _count(f"random.{name}", drawn.get(name)) for name in ("calls", "seed")
        }
    return found


def checked_row(place: str, row: Any, dtype: str, backends: Collection[str]) -> dict[str, Any]:
    """One row, its ratios computed anew; or ValueError that names the place of what is wrong."""
    from fa4.config import Problem

    fields = {name: _mapping(f"{place}.{name}", _field(place, row, name))
              for name in ("problem", "tflops", "missing")}  # fmt: skip
    sizes = dict(fields["problem"])
    try:
        if isinstance(sizes.get("window_size"), list):
            sizes["window_size"] = tuple(sizes["window_size"])
        problem = Problem(**sizes)
        if problem.dtype != dtype or not isinstance(problem.causal, bool):
            raise ValueError(f"got dtype {problem.dtype}, causal {problem.causal!r}")
        if not problem.forward_flops:
            raise ValueError("there is nothing to compute")
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}.problem is not one that it measures: {error}") from None
    for name in (*fields["tflops"], *fields["missing"]):
        if name not in backends:
            raise ValueError(f"{place} names {_short(name)}, none of {', '.join(backends)}")
    tflops = {
        name: _speed(f"{place}.tflops.{name}", value) for name, value in fields["tflops"].items()
    }
    predicted = _field(place, row, "predicted_tflops")
    if predicted is not None:
        predicted = _speed(f"{place}.predicted_tflops", predicted)
    ours = tflops.get(OURS)
    return {
        "problem": problem.__dict__,
        "tflops": tflops,
        "predicted_tflops": predicted,
        "ratio": {name: ours / x for name, x in tflops.items() if ours and name != OURS},
        "missing": {
            name: _text(f"{place}.missing.{name}", why) for name, why in fields["missing"].items()
        },
    }


def _field(place: str, row: Any, name: str) -> Any:
    if name not in _mapping(place, row):
        raise ValueError(f"{place} has no {name}")
    return row[name]


def _mapping(place: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{place} must be an object; got {_short(value)}")
    return value


def _text(place: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{place} must be a text; got {_short(value)}")
    return value


def _speed(place: str, value: Any) -> float:
    """TFLOP/s: a finite number above 0, and no more than any GPU will reach."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf or value > 1e6:
        raise ValueError(f"{place} must be a number of TFLOP/s above 0; got {_short(value)}")
    return float(value)


def _count(place: str, value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{place} must be a whole number from 0; got {_short(value)}")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
