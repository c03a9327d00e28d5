"""Sparse A of mma.sp and wgmma.mma_async.sp: metadata in registers, and products.

PTX ISA 9.7.14.6 and 9.7.15.6; `fa4.emulator.tcgen05.sparse` says what metadata means. Each warp of
a warpgroup holds that of its 16 rows as mma.sp does of all.

Which bits of which lane belong to which four is drawn, not written, in the manual; it agrees with
the order in which CUTLASS stores metadata. Not compared with a GPU.
"""

from __future__ import annotations

import numpy as np

from fa4.emulator.tcgen05.formats import Format
from fa4.emulator.tcgen05.sparse import CODES_OF_WORD, Codes, Places
from fa4.emulator.tcgen05.tmem import Bytes, Words
from fa4.emulator.wgmma.forms import ProductForm
from fa4.emulator.wgmma.sums import LAYOUTS, codes_of, multiply, split

ROWS, QUADS = 16, 8


def metadata_lanes(element: Format, k_bytes: int) -> int:
    """How many lanes of four hold the metadata of an A with `k_bytes` in each row."""
    return k_bytes // (8 if element.container_bytes == 1 else 16)


def codes_from(element: Format, words: Words) -> Codes:
    """The 4-bit codes of each row, (16, fours), from metadata (8 quads, lanes that hold it).

    Of wide types a lane has four codes of the quad's upper row, then four of its lower one; of
    8-bit types eight of one row, its neighbour those of the other row.
    """
    shifts = 4 * np.arange(CODES_OF_WORD, dtype=np.uint32)
    codes = (words[:, :, None] >> shifts & 15).astype(np.uint8)
    lanes = words.shape[1]
    if element.container_bytes == 1:
        by_row = codes.reshape(QUADS, lanes // 2, 2, CODES_OF_WORD).transpose(2, 0, 1, 3)
    else:
        by_row = codes.reshape(QUADS, lanes, 2, CODES_OF_WORD // 2).transpose(2, 0, 1, 3)
    return by_row.reshape(ROWS, -1)


def multiply_sparse(
    form: ProductForm, a: Bytes, b: Bytes, d: Words | None, places: Places
) -> Words:
    """D (rows, n) as bits. a: bytes of what is there, (rows, K / 2); b: (n, bytes of K).

    What a row leaves out takes no part, not even as zero times infinity.
    """
    types = {1: np.uint8, 2: np.uint16, 4: np.uint32}
    element = types[form.a.container_bytes]
    whole = np.zeros((len(a), b.shape[1] // form.b.container_bytes), element)
    np.put_along_axis(whole, places, a.view(element), axis=1)
    found = multiply(form, whole.view(np.uint8), b, d)
    if form.is_integer or not split(LAYOUTS[form.b], codes_of(form.b, b)).has_special:
        return found
    columns = b.view(element)
    for row in range(len(a)):
        met = np.ascontiguousarray(columns[:, places[row]]).view(np.uint8)
        before = d[row : row + 1] if d is not None else None
        found[row] = multiply(form, a[row : row + 1], met, before)[0]
    return found
