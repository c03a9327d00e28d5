"""O of earlier KV tiles as bf16 outside of registers, where the tensor core's sums are too short.

Products of 8-bit types are added to 14 bits, cut off: with many keys, ever more of each is lost.
After every few KV tiles a thread adds its part of O to what it holds elsewhere, and begins again
from zero. Maxima that rise meanwhile are made good then, by the product of their factors.
What is rounded to nearest makes no bias; float32 would take twice the time.

It is held in shared memory, where O itself is written over it at the end, so that a store of the
last O must have been read before; or, where that has no place for O, in O's own rows, in L2.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4.kit.ptx_block import PtxBlock, literal
from fa4.kit.signals import CTA_BARRIER, Signals, named_numbers
from fa4.kit.tiles import WorkTile
from fa4.kit.units import WARP, WARPGROUP
from fa4.sm90.forward.places import HeldAccess, HeldPlaces, HeldVector, in_rows, in_shared_memory


def meet_warpgroup(signals: Signals) -> None:
    """The warps of this warpgroup meet, at the named barriers behind the plan's."""
    number: Any = signals.number
    first = CTA_BARRIER + 1 + len(named_numbers(signals.plan))
    cute.arch.barrier(barrier_id=first + number, number_of_threads=WARPGROUP)


def held_places(
    start: Int32, spec: Any, number: Int32, tile: WorkTile, tensor: cute.Tensor, rows: tuple
) -> HeldPlaces:
    """Where this thread's part of O is held, of warpgroup `number`.

    start: of shared memory. tensor: O; rows: this thread's.
    """
    if spec.stores_directly:
        return in_rows(tile, tensor, rows)
    buffer = spec.plan.buffer("o")
    num_bytes = buffer.size // spec.consumers
    return in_shared_memory(start + buffer.start + number * num_bytes, spec.pipeline.head_dim_v)


@cute.jit
def clear(signals: Signals, work: Any) -> None:
    """Zeros, once the store of the last O has been read."""
    if cutlass.const_expr(not work.spec.stores_directly):
        if cute.arch.thread_idx()[0] % WARPGROUP < WARP:
            signals.wait("stored#")
        meet_warpgroup(signals)
    _store_zeros(work.held)


def _store_zeros(held: HeldPlaces) -> None:
    code = PtxBlock()
    access = held.begin(code)
    for vector in held.vectors():
        access.store(vector, ["0"] * (len(vector.elements) // 2))
    code.trace(effects=True)


def promote(work: Any, number: Int32, factors: list[Float32], state: Any) -> Any:
    """The state after KV tile `number`, at every so many of which O is added to what is held."""
    lags = [lag * factor for lag, factor in zip(state.lags, factors, strict=True)]
    code = PtxBlock()
    sums, scales = code.update_all(state.sums), code.update_all(lags)
    access, left = work.held.begin(code), code.read(number % work.spec.promote)
    due = code.do("setp.eq.b32", left, "0", kind="pred")
    code.effect(f"@!{due} bra.uni KEPT;")
    for vector in _add(access, work.held, scales, sums):
        access.store_rounded(vector, sums)
    for one in sums:
        code.effect(f"mov.f32 {one}, {literal(0.0)};")
    for scale in scales:
        code.effect(f"mov.f32 {scale}, {literal(1.0)};")
    code.effect("KEPT:")
    found = code.trace(*sums, *scales, effects=True)
    return replace(state, sums=found[: len(sums)], lags=found[len(sums) :])


def taken(work: Any, state: Any) -> list[Float32]:
    """O with what is held."""
    code = PtxBlock()
    sums, scales = code.update_all(state.sums), code.read_all(state.lags)
    for _ in _add(work.held.begin(code), work.held, scales, sums):
        pass
    return code.trace(*sums, effects=True)


def _add(
    access: HeldAccess, held: HeldPlaces, scales: list[str], sums: list[str]
) -> Iterator[HeldVector]:
    """What is held, times its row's factor, added to O; each vector of which that is done.

    All of a row's are asked for before the first is there: S's registers are free.
    """
    vectors = held.vectors()
    at_once = len(vectors) if held.in_rows else 1
    for first in range(0, len(vectors), at_once):
        some = vectors[first : first + at_once]
        for vector, words in zip(some, [access.load(one) for one in some], strict=True):
            access.add(vector, words, scales, sums)
            yield vector
