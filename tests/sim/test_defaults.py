"""What is chosen for a call can be predicted: its own default tile is never the one at fault."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.config import PRODUCT_DEPTH_BYTES, Problem
from fa4.designs.amounts import element_bytes
from fa4.designs.published_hopper import whole_products
from fa4.hardware import H200
from fa4.sim.options import build
from tests.sim.choices import default_hopper

DTYPES = ("bf16", "fp16", "e4m3", "e5m2")
HOPPER = {
    "machine": st.sampled_from(["h100", "h200"]),
    "kernel": st.sampled_from([None, "fa2", "hopper", "published"]),
    # Of 136 to 192 the published tile fits with a narrower V only.
    "head_dim": st.sampled_from([8, 64, 72, 96, 128, 256]),
}
BLACKWELL = {
    "machine": st.sampled_from(["b200", "b300"]),
    "head_dim": st.sampled_from([8, 64, 96, 128]),
}
ANY = {
    "dtype": st.sampled_from(DTYPES),
    "causal": st.sampled_from(["yes", "no"]),
    "seqlen": st.integers(1, 700),
    "heads": st.sampled_from([1, 2, 6]),
    "batch": st.integers(1, 3),
}


@settings(max_examples=150)
@given(st.one_of(st.fixed_dictionaries(HOPPER | ANY), st.fixed_dictionaries(BLACKWELL | ANY)))
def test_every_call_is_predicted(call: dict[str, object]) -> None:
    """Any element type, head dim, mask and length that a machine's kernel is modelled for."""
    found = build({name: value for name, value in call.items() if value is not None}).predict()
    assert found.seconds > 0 and found.tflops > 0


@given(
    st.sampled_from([(d, d) for d in range(8, 257, 8)] + [(192, 128)]),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.integers(1, 9000),
    st.booleans(),
)
def test_a_tile_is_full_of_instructions(
    dims: tuple[int, int], dtype: str, causal: bool, rows: int, published: bool
) -> None:
    """P V multiplies 32 bytes of P's row at a time; 16-bit types keep the tile they were given, and
    8-bit ones have their own in our kernel."""
    sizes = {"seqlen_q": rows, "seqlen_k": rows, "heads_q": 2, "heads_k": 2, "causal": causal}
    tiles = {
        name: default_hopper(
            Problem(head_dim=dims[0], head_dim_v=dims[1], dtype=name, **sizes),
            H200,
            published=published,
        ).tile_n
        for name in {dtype, "bf16"}
    }
    depth = PRODUCT_DEPTH_BYTES // element_bytes(dtype)
    assert tiles[dtype] % depth == 0
    if published or depth == 16:
        assert 0 <= tiles["bf16"] - tiles[dtype] < depth


@pytest.mark.parametrize(("keys", "size", "left"), [(80, 1, 64), (80, 2, 80), (144, 1, 128)])
def test_the_keys_that_are_left(keys: int, size: int, left: int) -> None:
    """Multiples of 16 stay for two bytes an element, and become ones of 32 for one."""
    assert whole_products(keys, size) == left
