"""What a command may be asked for: estimated beforehand, and refused in one line with the limit."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
# Scores a second on one core of a server CPU, at d = dv = 64; the emulator's are pairs of a query
# and a key that the compiled kernel's instructions are executed for.
SCORES_PER_SECOND = {
    "reference": 2e7, "oracle": 5e6, "emulator": 5e4, "emulator_sm90": 5e4, "sm100": 1e12,
    "sm90": 1e12,
}  # fmt: skip


def memory_bytes() -> int:
    """What this process can use: the machine's memory, or less where a container sets a limit."""
    try:
        found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on Windows
        found = 1 << 62
    limits = [path.read_text().strip() for path in CGROUP_LIMITS if path.is_file()]
    return min([found, *(int(text) for text in limits if text.isdecimal())])  # or "max"


def require_memory(what: str, needed_bytes: float) -> None:
    """Raises ValueError "<what> needs ... of memory" if that is more than there is."""
    limit = memory_bytes()
    if needed_bytes > limit:
        raise ValueError(
            f"{what} needs {size_text(needed_bytes)} of memory; there are {size_text(limit)}"
        )


def attention_seconds(impl: str, pairs: float, dims: int) -> float:
    """About how long an implementation takes for `pairs` of a query and a key; dims: d + dv."""
    return pairs * max(dims, 1) / 128 / SCORES_PER_SECOND[impl]


def size_text(num_bytes: float) -> str:
    """ "1.5 GB", "30.0 TB"."""
    for unit in ("kB", "MB", "GB"):
        num_bytes /= 1000
        if num_bytes < 1000:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1000:.1f} TB"


def time_text(seconds: float) -> str:
    """ "40 s", "12 minutes", "30 hours", "3 days"."""
    for unit, size, most in (("s", 1, 120), ("minutes", 60, 7200), ("hours", 3600, 172800)):
        if seconds < most:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"
