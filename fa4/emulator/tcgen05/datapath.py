"""Which lanes and columns of tensor memory hold matrix D (PTX ISA 9.7.16.10.5, Layouts A-G).

Every layout is one rectangle per CTA. Where M leaves lanes unused, N is cut into `splits` equal
parts: part s of D's columns lies in the s-th group of lanes, in the same TMEM columns.

layout  M    cta_group  .ws   rows per CTA  splits  lanes of row r, part s
A       256  2          -     128           1       r
B       128  2          -     64            2       r + 64 s
D       128  1          any   128           1       r
E       64   1          yes   64            2       r + 64 s
F       64   1          no    64            1       r % 16 + 32 (r // 16), plus 0 or 16
G       32   1          yes   32            4       r + 32 s
(Layout C is sparse.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fa4.emulator.tcgen05.errors import TmemError
from fa4.emulator.tcgen05.tmem import LANES, Indices


@dataclass(frozen=True, eq=False)
class DataPath:
    """One CTA's part of D: lanes[s * rows + r] holds row r, columns of part s."""

    layout: str
    rows: int
    splits: int
    lanes: Indices


@lru_cache(maxsize=64)
def data_path(m: int, cta_group: int, ws: bool, first_lane: int) -> DataPath:
    """The data path of an M (checked before), for an accumulator that starts at first_lane.

    Raises TmemError if the layout does not allow that lane.
    """
    rows = m // cta_group
    half = m == 64 and not ws
    layout = {(256, 2): "A", (128, 2): "B", (128, 1): "D"}.get((m, cta_group), "F")
    if ws:
        layout = {128: "D", 64: "E", 32: "G"}[m]
    allowed = (0, 16) if half else (0,)
    if first_lane not in allowed:
        raise TmemError(
            f"tcgen05.mma with M={m}, cta_group::{cta_group} (layout {layout}): the accumulator "
            f"starts at lane {first_lane}, must be {' or '.join(map(str, allowed))}"
        )
    lanes = np.arange(rows if half else LANES, dtype=np.int64)
    if half:
        lanes = lanes % 16 + 32 * (lanes // 16) + first_lane
    lanes.flags.writeable = False
    return DataPath(layout, rows, 1 if half else LANES // rows, lanes)
