"""The instruction set: take `TABLE` from here to have it with all its rows.

Each of these modules adds its rows to the table; those of one name are tried in this order.
"""

from __future__ import annotations

from fa4.emulator.isa import (  # noqa: F401
    approx,
    atomics,
    barriers,
    bits,
    bulk_copies,
    bulk_groups,
    calls,
    clocks,
    compare,
    control,
    convert,
    crosslane,
    extremes,
    fences,
    floats,
    halves,
    hints,
    integer,
    launch_control,
    loads,
    logic,
    matrices,
    mbarriers,
    moves,
    parameters,
    remote_stores,
    tensor_allocation,
    tensor_copies,
    tensor_memory,
    tensor_mma,
    tensormaps,
    thread_copies,
    tmem_copies,
    warp_mma,
    warpgroup_mma,
)
from fa4.emulator.translate.table import TABLE

__all__ = ["TABLE"]
