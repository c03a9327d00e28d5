"""O of earlier KV tiles in shared memory, as float32, where the tensor core's sums are too short.

Products of 8-bit types are added to 14 bits, cut off: with many keys, ever more of each is lost.
After every few KV tiles a thread adds its part of O to what it holds in shared memory, and begins
again from zero. Maxima that rise meanwhile are made good then, by the product of their factors.
O itself is written over it at the end, so that a store of the last O must have been read before.
"""

from dataclasses import replace
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4.config import WARPGROUP_ROWS
from fa4.plan.schema import PipelinePlan
from fa4.sm90.forward import fragment
from fa4.sm100.kit.ptx_block import PtxBlock, literal
from fa4.sm100.kit.signals import CTA_BARRIER, Signals, named_numbers
from fa4.sm100.kit.units import WARP, WARPGROUP

VECTOR = 4  # elements of a 16-byte access, of which a warpgroup's lie side by side
VECTOR_BYTES = 16


def meet_warpgroup(signals: Signals) -> None:
    """The warps of this warpgroup meet, at the named barriers behind the plan's."""
    number: Any = signals.number
    first = CTA_BARRIER + 1 + len(named_numbers(signals.plan))
    cute.arch.barrier(barrier_id=first + number, number_of_threads=WARPGROUP)


def held_place(memory: cute.Pointer, plan: PipelinePlan, number: Int32) -> Int32:
    """The address of this thread's first elements, of warpgroup `number`."""
    buffer = plan.buffer("o")
    rows = buffer.size // len([role for role in plan.roles if role.name.startswith("consumer")])
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    return memory.toint().to(Int32) + buffer.start + number * rows + thread * VECTOR_BYTES


@cute.jit
def clear(signals: Signals, work: Any) -> None:
    """Zeros, once the store of the last O has been read."""
    if cute.arch.thread_idx()[0] % WARPGROUP < WARP:
        signals.wait("stored#")
    meet_warpgroup(signals)
    _store_zeros(work)


def _store_zeros(work: Any) -> None:
    code = PtxBlock()
    place, zero = code.read(work.held), literal(0.0)
    for i in range(WARPGROUP_ROWS * work.products.values // WARPGROUP // VECTOR):
        code.effect(f"st.shared.v4.f32 [{place}+{_offset(i)}], {{{', '.join([zero] * VECTOR)}}};")
    code.trace(effects=True)


def promote(work: Any, number: Int32, factors: list[Float32], state: Any) -> Any:
    """The state after KV tile `number`, at every so many of which O is added to what is held."""
    lags = [lag * factor for lag, factor in zip(state.lags, factors, strict=True)]
    code = PtxBlock()
    sums, scales = code.update_all(state.sums), code.update_all(lags)
    place, left = code.read(work.held), code.read(number % work.spec.promote)
    due = code.do("setp.eq.b32", left, "0", kind="pred")
    code.effect(f"@!{due} bra.uni KEPT;")
    for i in range(0, len(sums), VECTOR):
        address = f"{place}+{_offset(i // VECTOR)}"
        parts = code.load("ld.shared.v4.f32", VECTOR, address)
        for j, part in enumerate(parts):
            one = sums[i + j]
            code.effect(f"fma.rn.f32 {part}, {part}, {scales[fragment.row_of(i + j)]}, {one};")
            code.effect(f"mov.f32 {one}, {literal(0.0)};")
        code.effect(f"st.shared.v4.f32 [{address}], {{{', '.join(parts)}}};")
    for scale in scales:
        code.effect(f"mov.f32 {scale}, {literal(1.0)};")
    code.effect("KEPT:")
    found = code.trace(*sums, *scales, effects=True)
    return replace(state, sums=found[: len(sums)], lags=found[len(sums) :])


def taken(work: Any, state: Any) -> list[Float32]:
    """O with what is held."""
    code = PtxBlock()
    sums, scales = code.read_all(state.sums), code.read_all(state.lags)
    place, results = code.read(work.held), []
    for i in range(0, len(sums), VECTOR):
        parts = code.load("ld.shared.v4.f32", VECTOR, f"{place}+{_offset(i // VECTOR)}")
        results += [
            code.do("fma.rn.f32", part, scales[fragment.row_of(i + j)], sums[i + j])
            for j, part in enumerate(parts)
        ]
    return code.trace(*results, effects=True)


def _offset(vector: int) -> int:
    return vector * WARPGROUP * VECTOR_BYTES
