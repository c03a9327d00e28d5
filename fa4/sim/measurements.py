"""Measured throughput from a CSV file, and what to simulate for each row of it.

Columns: gpu, software, pass, head_dim, causal, seqlen, batch, heads, dtype, tflops; head_dim_v,
heads_k, source, approx, clock_ghz (a locked one), version, cuda and note may be missing, and so may
what a tile sweep of a Hopper kernel varies: tile_m, tile_n, p_source, overlap, kv_stages,
ping_pong, ahead, scheduler, emulated_percent, and spread, the deviation of the scores. Throughput
counts `Problem.forward_flops`, and 2.5 times that backward.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fa4.base.files import read_bytes
from fa4.config import Problem
from fa4.sim.fields import parse_count, parse_flag
from fa4.sim.machine import COSTS, Machine
from fa4.sim.options import default_pipeline, warpgroups
from fa4.sim.predict import AnyPipeline

OURS = ("fa4", "flash-attn-4")  # rows of other software are skipped unless asked for


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured point; `line` is where it stands in its file."""

    line: int
    gpu: str
    software: str
    direction: str
    problem: Problem
    tflops: float
    source: str = ""
    approx: bool = False
    spread: float = 1.0
    clock_ghz: float | None = None
    version: str = ""
    cuda: str = ""
    note: str = ""
    tile: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The point in a few words."""
        problem = self.problem
        dims = f"d{problem.head_dim}"
        if problem.head_dim_v != problem.head_dim:
            dims += f"x{problem.head_dim_v}"
        mask = "causal" if problem.causal else "full"
        heads = f"H{problem.heads_q}"
        if problem.heads_k != problem.heads_q:
            heads += f"/{problem.heads_k}"
        size = f"B{problem.batch} {heads} S{problem.seqlen_q} {dims}"
        dtype = "" if problem.dtype == "bf16" else f" {problem.dtype}"
        tile = "".join(_TILE_WORDS[name](value) for name, value in self.tile.items())
        return f"{self.direction} {mask} {size}{dtype}{tile}"


# How a choice of a tile sweep is said in a label.
_TILE_WORDS: Mapping[str, Callable[[Any], str]] = {
    "tile_m": " {}".format,
    "tile_n": "x{}".format,
    "p_source": lambda source: " P smem" if source == "smem" else "",
    "overlap": lambda on: "" if on else " serial",
    "kv_stages": " {} stages".format,
    "ping_pong": lambda on: " turns" if on else " no turns",
    "ahead": lambda on: " ahead" if on else "",
    "scheduler": " {}".format,
    "emulated_percent": lambda share: f" {share:g}% emulated" if share else "",
}


@dataclass(frozen=True)
class Skipped:
    """A row that is not compared, and why."""

    row: Row
    why: str


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise ValueError("must be a positive number")
    return value


def _percent(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 100:
        raise ValueError("must be a number from 0 to 100")
    return value


def _size(text: str) -> int:
    try:
        value = parse_count(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ValueError("must be a positive whole number")
    return value


def _word(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty")
    return text.strip()


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.strip().lower() not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return text.strip().lower()

    return parse


_REQUIRED: Mapping[str, Callable[[str], Any]] = {
    "gpu": _word,
    "software": _word,
    "pass": _choice("fwd", "bwd"),
    "head_dim": _size,
    "causal": parse_flag,
    "seqlen": _size,
    "batch": _size,
    "heads": _size,
    "dtype": _choice("bf16", "fp16", "e4m3", "e5m2"),
    "tflops": _positive,
}
_OPTIONAL: Mapping[str, Callable[[str], Any]] = {
    "head_dim_v": _size,
    "heads_k": _size,
    "source": str,
    "approx": parse_flag,
    "spread": _positive,
    "clock_ghz": _positive,
    "version": str,
    "cuda": str,
    "note": str,
}
_TILE: Mapping[str, Callable[[str], Any]] = {
    "tile_m": _size,
    "tile_n": _size,
    "p_source": _choice("registers", "smem"),
    "overlap": parse_flag,
    "kv_stages": _size,
    "ping_pong": parse_flag,
    "ahead": parse_flag,
    "scheduler": _choice("static", "snake", "queue", "lpt", "naive"),
    "emulated_percent": _percent,
}


def read_measurements(path: Path) -> tuple[Row, ...]:
    """Every row of a CSV file. Raises ValueError naming file, line and column."""
    content = read_bytes(path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ValueError(f"{path} line {line}: not UTF-8 text") from error
    reader = csv.reader(io.StringIO(text), strict=True)
    try:
        lines = [(reader.line_num, cells) for cells in reader if any(c.strip() for c in cells)]
    except csv.Error as error:
        raise ValueError(f"{path} line {reader.line_num}: not valid CSV: {error}") from error
    if not lines:
        raise ValueError(f"{path}: empty file; expected a line with the columns' names")
    header = [name.strip() for name in lines[0][1]]
    _check_header(path, header)
    if len(lines) == 1:
        raise ValueError(f"{path}: no measurement below the columns' names")
    return tuple(_read_row(path, line, header, cells) for line, cells in lines[1:])


def _check_header(path: Path, header: list[str]) -> None:
    missing = [name for name in _REQUIRED if name not in header]
    if missing:
        raise ValueError(
            f"{path} line 1: missing column{'s' if len(missing) > 1 else ''} {', '.join(missing)}; "
            f"needed are {', '.join(_REQUIRED)}"
        )
    for name in header:
        if header.count(name) > 1:
            raise ValueError(f"{path} line 1, column {name}: there twice")


def _read_row(path: Path, line: int, header: list[str], cells: list[str]) -> Row:
    if len(cells) != len(header):
        raise ValueError(f"{path} line {line}: expected {len(header)} values; got {len(cells)}")
    texts = dict(zip(header, cells, strict=True))
    values: dict[str, Any] = {}
    for name, parse in {**_REQUIRED, **_OPTIONAL, **_TILE}.items():
        text = texts.get(name, "")
        if name not in _REQUIRED and not text.strip():
            continue
        try:
            values[name] = parse(text)
        except ValueError as error:
            raise ValueError(f"{path} line {line}, column {name}: {error}; got {text!r}") from error
    try:
        problem = Problem(
            batch=values["batch"],
            seqlen_q=values["seqlen"],
            seqlen_k=values["seqlen"],
            heads_q=values["heads"],
            heads_k=values.get("heads_k", values["heads"]),
            head_dim=values["head_dim"],
            head_dim_v=values.get("head_dim_v", values["head_dim"]),
            dtype=values["dtype"],
            causal=values["causal"],
        )
    except ValueError as error:
        raise ValueError(f"{path} line {line}: {error}") from error
    return Row(
        line=line,
        gpu=values["gpu"],
        software=values["software"],
        direction=values["pass"],
        problem=problem,
        tflops=values["tflops"],
        source=values.get("source", ""),
        approx=values.get("approx", False),
        spread=values.get("spread", 1.0),
        clock_ghz=values.get("clock_ghz"),
        version=values.get("version", ""),
        cuda=values.get("cuda", ""),
        note=values.get("note", ""),
        tile={name: values[name] for name in _TILE if name in values},
    )


def machine_names(rows: Seq[Row]) -> tuple[str, ...]:
    """The known machines that rows were measured on. ValueError if there is none."""
    names = sorted({row.gpu.lower() for row in rows})
    known = tuple(name for name in names if name in COSTS)
    if not known:
        raise ValueError(f"unknown gpu {names[0]!r}; say with --machine what to compare it with")
    return known


def machine_name(rows: Seq[Row]) -> str:
    """The only known machine that rows were measured on. ValueError if there is no such one."""
    name, *others = machine_names(rows)
    if others:
        raise ValueError(f"rows are from {', '.join((name, *others))}; choose one with --machine")
    return name


def select_rows(
    rows: Seq[Row], machine: Machine, software: str | None = None
) -> tuple[tuple[Row, ...], tuple[Skipped, ...]]:
    """Rows measured on `machine` by software whose name starts with `software`.

    Default: FA4 or flash-attn-4. A machine "B200 (mine)", from a file based on B200, is compared
    with rows of B200. Raises ValueError if no row is left.
    """
    prefixes = OURS if software is None else (software.lower(),)
    wanted = " or ".join(OURS) if software is None else software
    gpu = machine.name.lower().partition(" (")[0]
    used: list[Row] = []
    skipped: list[Skipped] = []
    for row in rows:
        if row.gpu.lower() != gpu:
            skipped.append(Skipped(row, f"measured on {row.gpu}"))
        elif not row.software.lower().startswith(prefixes):
            skipped.append(Skipped(row, f"software is not {wanted}"))
        else:
            used.append(row)
    if not used:
        there = sorted({f"{row.gpu} {row.software}" for row in rows})
        raise ValueError(
            f"no row is for gpu {machine.name} and software {wanted}; there are {'; '.join(there)}"
        )
    return tuple(used), tuple(skipped)


def pipeline_for(row: Row, machine: Machine) -> AnyPipeline:
    """The kernel that the row's software ran, as far as its name tells.

    FA2 and torch's flash_attention are FlashAttention-2, FA3 is version 3; else the machine's own
    (FlashAttention-4, or 3 without tensor memory). Backward that is flash_attn.cute's. "1-CTA",
    "2-CTA" and "deterministic" choose the variant, "fa4 sm_90" this package's Hopper kernel, "184
    registers" a pair that has as many as this package's.
    """
    name = row.software.lower()
    backward = row.direction == "bwd"
    own = name.startswith("fa4 sm_90") or "184 reg" in name
    kernel = None if own else "published"
    if name.startswith("fa2") or "sdpa flash" in name:
        kernel = "fa2"
    pipeline = default_pipeline(
        row.problem,
        machine,
        backward=backward,
        deterministic=backward and "deterministic" in name,
        kernel=kernel,
    )
    tiled = hasattr(pipeline, "consumers")
    if row.tile and not tiled:
        raise ValueError(f"{next(iter(row.tile))} is a choice of warpgroup kernels, not of {name}")
    if tiled:
        choices = dict(row.tile)
        rows = choices.pop("tile_m", pipeline.block_rows)
        if choices:  # tiles were forced; one that was not said to be ahead was not
            choices.setdefault("ahead", False)
        choices["emulated"] = choices.pop("emulated_percent", 0.0) / 100
        if choices.get("scheduler") == "snake":  # a fixed order that shares the work as lpt does
            choices["scheduler"] = "lpt"
        return replace(pipeline, consumers=warpgroups(rows), **choices)
    for text, group in (("1-cta", 1), ("2-cta", 2)):
        if text not in name:
            continue
        if backward:
            numerics = replace(pipeline.numerics, cta_group=group)
            pipeline = replace(pipeline, numerics=numerics)
        else:
            pipeline = replace(pipeline, cta_group=group)
    return pipeline
