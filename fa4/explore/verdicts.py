"""What the emulator says when a wait, an arrival or a fence is taken out of a kernel: recorded.

`python -m lab.benchmarks.record_verdicts` runs the compiled kernels without each of them and writes
verdicts.json; here it is read. The page shows it beside the plan whose signals have those names.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

FILE = "verdicts.json"
SCHEMA_VERSION = 1

# What a verdict is called on the page, and what it means.
VERDICTS = {
    "race": ("race", "two accesses to the same memory, one of them a write, that nothing orders"),
    "deadlock": ("deadlock", "nothing can go on: everybody waits for somebody"),
    "uninitialised": ("reads too early", "reads memory that nothing has written yet"),
    "mbarrier": ("broken barrier", "a barrier is used in a way its hardware does not allow"),
    "missing-proxy-fence": (
        "missing fence", "the other proxy may not see what was written through this one"
    ),
    "missing-fence": (
        "missing fence", "a product may read registers before they are written (wgmma.fence)"
    ),
    "missing-wait": (
        "missing wait", "registers are used that a product may still read or write"
    ),
    "tmem": ("tensor memory not given back", "the CTA ends with columns allocated"),
    "exit": ("ends too early", "the CTA ends while copies still read its memory"),
    "barrier": ("broken barrier", "threads meet at a barrier that others do not come to"),
    "wrong result": ("wrong result", "the output differs"),
    "equivalent": ("the same program", "what it orders is ordered without it"),
    "survived": ("nothing shows", "no schedule that was tried shows a difference"),
}  # fmt: skip


def read_verdicts() -> dict[str, Any]:
    """The recorded verdicts with their names; ValueError for another schema version."""
    text = resources.files("fa4.explore").joinpath(FILE).read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    if found["schema_version"] != SCHEMA_VERSION:
        raise ValueError(
            f"{FILE}: schema_version must be {SCHEMA_VERSION}; got {found['schema_version']}"
        )
    found["names"] = {key: list(names) for key, names in VERDICTS.items()}
    return found
