"""Regions of a memory space: in order, apart, where their alignment has them, and no gap wider."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fa4.plan.memory import Layout

REGIONS = st.lists(
    st.tuples(
        st.sampled_from(("smem", "tmem")),
        st.integers(1, 5000),
        st.integers(1, 4),
        st.sampled_from((None, 1, 2, 8, 128, 1024)),
    ),
    max_size=12,
)


@given(REGIONS)
def test_regions_lie_behind_each_other(regions: list[tuple[str, int, int, int | None]]) -> None:
    """Without an alignment the next begins where the last ends."""
    layout, ends = Layout(), {"smem": 0, "tmem": 0}
    for number, (space, size, stages, align) in enumerate(regions):
        wanted = {} if align is None else {"align": align}
        found = layout.add(str(number), space, size, stages=stages, **wanted)
        assert found.start % (align or 1) == 0
        assert ends[space] <= found.start < ends[space] + (align or 1)
        assert found.stop == found.start + size * stages
        ends[space] = found.stop
    assert {space: end for space, end in ends.items() if end} == layout.ends
    assert [buffer.name for buffer in layout.buffers] == [str(n) for n in range(len(regions))]
