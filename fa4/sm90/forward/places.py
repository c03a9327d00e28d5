"""Where a thread's elements of O of 8-bit products lie, outside of its registers.

In shared memory, the vectors of a warpgroup's threads lie side by side, for nobody else to read.
In O's own rows in global memory a thread has, of every 16 columns, four that are neighbours
(`narrow`): 8 bytes, and a quad's are a sector.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from fa4.kit.ptx_block import PtxBlock
from fa4.kit.tiles import WorkTile
from fa4.kit.units import WARPGROUP
from fa4.sm90.forward.fragment import QUAD, ROWS_OF_THREAD, row_of
from fa4.sm90.forward.narrow import BLOCK, neighbours

VECTOR_BYTES, ROW_VECTOR_BYTES = 16, 8  # of an access to shared and to global memory
VECTOR = VECTOR_BYTES // 2  # elements of 16 bits
BLOCK_BYTES = 32  # of 16 columns


@dataclass(frozen=True)
class HeldVector:
    """Elements that lie side by side: their numbers in the accumulator; where they are.

    start: number of the address that it is counted from. offset: bytes from there.
    """

    elements: tuple[int, ...]
    start: int
    offset: int


@dataclass(frozen=True)
class HeldPlaces:
    """A thread's addresses: one in shared memory; or in O's rows one of each of its own, 0 where
    there is no such row. columns: of O, of which a thread has half as many elements."""

    starts: tuple
    columns: cutlass.Constexpr
    in_rows: cutlass.Constexpr

    def vectors(self) -> list[HeldVector]:
        """All there are."""
        count = self.columns // 2
        if self.in_rows:
            return [
                HeldVector(neighbours(block + 2 * row), row, block // BLOCK * BLOCK_BYTES)
                for block in range(0, count, BLOCK)
                for row in range(ROWS_OF_THREAD)
            ]
        return [
            HeldVector(tuple(range(i, i + VECTOR)), 0, i // VECTOR * WARPGROUP * VECTOR_BYTES)
            for i in range(0, count, VECTOR)
        ]

    def begin(self, code: PtxBlock) -> "HeldAccess":
        """Instructions that read and write them."""
        registers = code.read_all(self.starts)
        if not self.in_rows:
            return HeldAccess(code, "shared", registers, [""])
        exist = [code.do("setp.ne.b64", one, "0", kind="pred") for one in registers]
        return HeldAccess(code, "global", registers, [f"@{one} " for one in exist])


@dataclass(frozen=True)
class HeldAccess:
    """Loads and stores in a block of code. starts: registers. guards: of what each is part of."""

    code: PtxBlock
    space: str
    starts: list[str]
    guards: list[str]

    def load(self, vector: HeldVector) -> list[str]:
        """Its words of two elements; zeros of a row that there is not."""
        words = [self.code.register("b32") for _ in range(len(vector.elements) // 2)]
        if self.guards[vector.start]:  # else ptxas keeps a place for what they were before
            for word in words:
                self.code.effect(f"mov.b32 {word}, 0;")
        self._move(vector, "ld", f"{{{', '.join(words)}}}, [{self._place(vector)}]", len(words))
        return words

    def store(self, vector: HeldVector, words: list[str]) -> None:
        """Its words."""
        self._move(vector, "st", f"[{self._place(vector)}], {{{', '.join(words)}}}", len(words))

    def store_rounded(self, vector: HeldVector, values: list[str]) -> None:
        """Its elements of all the values, as bf16."""
        pairs = zip(vector.elements[::2], vector.elements[1::2], strict=True)
        self.store(vector, [
            self.code.do("cvt.rn.bf16x2.f32", values[high], values[low], kind="b32")
            for low, high in pairs
        ])  # fmt: skip

    def add(
        self, vector: HeldVector, words: list[str], factors: list[str], values: list[str]
    ) -> None:
        """To its elements of the values what the words hold, times the factor of a row."""
        halves = [
            self.code.do(opcode, word, bits, kind="b32")
            for word in words
            for opcode, bits in (("shl.b32", "16"), ("and.b32", "0xffff0000"))
        ]
        for i, half in zip(vector.elements, halves, strict=True):
            held = self.code.do("mov.b32", half)
            operands = f"{held}, {factors[row_of(i)]}, {values[i]}"
            self.code.effect(f"fma.rn.f32 {values[i]}, {operands};")

    def _place(self, vector: HeldVector) -> str:
        return f"{self.starts[vector.start]}+{vector.offset}"

    def _move(self, vector: HeldVector, what: str, operands: str, words: int) -> None:
        guard = self.guards[vector.start]
        self.code.effect(f"{guard}{what}.{self.space}.v{words}.b32 {operands};")


def in_shared_memory(start: Int32, columns: int) -> HeldPlaces:
    """start: of this thread's warpgroup."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    return HeldPlaces((start + thread * VECTOR_BYTES,), columns, in_rows=False)


def in_rows(tile: WorkTile, tensor: cute.Tensor, rows: tuple) -> HeldPlaces:
    """A work tile's rows of O, (batch, rows, heads, dim) or packed; rows: this thread's."""
    spec = tile.spec
    quad_thread = cute.arch.thread_idx()[0] % QUAD
    starts = []
    for row in rows:
        place: tuple[Any, ...] = (tile.start_q + tile.position(row), tile.query_head(row), None)
        if not spec.packed_q:
            place = (tile.batch, *place)
        start = tensor[place].iterator.toint() + Int64(quad_thread) * ROW_VECTOR_BYTES
        starts.append(Int64(cutlass.select_(tile.has_row(row), start, Int64(0))))
    return HeldPlaces(tuple(starts), spec.head_dim_v, in_rows=True)


def store_all(places: HeldPlaces, values: list) -> None:
    """A thread's part of O, rounded."""
    code = PtxBlock()
    access, registers = places.begin(code), code.read_all(values)
    for vector in places.vectors():
        access.store_rounded(vector, registers)
    code.trace(effects=True)
