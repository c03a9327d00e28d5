"""tcgen05.mma: what one instruction touches, and what it computes (PTX ISA 9.7.16.10.9).

    D = A B + D 2^-s      A (M, K), B (K, N), D (M, N)

With block scaling A and B are multiplied by factors first (`fa4.emulator.tcgen05.scaled`).

With cta_group 2 each CTA of the pair holds half of A's rows and half of B's N in its own shared
memory, under the same descriptors, and half of D's rows in its own tensor memory.

Arithmetic is a model: products are exact, one instruction's K products and D are added in float64,
and the sum is rounded once to D's type. How the tensor core aligns and truncates its addends is
not documented; s32 results are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fa4.emulator.tcgen05.datapath import DataPath, data_path
from fa4.emulator.tcgen05.descriptors import InstructionDescriptor, SmemDescriptor, Swizzle
from fa4.emulator.tcgen05.errors import DescriptorError
from fa4.emulator.tcgen05.formats import (
    Format,
    Values,
    decode_accumulator,
    decode_shared,
    decode_tensor,
    encode_accumulator,
)
from fa4.emulator.tcgen05.operands import UNIT_BYTES, Major, unit_addresses
from fa4.emulator.tcgen05.scaled import Scales
from fa4.emulator.tcgen05.sparse import Metadata
from fa4.emulator.tcgen05.sparse import product as sparse_product
from fa4.emulator.tcgen05.tmem import (
    LANES,
    Bytes,
    Indices,
    SmemRead,
    TmemAddress,
    TmemRegion,
    Words,
    check_columns,
)

# 32 bytes of K per row of A, in 4-byte columns.
_A_COLUMNS = 8
_MAX_SCALE_SHIFT = 15


@dataclass(frozen=True)
class MmaOperation:
    """One tcgen05.mma, its operands decoded from registers. Hashable, so that plans are cached.

    scale_input_d: s of 2^-s, 0 to 15 (kinds f16 and tf32 only). disable_lanes: the instruction's
    mask words, 4 per CTA, bit i of word w is lane 32 w + i; empty: none. scales: block scaling.
    metadata: of a sparse A.
    """

    cta_group: int
    instruction: InstructionDescriptor
    a: SmemDescriptor | TmemAddress
    b: SmemDescriptor
    d: TmemAddress
    accumulate: bool
    scale_input_d: int = 0
    disable_lanes: tuple[int, ...] = ()
    ws: bool = False
    scales: Scales | None = None
    metadata: Metadata | None = None


@dataclass(frozen=True, eq=False)
class SmemOperand:
    """An operand in shared memory: the 16-byte units that every CTA reads in its own memory."""

    element: Format
    units: Indices
    major: Major
    negate: bool

    def read(self, smem: Bytes) -> Values:
        """Values (rows, K); rows are M or N."""
        # complex128 is NumPy's fastest 16-byte item; it is only moved, never computed with.
        whole = smem[: len(smem) // UNIT_BYTES * UNIT_BYTES].view(np.complex128)
        values = decode_shared(self.element, whole.take(self.units // UNIT_BYTES).view(np.uint8))
        values = -values if self.negate else values
        return values if self.major is Major.K else values.T


@dataclass(frozen=True, eq=False)
class MmaPlan:
    """A tcgen05.mma ready to execute. Ranks are positions in the CTA pair."""

    operation: MmaOperation
    path: DataPath
    a: SmemOperand | TmemAddress
    b: SmemOperand
    smem_reads: tuple[SmemRead, ...]
    tmem_reads: tuple[TmemRegion, ...]
    tmem_writes: tuple[TmemRegion, ...]
    enabled: tuple[Indices | None, ...]

    def execute(self, smem: Sequence[Bytes], tmem: Sequence[Words]) -> None:
        """Computes D in place; one shared and one tensor memory per CTA of the group.

        Raises IndexError if a unit lies outside the shared memory.
        """
        b = np.concatenate([self.b.read(memory) for memory in smem])
        if self.operation.scales is not None:
            self._execute_scaled(self.operation.scales, b, smem, tmem)
            return
        # (splits, K, N / splits): the parts of N that lie in different groups of lanes.
        b_parts = b.reshape(self.path.splits, -1, b.shape[1]).transpose(0, 2, 1)
        # All operands are read before the first result is written: D of one CTA may be A of it.
        a_parts = [self._read_a(*memories) for memories in zip(smem, tmem, strict=True)]
        metadata = self.operation.metadata
        places = [metadata.places(memory) for memory in tmem] if metadata is not None else []
        for rank, a_part in enumerate(a_parts):
            with np.errstate(invalid="ignore", over="ignore"):
                if places:
                    product = sparse_product(a_part[0], b, places[rank])
                else:
                    product = np.matmul(a_part, b_parts).reshape(len(self.path.lanes), -1)
                self._accumulate(product, rank, tmem[rank])

    def _execute_scaled(
        self, scales: Scales, b: Values, smem: Sequence[Bytes], tmem: Sequence[Words]
    ) -> None:
        """The same with factors. Each quarter of the rows of D has copies of its own of them."""
        a_parts = [self._read_a(*memories)[0] for memories in zip(smem, tmem, strict=True)]
        products = []
        for memory, a in zip(tmem, a_parts, strict=True):
            of_a, of_b = (scales.read(memory, *x) for x in (("a", *a.shape), ("b", *b.shape)))
            same = all((x == x[:1]).all() for x in (of_a, of_b))
            step = len(a) if same else len(a) // len(of_a)
            with np.errstate(invalid="ignore", over="ignore"):
                parts = [
                    (a[first : first + step] * of_a[first // step, first : first + step])
                    @ (b * of_b[first // step]).T
                    for first in range(0, len(a), step)
                ]
            products.append(np.concatenate(parts))
        for rank, product in enumerate(products):
            self._accumulate(product, rank, tmem[rank])

    def _read_a(self, smem: Bytes, tmem: Words) -> Values:
        """(splits or 1, rows, K). In tensor memory each group of lanes holds its own copy of A."""
        if isinstance(self.a, SmemOperand):
            return self.a.read(smem)[None]
        words = _select(tmem, self.path.lanes, self.a.column, _A_COLUMNS)
        values = decode_tensor(self.operation.instruction.a_format, words)
        values = -values if self.operation.instruction.negate_a else values
        return values.reshape(self.path.splits, self.path.rows, -1)

    def _accumulate(self, product: Values, rank: int, tmem: Words) -> None:
        operation, instruction = self.operation, self.operation.instruction
        lanes, enabled = self.path.lanes, self.enabled[rank]
        if enabled is not None:
            lanes, product = lanes[enabled], product[enabled]
        first, columns = operation.d.column, product.shape[1]
        if operation.accumulate:
            d = decode_accumulator(instruction.d_format, _select(tmem, lanes, first, columns))
            product += np.ldexp(d, -operation.scale_input_d) if operation.scale_input_d else d
        words = encode_accumulator(instruction.d_format, product, instruction.saturate)
        if len(lanes) == LANES:
            tmem[:, first : first + columns] = words
        else:
            tmem[lanes, first : first + columns] = words


def _select(tmem: Words, lanes: Indices, first_column: int, columns: int) -> Words:
    rectangle = tmem[:, first_column : first_column + columns]
    return rectangle if len(lanes) == LANES else rectangle[lanes]


@lru_cache(maxsize=4096)
def plan_mma(operation: MmaOperation) -> MmaPlan:
    """Checks an operation and finds what it touches.

    Raises DescriptorError or TmemError if the instruction is invalid (PTX ISA Tables 39, 50, 52).
    """
    instruction = operation.instruction
    instruction.check_shape(operation.cta_group, operation.ws)
    _check_modifiers(operation)
    path = data_path(instruction.m, operation.cta_group, operation.ws, operation.d.lane)
    columns = instruction.n // path.splits
    check_columns("matrix D", operation.d.column, columns)

    ranks = range(operation.cta_group)
    b = _smem_operand(operation, "b")
    smem_operands = [b]
    tmem_reads = []
    a: SmemOperand | TmemAddress
    if isinstance(operation.a, SmemDescriptor):
        a = _smem_operand(operation, "a")
        smem_operands.insert(0, a)
    else:
        a = operation.a
        _check_tmem_a(operation, a)
        tmem_reads = [TmemRegion(rank, path.lanes, a.column, _A_COLUMNS) for rank in ranks]
    enabled = tuple(_enabled_rows(operation.disable_lanes, path, rank) for rank in ranks)
    writes = tuple(
        TmemRegion(
            rank, path.lanes if rows is None else path.lanes[rows], operation.d.column, columns
        )
        for rank, rows in enumerate(enabled)
    )
    if operation.accumulate:
        tmem_reads.extend(writes)
    if operation.metadata is not None:
        tmem_reads.extend(operation.metadata.region(rank) for rank in ranks)
    if operation.scales is not None:
        for rank in ranks:
            tmem_reads.extend(operation.scales.regions(rank, path.rows, instruction.n))
    reads = tuple(
        SmemRead(rank, operand.units.ravel(), operand.element.used_unit_bytes)
        for rank in ranks
        for operand in smem_operands
    )
    return MmaPlan(operation, path, a, b, reads, tuple(tmem_reads), writes, enabled)


def _smem_operand(operation: MmaOperation, which: str) -> SmemOperand:
    instruction = operation.instruction
    if which == "a":
        desc, size, depth = operation.a, instruction.m, instruction.a_elements
        element, transposed = instruction.a_format, instruction.transpose_a
        negate = instruction.negate_a
    else:
        desc, size, depth = operation.b, instruction.n, instruction.k
        element, transposed = instruction.b_format, instruction.transpose_b
        negate = instruction.negate_b
    assert isinstance(desc, SmemDescriptor)
    major = Major.MN if transposed else Major.K
    if transposed and (element.bits == 32) != (desc.swizzle is Swizzle.B128_BASE32):
        raise DescriptorError(
            f"transposed {element} operand {which.upper()} with swizzle {desc.swizzle.name}: "
            "32-bit types need 128B swizzling with 32B atoms, other types cannot have it"
        )
    containers = depth // element.per_container
    units = unit_addresses(
        desc, size // operation.cta_group, containers, element.container_bytes, major
    )
    return SmemOperand(element, units, major, negate)


def _check_modifiers(operation: MmaOperation) -> None:
    shift, kind = operation.scale_input_d, operation.instruction.kind
    if not 0 <= shift <= _MAX_SCALE_SHIFT:
        raise DescriptorError(f"scale-input-d is {shift}, must be 0 to {_MAX_SCALE_SHIFT}")
    if shift and kind not in ("f16", "tf32"):
        raise DescriptorError(f"scale-input-d is for the kinds f16 and tf32, not {kind}")
    words = len(operation.disable_lanes)
    if words not in (0, 4 * operation.cta_group):
        raise DescriptorError(
            f"disable-output-lane has {words} words, must have {4 * operation.cta_group}"
        )
    if operation.ws and (shift or any(operation.disable_lanes)):
        raise DescriptorError("tcgen05.mma.ws has neither scale-input-d nor disable-output-lane")


def _check_tmem_a(operation: MmaOperation, a: TmemAddress) -> None:
    if operation.instruction.a_format is Format.E2M1_PACKED:
        raise DescriptorError("matrix A of packed 4-bit elements in tensor memory: not supported")
    if operation.instruction.transpose_a:
        raise DescriptorError("matrix A in tensor memory is K-major: it cannot be transposed")
    if a.lane != operation.d.lane:
        raise DescriptorError(
            f"matrix A starts at lane {a.lane}, matrix D at lane {operation.d.lane}: "
            "both must have the same lane alignment"
        )
    check_columns("matrix A", a.column, _A_COLUMNS)


def _enabled_rows(mask_words: tuple[int, ...], path: DataPath, rank: int) -> Indices | None:
    """Rows of the data path whose lanes are written; None: all."""
    words = mask_words[4 * rank : 4 * rank + 4]
    if not any(words):
        return None
    mask = np.array([words[lane // 32] >> lane % 32 & 1 for lane in path.lanes])
    return np.flatnonzero(mask == 0)
