"""A recording of a small grid, made once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from fa4.explore.controls import Control, controls
from fa4.explore.packing import pack, unpack
from fa4.explore.recording import Recording, record_grid
from fa4.explore.verdicts import read_verdicts

# Fewer points than --quick: one call, and choices that are refused.
FEW = {
    "machine": ("b200", "h200"), "head_dim": ("128",), "seqlen": ("1k",), "q_tiles": ("2",),
    "kernel": ("fa4", "fa3"), "kv_stages": ("fit",), "tile_n": ("128", "256"), "exp2": ("tuned",),
    "rescale_rate": ("0", "1"), "scheduler": ("static", "lpt"),
}  # fmt: skip


@dataclass(frozen=True)
class Small:
    """A recording, its packed text, and what the page reads of it."""

    controls: tuple[Control, ...]
    recording: Recording
    text: str
    head: Mapping[str, Any]
    columns: Mapping[str, np.ndarray]


@pytest.fixture(scope="session")
def small() -> Small:
    few = tuple(c.only(*FEW[c.key]) if c.key in FEW else c for c in controls())
    recording = record_grid(few, lambda: None)
    text = pack(recording, read_verdicts())
    return Small(few, recording, text, *unpack(text))
