"""ld, ldu, st and st.bulk: PTX ISA 9.7.9.8 to 9.7.9.14.

Cache operators, eviction priorities, prefetch sizes and cache policies change no value and are
ignored. ld.param and st.param of kernel parameters are in `parameters`.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from fa4.emulator.checks.conflict import MUST_BE_INITIALISED, Access
from fa4.emulator.isa.direct_access import load_directly, store_directly
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
from fa4.emulator.isa.spaces import (
    SPACES,
    TYPES,
    VECTORS,
    Elements,
    Piece,
    Space,
    check_vector,
    record,
    units,
)
from fa4.emulator.machine.memory import MemoryFault
from fa4.emulator.machine.shadows import READ, WRITE, Change, Touch
from fa4.emulator.machine.state import Fragment
from fa4.emulator.machine.waits import SPIN, Spin
from fa4.emulator.ptx.syntax import Integer, PtxInstruction
from fa4.emulator.translate.context import Handler, KernelContext
from fa4.emulator.translate.table import TableRows, Unsupported, modifiers
from fa4.emulator.warp_lanes import FULL_MASK, Array, lanes_of

ROWS = TableRows()

BULK_BYTES = 8  # st.bulk writes multiples of this
# By how much sums of the same numbers may differ, relative: of 2^-24 for each rounding, made larger
# by cancellation (assumed). 32 lanes that hold different data are hardly ever that near.
NEAR = 2.0**-10
CACHE_OPERATORS = ("ca", "cg", "cs", "lu", "cv", "wb", "wt")
L1_HINTS = tuple(
    f"L1::{hint}"
    for hint in ("evict_normal", "evict_unchanged", "evict_first", "evict_last", "no_allocate")
)
L2_HINTS = tuple(f"L2::{hint}" for hint in ("evict_normal", "evict_first", "evict_last"))
PREFETCHES = ("L2::64B", "L2::128B", "L2::256B")
HINTS = (CACHE_OPERATORS, L1_HINTS, L2_HINTS, ("L2::cache_hint",), PREFETCHES)


def _form(instruction: PtxInstruction, name: str) -> tuple[Ordering, Space, str, int]:
    """(semantics, space, type, bytes of a lane) of a load or store."""
    semantics, _, scope, space, vector, kind, *_ = modifiers(
        instruction, name, SEMANTICS, ("mmio",), SCOPES, SPACES, VECTORS, TYPES, ("nc",), *HINTS
    )
    if not kind:
        raise Unsupported("no type")
    allowed = ("weak", "volatile", "relaxed", "release" if name == "st" else "acquire")
    ordering = ordering_of(semantics, scope, "weak", allowed)
    return ordering, Space(space), kind, check_vector(space, vector, kind)


@ROWS.machine(
    "ld",
    "9.7.9.8",
    "{.weak .volatile .relaxed .acquire .mmio} {.scope} {.const .global .local .shared{::cta "
    "::cluster} .param; generic} {.nc} {.v2 .v4 .v8} .b8-.b128 .u .s .f32 .f64; cache hints",
)
def bind_load(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Uninitialised bytes of shared memory and unordered writes are findings."""
    ordering, space, kind, size_bytes = _form(instruction, "ld")
    target = Elements(context, instruction.operands[0], kind, written=True)
    if target.size_bytes != size_bytes:
        raise Unsupported(f"{target.size_bytes} bytes of registers for {size_bytes} of memory")
    address = context.address(instruction.operands[1])
    access = Access(instruction.line, strong=ordering.strong)

    def handler(fragment: Fragment, mask: int) -> Spin | None:
        warp = fragment.warp
        lanes = lanes_of(mask)
        addresses = address(warp) if mask == FULL_MASK else address(warp)[lanes]
        touch = Touch(warp.clock, access, READ, lanes)
        values: Array | None = None
        for piece in space.pieces(warp, addresses, lanes, size_bytes, write=False):
            if ordering.strong:
                observe(warp, ordering, locations(piece, size_bytes))
            record(warp, piece, size_bytes, touch)
            got = units(piece.data, size_bytes)[piece.offsets].view(target.dtype)
            got = got.reshape(-1, target.words)
            if piece.indices is None:
                values = got
                break
            if values is None:
                values = np.empty((len(lanes), target.words), target.dtype)
            values[piece.indices] = got
        assert values is not None
        target.write(warp, values, mask)
        if ordering.strong and polls_in_vain(warp, instruction.line, values):
            return SPIN
        return None

    if ordering.strong:
        return handler
    return load_directly(instruction, context, kind, access.word, handler)


@ROWS.machine("ldu", "9.7.9.10", "{.global} {.v2 .v4} .type: as ld")
def bind_uniform_load(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """A load of one address for all lanes."""
    parts = ("ld", *instruction.parts[1:])
    plain = PtxInstruction(
        ".".join(parts),
        parts,
        instruction.operands,
        instruction.guard,
        instruction.line,
        instruction.text,
        instruction.location,
    )
    return bind_load(plain, context)


@ROWS.machine(
    "st",
    "9.7.9.12",
    "{.weak .volatile .relaxed .release .mmio} {.scope} {.global .local .shared{::cta ::cluster} "
    ".param{::func}; generic} {.v2 .v4 .v8} .b8-.b128 .u .s .f32 .f64; cache hints",
)
def bind_store(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Two lanes that write different values to one place are a race."""
    ordering, space, kind, size_bytes = _form(instruction, "st")
    source = Elements(context, instruction.operands[1], kind)
    if source.size_bytes != size_bytes:
        raise Unsupported(f"{source.size_bytes} bytes of registers for {size_bytes} of memory")
    address = context.address(instruction.operands[0])
    access = Access(instruction.line, strong=ordering.strong)

    def handler(fragment: Fragment, mask: int) -> None:
        warp = fragment.warp
        lanes = lanes_of(mask)
        addresses, values = address(warp), source.read(warp)
        if mask != FULL_MASK:
            addresses, values = addresses[lanes], values[lanes]
        whole = values.view(f"V{size_bytes}").reshape(-1)
        for piece in space.pieces(warp, addresses, lanes, size_bytes, write=True):
            part = whole if piece.indices is None else whole[piece.indices]
            idle = partial(change_of, piece, part)
            record(warp, piece, size_bytes, Touch(warp.clock, access, WRITE, lanes, idle))
            if ordering.strong:
                publish(warp, ordering, locations(piece, size_bytes), mask)
                changed = store(piece, part)
            else:
                changed = True
                store_unchecked(piece, part)
                check_same_values(fragment, piece, part)
            if changed and piece.home is not None:
                warp.cta.machine.progress += 1

    if ordering.strong:
        return handler
    word = access.word & ~MUST_BE_INITIALISED
    return store_directly(instruction, context, kind, word, handler)


@ROWS.machine("st.bulk", "9.7.9.14", "st.bulk{.weak}{.shared::cta} [a], size, 0")
def bind_bulk_store(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """Each lane clears its range of shared memory, a multiple of 8 bytes."""
    modifiers(instruction, "st.bulk", ("weak",), ("shared::cta",))
    address, size, value = instruction.operands
    if value != Integer(0):
        raise Unsupported("st.bulk of another value than 0")
    address_of, size_of = context.scalar_address(address), context.scalar(size, "b64")
    space = Space("shared::cta" if "shared::cta" in instruction.parts else "")
    access = Access(instruction.line)

    def handler(fragment: Fragment, mask: int) -> None:
        warp = fragment.warp
        for lane in lanes_of(mask).tolist():
            start, count = address_of(warp, lane), size_of(warp, lane) // BULK_BYTES
            if size_of(warp, lane) % BULK_BYTES:
                raise MemoryFault("misaligned", "st.bulk of a size that is no multiple of 8")
            places = start + np.arange(count, dtype=np.uint64) * np.uint64(BULK_BYTES)
            lanes = np.full(count, lane)
            for piece in space.pieces(warp, places, lanes, BULK_BYTES, write=True):
                record(warp, piece, BULK_BYTES, Touch(warp.clock, access, WRITE, lanes))
                store_unchecked(piece, np.zeros(len(piece.offsets), f"V{BULK_BYTES}"))
        warp.cta.machine.progress += 1

    return handler


def store_unchecked(piece: Piece, values: Array) -> None:
    """Writes one unit (dtype V) for each place; the last lane wins."""
    units(piece.data, values.dtype.itemsize)[piece.offsets] = values


def changes_nothing(piece: Piece, values: Array) -> bool:
    """Whether a store of these units would leave all bytes as they are."""
    kept = units(piece.data, values.dtype.itemsize)[piece.offsets]
    return kept.tobytes() == values.tobytes()


def change_of(piece: Piece, values: Array, chosen: Array | slice) -> Change:
    """What a store of the chosen ones of these units would change."""
    kept, new = units(piece.data, values.dtype.itemsize)[piece.offsets[chosen]], values[chosen]
    if kept.tobytes() == new.tobytes():
        return Change.NOTHING
    return Change.ROUNDING if are_rounded_alike(kept, new) else Change.VALUES


def store(piece: Piece, values: Array) -> bool:
    """As store_unchecked; returns whether bytes changed."""
    changed = not changes_nothing(piece, values)
    store_unchecked(piece, values)
    return changed


def check_same_values(fragment: Fragment, piece: Piece, values: Array) -> None:
    """Reports lanes whose value another lane of the same store has overwritten."""
    kept = units(piece.data, values.dtype.itemsize)[piece.offsets]
    if kept.tobytes() == values.tobytes() or piece.home is None:
        return
    lost = (kept != values).nonzero()[0]
    offset = int(piece.offsets[lost[0]])
    rounded = are_rounded_alike(kept, values)
    fragment.fault(
        "race",
        f"two lanes write different values to the same place in one instruction, at byte {offset}"
        + ("; as floats they are nearly equal: which is kept is undefined" * rounded),
        excuse="rounding" if rounded else "",
    )


def are_rounded_alike(a: Array, b: Array) -> bool:
    """Whether units are floats (of 32 bits, normal) that differ by rounding alone.

    Lanes that should hold one sum do after a fused multiply-add on one side of a butterfly.
    """
    if a.dtype.itemsize % np.float32().itemsize:
        return False
    x, y = a.view(np.float32), b.view(np.float32)
    least = np.finfo(np.float32).tiny
    with np.errstate(invalid="ignore"):
        size = np.minimum(np.abs(x), np.abs(y))
        near = np.abs(x - y) <= NEAR * size
    equal = a.view(np.uint32) == b.view(np.uint32)
    return bool((equal | (near & (size >= least) & np.isfinite(size))).all())
