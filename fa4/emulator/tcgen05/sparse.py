"""Sparse A: which elements of a row are there, and where tcgen05.mma.sp has its metadata.

A row of A holds two of each four neighbours: of 8-bit types elements, of wider ones 16-bit halves,
so that of tf32 one of two elements is there, both halves of it. Metadata has 4 bits for each four:
the place of the first in the lower two, of the second in the upper two (PTX ISA 9.7.14.6).

Metadata of tcgen05.mma.sp lies in all lanes of tensor memory (PTX ISA 9.7.16.10.8). Where which
row's bits are is drawn there, not written; this is the order in which JAX (Mosaic GPU) writes them
for M of 128 in each CTA. Of tf32 and of M of 64 it is not known here. Not compared with a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fa4.emulator.errors import EmulatorError
from fa4.emulator.tcgen05.errors import DescriptorError
from fa4.emulator.tcgen05.formats import Format, Values
from fa4.emulator.tcgen05.tmem import LANES, TmemAddress, TmemRegion, Words, check_columns

Codes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int64]
_WHOLE_TF32 = (0b0100, 0b1110)  # both halves of the first element, of the second
CODES_OF_WORD = 8  # of 4 bits, in 32
_LANES: npt.NDArray[np.int64] = np.arange(LANES, dtype=np.int64)
PAIR = 2  # columns, of which the selector of 16-bit types takes one


class MetadataError(EmulatorError):
    """Metadata whose meaning is undefined."""

    kind = "fault"  # of the finding


def wrong_code(element: Format, codes: Codes, ordered: bool) -> str:
    """What is wrong with the first code that is undefined, "" if none is."""
    first, second = codes & 3, codes >> 2
    wrong = first == second
    if ordered:
        wrong |= first > second
    if element is Format.TF32:
        wrong |= ~np.isin(codes, _WHOLE_TF32)
    if not wrong.any():
        return ""
    row, four = (int(i) for i in np.argwhere(wrong)[0])
    allowed = "two places that differ"
    if element is Format.TF32:
        allowed = "0b0100 or 0b1110"
    elif ordered:
        allowed = "two places, the lower one first"
    return (
        f"metadata 0b{codes[row, four]:04b} for row {row}, columns from {_columns(element) * four} "
        f"on: it must be {allowed}"
    )


def _columns(element: Format) -> int:
    """Elements that one code is about."""
    return 2 if element is Format.TF32 else 4


def places_from(element: Format, codes: Codes) -> Places:
    """The columns (rows, elements there) of A that are there."""
    fours = 4 * np.arange(codes.shape[1])
    both = np.stack([fours + (codes & 3), fours + (codes >> 2)], axis=2)
    if element is Format.TF32:
        return both[:, :, 0] // 2
    return both.reshape(len(codes), -1)


class Metadata(NamedTuple):
    """The metadata of one tcgen05.mma.sp, in the same columns of every CTA.

    first_column, columns: one of a pair for 16-bit types, both for 8-bit ones.
    """

    element: Format
    first_column: int
    columns: int

    def region(self, rank: int) -> TmemRegion:
        """What is read in a CTA."""
        return TmemRegion(rank, _LANES, self.first_column, self.columns)

    def places(self, tmem: Words) -> Places:
        """The columns (128 rows, elements there) of A that are there. Raises MetadataError."""
        words = tmem[:, self.first_column : self.first_column + self.columns]
        shifts = 4 * np.arange(CODES_OF_WORD, dtype=np.uint32)
        codes = (words[:, :, None] >> shifts & 15).astype(np.uint8)
        if self.columns == 1:
            # 16 rows, half of K, row of eight, upper or lower eight, code
            split = codes.reshape(LANES // 16, 2, 8, 2, CODES_OF_WORD // 2)
            codes = split.transpose(0, 3, 2, 1, 4)
        codes = codes.reshape(LANES, -1)
        wrong = wrong_code(self.element, codes, ordered=False)
        if wrong:
            raise MetadataError(wrong)
        return places_from(self.element, codes)


def metadata_at(address: int, element: Format, rows: int, selector: int) -> Metadata:
    """The metadata at an address of tensor memory. Raises DescriptorError or TmemError."""
    place = TmemAddress.decode(address)
    if element.container_bytes > 2 or rows != LANES:
        raise DescriptorError(
            f"sparse A of {element} with {rows} rows in a CTA: only {LANES} rows of 8 or 16 bits "
            "are supported"
        )
    if place.lane or place.column % PAIR:
        raise DescriptorError(
            f"metadata starts at lane {place.lane}, column {place.column}: it must be lane 0 and "
            "an even column"
        )
    wide = element.container_bytes == 2
    if selector >= (PAIR if wide else 1):
        raise DescriptorError(f"sparsity selector {selector} for A of {element}")
    check_columns("metadata", place.column, PAIR)
    return Metadata(element, place.column + selector, 1 if wide else PAIR)


def product(a: Values, b: Values, places: Places) -> Values:
    """A B^T (rows, N) from what is there of A (rows, K / 2), and B (N, K).

    What a row leaves out takes no part, not even as zero times infinity.
    """
    if not np.isfinite(b).all():
        return np.stack([b[:, at] @ row for row, at in zip(a, places, strict=True)])
    whole = np.zeros((len(a), b.shape[1]))
    np.put_along_axis(whole, places, a, axis=1)
    found: Values = whole @ b.T
    return found
