"""atom and red: PTX ISA 9.7.13.5 and 9.7.13.7.

Lanes apply one after the other in lane order, so conflicting addresses give what some order on
hardware may give too. Both are strong accesses; see `ordering` for what they publish.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fa4.emulator.checks.conflict import Access
from fa4.emulator.isa.loads import store_unchecked
from fa4.emulator.isa.ordering import (
    SCOPES,
    SEMANTICS,
    Ordering,
    locations,
    observe,
    ordering_of,
    polls_in_vain,
    publish,
)
from fa4.emulator.isa.spaces import SHARED, TYPES, VECTORS, Elements, Piece, Space, record, units
from fa4.emulator.machine.memory import GlobalBuffer
from fa4.emulator.machine.shadows import ATOMIC, WRITE, Touch
from fa4.emulator.machine.state import Fragment, Warp
from fa4.emulator.machine.waits import SPIN, Spin
from fa4.emulator.ptx.syntax import PtxInstruction
from fa4.emulator.tma.reduction import reduce_bytes
from fa4.emulator.translate.context import Handler, KernelContext
from fa4.emulator.translate.lanes import width_of
from fa4.emulator.translate.table import TableRows, Unsupported, modifiers
from fa4.emulator.warp_lanes import Array, lanes_of

ROWS = TableRows()

_WORDS = frozenset({"u32", "s32", "u64", "s64"})
_HALVES = frozenset({"f16", "bf16", "f16x2", "bf16x2"})
_BITWISE = frozenset({"b32", "b64"})
# Scalar types of each operation.
OPERATIONS: dict[str, frozenset[str]] = {
    "add": frozenset({"u32", "s32", "u64", "f32", "f64"}) | _HALVES,
    "min": _WORDS,
    "max": _WORDS,
    "inc": frozenset({"u32"}),
    "dec": frozenset({"u32"}),
    "and": _BITWISE,
    "or": _BITWISE,
    "xor": _BITWISE,
    "exch": _BITWISE | {"b128"},
    "cas": _BITWISE | {"b16", "b128"},
}
# Vectors (global memory only): the largest count for each type.
_LARGEST_VECTOR = {"f32": 4, "f16": 8, "bf16": 8, "f16x2": 4, "bf16x2": 4}

_SMALLEST_NORMAL_F32 = 0x0080_0000
_SIGN_F32 = 0x8000_0000
_INFINITY_F64 = np.uint64(0x7FF0 << 48)
_QUIET_F64 = np.uint64(1 << 51)
_SIGN_F64 = np.uint64(1 << 63)


@dataclass(frozen=True)
class Update:
    """What an atomic instruction does to memory. size_bytes: of one lane's access."""

    operation: str
    kind: str
    space: Space
    ordering: Ordering
    size_bytes: int

    def apply(self, piece: Piece, values: Array, others: Array | None) -> Array:
        """Updates the places of a piece, one lane after the other; the values before.

        values, others: operands b and c, one unit (dtype V) for each place. Changes nothing but
        the piece's memory.
        """
        before = np.empty_like(values)
        for now in in_rounds(piece.offsets):
            place = Piece(piece.data, piece.offsets[now], None, piece.home)
            before[now] = units(piece.data, self.size_bytes)[place.offsets]
            third = others[now] if others is not None else None
            store_unchecked(place, self.combine(before[now], values[now], third, piece.home))
        return before

    def combine(self, old: Array, new: Array, third: Array | None, home: object) -> Array:
        """The updated units (n,), dtype V."""
        if self.operation == "exch":
            return new
        rows, operand = _rows(old), _rows(new)
        if third is not None:
            equal = (rows == operand).all(axis=1)
            return np.where(equal[:, None], _rows(third), rows).view(old.dtype).reshape(-1)
        if self.kind == "f32" and isinstance(home, GlobalBuffer):
            total = _flush(reduce_bytes("add", "f32", _flush(rows), _flush(operand)))
        else:
            total = reduce_bytes(self.operation, self.kind.removesuffix("x2"), rows, operand)
        if self.kind == "f64" and not isinstance(home, GlobalBuffer):
            total = _quiet(total, operand, rows)
        return np.ascontiguousarray(total).view(old.dtype).reshape(-1)


def in_rounds(offsets: Array) -> Iterator[Array]:
    """Indices of the offsets in rounds, in order: no round has the same offset twice."""
    order = np.argsort(offsets, kind="stable")
    ascending = offsets[order]
    first = np.ones(len(order), bool)
    np.not_equal(ascending[1:], ascending[:-1], out=first[1:])
    position = np.arange(len(order))
    # The round of an index: how many equal offsets stand before it.
    rounds = np.empty(len(order), np.int64)
    rounds[order] = position - np.maximum.accumulate(np.where(first, position, 0))
    for number in range(int(rounds.max(initial=-1)) + 1):
        yield (rounds == number).nonzero()[0]


def _rows(values: Array) -> Array:
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)


def _quiet(total: Array, new: Array, old: Array) -> Array:
    """Sums of f64 in shared memory, where a NaN passes on quiet, the old one first; in global
    memory it passes as it is (measured on an H200)."""
    result = np.ascontiguousarray(total).view(np.uint64)
    for source in (new, old):
        words = np.ascontiguousarray(source).view(np.uint64)
        nan = (words & ~_SIGN_F64) > _INFINITY_F64
        result = np.where(nan, words | _QUIET_F64, result)
    quiet: Array = result.view(np.uint8)
    return quiet


def _flush(rows: Array) -> Array:
    """Subnormal f32 become zeros of the same sign, as in global memory (PTX ISA, atom)."""
    words = np.ascontiguousarray(rows).view(np.uint32)
    tiny = (words & 0x7FFF_FFFF) < _SMALLEST_NORMAL_F32
    flushed: Array = np.where(tiny, words & _SIGN_F32, words).astype(np.uint32).view(np.uint8)
    return flushed


def _bind_update(instruction: PtxInstruction, name: str, operations: set[str]) -> Update:
    operation, semantics, scope, space, vector, kind, noftz, _ = modifiers(
        instruction,
        name,
        operations,
        SEMANTICS,
        SCOPES,
        (*SHARED, "global"),
        VECTORS,
        TYPES,
        ("noftz",),
        ("L2::cache_hint",),
    )
    ordering = ordering_of(
        semantics, scope, "relaxed", ("relaxed", "acquire", "release", "acq_rel")
    )
    if name == "red" and ordering.acquires:
        raise Unsupported(f"semantics .{semantics}")
    allowed = OPERATIONS.get(operation, frozenset())
    if vector:
        allowed = frozenset(_LARGEST_VECTOR) if operation == "add" else _HALVES
        if operation not in ("add", "min", "max") or space in SHARED:
            raise Unsupported("vectors are for .add, .min and .max in global memory")
        if VECTORS[vector] > _LARGEST_VECTOR.get(kind, 0):
            raise Unsupported(f".{vector} of .{kind}")
    if kind not in allowed:
        raise Unsupported(f".{operation} of .{kind}")
    if (kind in _HALVES) != bool(noftz):
        raise Unsupported("half precision needs .noftz, other types exclude it")
    size_bytes = VECTORS[vector] * width_of(kind) // 8
    return Update(operation, kind, Space(space), ordering, size_bytes)


def kind_of_update(warp: Warp, operation: str, element: str) -> str:
    """How an update accesses memory: an ATOMIC commutes with others, a WRITE does not."""
    sums = operation == "add" and "f" in element
    return WRITE if sums and warp.cta.machine.options.ordered_sums else ATOMIC


def _bind(
    instruction: PtxInstruction, context: KernelContext, update: Update, returns: bool
) -> Handler:
    operands = instruction.operands
    target = Elements(context, operands[0], update.kind, written=True) if returns else None
    at = 1 if returns else 0
    address = context.address(operands[at])
    source = Elements(context, operands[at + 1], update.kind)
    is_cas = update.operation == "cas"
    third = Elements(context, operands[at + 2], update.kind) if is_cas else None
    access = {ATOMIC: Access(instruction.line, strong=True), WRITE: Access(instruction.line)}
    size_bytes, ordering = update.size_bytes, update.ordering
    whole = np.dtype(f"V{size_bytes}")
    if source.size_bytes != size_bytes:
        raise Unsupported(f"{source.size_bytes} bytes of registers for {size_bytes} of memory")

    def handler(fragment: Fragment, mask: int) -> Spin | None:
        warp = fragment.warp
        lanes = lanes_of(mask)
        addresses = address(warp)[lanes]
        values = source.read(warp)[lanes].view(whole).reshape(-1)
        others = third.read(warp)[lanes].view(whole).reshape(-1) if third is not None else None
        kind = kind_of_update(warp, update.operation, update.kind)
        touch = Touch(warp.clock, access[kind], kind, lanes)
        results = np.empty(len(lanes), whole)
        changed = False
        for piece in update.space.pieces(warp, addresses, lanes, size_bytes, write=True):
            rows = slice(None) if piece.indices is None else piece.indices
            places = locations(piece, size_bytes)
            observe(warp, ordering, places)
            record(warp, piece, size_bytes, touch)
            publish(warp, ordering, places, mask, atomic=True)
            before = update.apply(piece, values[rows], None if others is None else others[rows])
            results[rows] = before
            after = units(piece.data, size_bytes)[piece.offsets]
            changed |= before.tobytes() != after.tobytes()
        if changed:
            warp.cta.machine.progress += 1
        if target is not None:
            got = results.view(target.dtype).reshape(-1, target.words)
            target.write(warp, got, mask)
        if polls_in_vain(warp, instruction.line, results) and not changed:
            return SPIN
        return None

    return handler


@ROWS.machine(
    "atom",
    "9.7.13.5",
    "{.relaxed .acquire .release .acq_rel} {.scope} {.global .shared{::cta ::cluster}; generic} "
    ".add .min .max .inc .dec .and .or .xor .exch .cas; .u .s .b32 .b64 .b128 .b16 (cas) .f32 "
    ".f64 .f16 .bf16{x2}.noftz; .v2 .v4 .v8 in global memory",
)
def bind_atom(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Returns the value before."""
    return _bind(instruction, context, _bind_update(instruction, "atom", set(OPERATIONS)), True)


@ROWS.machine(
    "red",
    "9.7.13.7",
    "{.relaxed .release} {.scope} {.global .shared{::cta ::cluster}; generic} .add .min .max .inc "
    ".dec .and .or .xor; types and vectors as atom",
)
def bind_red(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """As atom, without a result."""
    operations = set(OPERATIONS) - {"exch", "cas"}
    return _bind(instruction, context, _bind_update(instruction, "red", operations), False)


@ROWS.machine("multimem", "9.7.9.14", "not supported: one GPU")
def bind_multimem(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Refused."""
    raise Unsupported("multimem addresses: the emulator has one GPU")
