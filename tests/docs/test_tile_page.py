"""docs/tile.md: what it says of a copy is what the compiled kernel does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lab.pages.computed_claims import COMPUTED

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tile.md"
COPY = re.compile(r"cp\.async\.bulk\.tensor\.4d\.shared::cta\.global\S* \[%r\d+(?:\+(\d+))?\]")
COUNTS = {2: "two", 4: "four"}


def test_a_tile_of_k_is_as_many_copies_as_the_page_says() -> None:
    """Of the kernel that is followed: boxes of one arrival, and the bytes between their places."""
    pytest.importorskip("cutlass")
    from fa4.compiled.build import build
    from fa4.compiled.variants import tuned_spec

    spec = tuned_spec(128, 128)
    ptx = build(spec, spec.gpu.arch).ptx
    parts = re.split(r"mbarrier\.arrive\.expect_tx", ptx)[1:]
    copies = [[int(offset or 0) for offset in COPY.findall(part)] for part in parts]
    into_ring = [places for places in copies if min(places) > 0]  # Q's have registers of their own
    box_bytes = 1024 * int(COMPUTED["KiB of a box"]())
    whole_bytes = 1024 * int(COMPUTED["KiB of a K tile"]())
    assert len(into_ring) >= 2
    for places in into_ring:
        assert [place - places[0] for place in places] == list(range(0, whole_bytes, box_bytes))
    said = " ".join(PAGE.read_text("utf-8").split())
    assert f"KiB: {COUNTS[len(into_ring[0])]} instructions, since a box is" in said
