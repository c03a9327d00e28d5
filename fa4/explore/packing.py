"""The page's data as text: a JSON head and the columns of a recording, compressed, in base64.

Four bytes with the head's length, the head, then the columns one after the other, each at a
multiple of four bytes. `head["columns"]` says where each is. Numbers are little-endian.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from fa4.base.role_styles import ROLES, UNITS
from fa4.designs import find_design
from fa4.explore.controls import HEADS, TOKENS
from fa4.explore.programs import KINDS
from fa4.explore.recording import BOUNDS, SHARES, Recording
from fa4.explore.steps import LEAD_TICKS, STEPS
from fa4.sim.machine import find_machine
from fa4.version import __version__

SCHEMA_VERSION = 1  # of the page's data; raised when a key changes its meaning or goes away
COMPRESSION = 9
TYPES = {"uint8": "u1", "uint16": "<u2", "int32": "<i4", "float32": "<f4"}


def head_of(recording: Recording, verdicts: Mapping[str, Any]) -> dict[str, Any]:
    """Everything of the page's data that is no column; names say the units."""
    machines = {}
    for choice in recording.choices("machine"):
        machine = find_machine(choice.settings["machine"])
        machines[choice.key] = {
            "name": machine.name,
            "clock_hz": machine.clock_hz,
            "sm_count": machine.gpu.sm_count,
            "peak_flops": machine.gpu.peak_bf16_flops,
            "auto_kernel": find_design(machine.gpu).kernel,
        }
    return {
        "schema_version": SCHEMA_VERSION,
        "fa4_version": __version__,
        "heads": HEADS,
        "tokens": TOKENS,
        "steps_shown": STEPS,
        "lead_ticks": LEAD_TICKS,
        "shares": SHARES,
        "controls": [asdict(control) for control in recording.controls],
        "machines": machines,
        "roles": {name: style._asdict() for name, style in ROLES.items()},
        "units": UNITS,
        "bounds": list(BOUNDS),
        "kinds": list(KINDS),
        "contexts": recording.contexts,
        "reasons": recording.reasons.values,
        "steps": recording.steps,
        "plans": recording.plans.values,
        "parts": {name: part.values for name, part in recording.parts.items()},
        "verdicts": dict(verdicts),
    }


def pack(recording: Recording, verdicts: Mapping[str, Any]) -> str:
    """The data of the page as base64 text; equal recordings give equal text."""
    head, columns = head_of(recording, verdicts), recording.columns()
    places, body = {}, b""
    for name, column in columns.items():
        places[name] = {"type": str(column.dtype), "at": len(body), "length": column.size,
                        "shape": list(column.shape)}  # fmt: skip
        body += column.astype(TYPES[str(column.dtype)]).tobytes()
        body += b"\0" * (-len(body) % 4)
    head["columns"] = places
    text = json.dumps(head, separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-len(text) % 4)
    whole = len(text).to_bytes(4, "little") + text + body
    return base64.b64encode(gzip.compress(whole, COMPRESSION, mtime=0)).decode()


def unpack(text: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Head and columns of packed data. Raises ValueError for another schema version."""
    whole = gzip.decompress(base64.b64decode(text))
    length = int.from_bytes(whole[:4], "little")
    head = json.loads(whole[4 : 4 + length])
    if head["schema_version"] != SCHEMA_VERSION:
        raise ValueError(f"schema_version must be {SCHEMA_VERSION}; got {head['schema_version']}")
    columns = {}
    for name, place in head["columns"].items():
        kind = TYPES[place["type"]]
        values = np.frombuffer(whole, kind, place["length"], 4 + length + place["at"])
        columns[name] = values.reshape(place["shape"])
    return head, columns
