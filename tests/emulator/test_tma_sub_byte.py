"""TMA copies of 4- and 6-bit elements: as they are, or 16 of them to 16 bytes, padded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.tcgen05.formats import Format, unpack_padded
from fa4.emulator.tma.descriptor import PADDED_BOX, SUB_BYTE, TensorMap, TmaError
from fa4.emulator.tma.swizzle import swizzle_addresses
from fa4.emulator.tma.transfer import plan_gather4, plan_tile

BASE, SMEM = 4096, 1024


def bits_of(data: np.ndarray, bits: int) -> np.ndarray:
    """Codes of rows of packed elements, lowest bits first."""
    flat = np.unpackbits(data, axis=-1, bitorder="little")
    codes = flat.reshape(*data.shape[:-1], -1, bits)
    return np.packbits(codes, axis=-1, bitorder="little")[..., 0]


def make_map(element: str, rows: int, swizzle: int, width: int = 0) -> tuple[TensorMap, np.ndarray]:
    """A map of a matrix, of `width` elements a row (two boxes unless given), and its bytes."""
    bits = SUB_BYTE[element][0]
    box = PADDED_BOX if element != "b4x16" else (swizzle or 64) * 2
    width = width or 2 * box
    stride = -(-width * bits // 8 // 16) * 16
    matrix = np.random.default_rng(rows).integers(0, 256, (rows, stride)).astype(np.uint8)
    made = TensorMap(BASE, element, (width, rows), (stride,), (box, 4), (1, 1), swizzle=swizzle)
    return made, matrix


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(SUB_BYTE)), st.integers(1, 9), st.sampled_from((0, 128)),
    st.integers(-4, 9), st.integers(0, 1),
)  # fmt: skip
def test_a_load_is_the_definition(
    element: str, rows: int, swizzle: int, row: int, column: int
) -> None:
    """Every element of the box lands where its unit does; outside are zeros."""
    tensor_map, matrix = make_map(element, rows, swizzle)
    bits, shared_bits = SUB_BYTE[element]
    box = tensor_map.box[0]
    assert TensorMap.decode(tensor_map.encode()) == tensor_map
    plan = plan_tile(tensor_map, (column * box, row), SMEM)
    memory = np.zeros(BASE + matrix.size, np.uint8)
    memory[BASE:] = matrix.reshape(-1)
    smem = np.full(1 << 14, 0xEE, np.uint8)
    for source, target, inside in zip(
        plan.global_addresses, plan.smem_addresses, plan.valid, strict=True
    ):
        unit = memory[source : source + plan.unit_bytes] if inside else 0
        smem[target : target + plan.unit_bytes] = unit
    assert plan.total_bytes == 4 * box * bits // 8  # padding is not counted
    pitch = swizzle or box * shared_bits // 8
    codes = bits_of(matrix[:, : 2 * box * bits // 8], bits)
    for line in range(4):
        places = SMEM + line * pitch + np.arange(0, box * shared_bits // 8, 16, dtype=np.int64)
        units = swizzle_addresses(places, swizzle, 16)[:, None] + np.arange(16)
        data = smem[units].reshape(1, -1)
        if shared_bits == bits:
            found = bits_of(data, bits)[0]
        else:
            found = unpack_padded(Format.E2M1 if bits == 4 else Format.E2M3, data)[0]
        inside = 0 <= row + line < rows
        wanted = codes[row + line, column * box : (column + 1) * box] if inside else 0
        assert (found == wanted).all()


def test_padding_is_left_as_it_was() -> None:
    """The second half of each unit of 4-bit elements."""
    tensor_map, _ = make_map("b4x16_p64", 4, 0)
    plan = plan_tile(tensor_map, (0, 0), SMEM)
    assert plan.unit_bytes == 8 and set((plan.smem_addresses % 16).tolist()) == {0}
    plan = plan_tile(make_map("b6x16_p32", 4, 0)[0], (0, 0), SMEM)
    assert plan.unit_bytes == 4 and set((plan.smem_addresses % 16).tolist()) == {0, 4, 8}


def test_what_the_unit_refuses() -> None:
    """Each with its field."""
    padded, packed = make_map("b4x16_p64", 4, 0)[0], make_map("b4x16", 4, 128)[0]
    for call in (
        lambda: plan_tile(padded, (16, 0), SMEM),
        lambda: plan_tile(packed, (8, 0), SMEM),
        lambda: plan_tile(padded, (0, 0), SMEM, store=True),
        lambda: plan_gather4(packed, (0, 0, 1, 2, 3), SMEM),
        lambda: make_map("b4x16", 4, 128, width=33),
        lambda: TensorMap(BASE, "b4x16_p64", (128, 4), (64,), (64, 4), (1, 1)),
    ):
        with pytest.raises(TmaError, match="TMA: "):
            call()
    assert plan_tile(packed, (0, 0), SMEM, store=True).valid.all()
