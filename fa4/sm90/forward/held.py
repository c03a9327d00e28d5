"""O of earlier KV tiles in shared memory, as bf16, where the tensor core's sums are too short.

Products of 8-bit types are added to 14 bits, cut off: with many keys, ever more of each is lost.
After every few KV tiles a thread adds its part of O to what it holds in shared memory, and begins
again from zero. Maxima that rise meanwhile are made good then, by the product of their factors.
Float32 would take twice the time of shared memory, which products need; what is rounded to nearest
makes no bias.
O itself is written over it at the end, so that a store of the last O must have been read before.
"""

from dataclasses import replace
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from fa4.kit.ptx_block import PtxBlock, literal
from fa4.kit.signals import CTA_BARRIER, Signals, named_numbers
from fa4.kit.units import WARP, WARPGROUP
from fa4.sm90.forward import fragment

WORDS, VECTOR_BYTES = 4, 16  # of an access, of which a warpgroup's lie side by side


def meet_warpgroup(signals: Signals) -> None:
    """The warps of this warpgroup meet, at the named barriers behind the plan's."""
    number: Any = signals.number
    first = CTA_BARRIER + 1 + len(named_numbers(signals.plan))
    cute.arch.barrier(barrier_id=first + number, number_of_threads=WARPGROUP)


def held_place(memory: cute.Pointer, spec: Any, number: Int32) -> Int32 | None:
    """The address of this thread's first elements, of warpgroup `number`; None if O is not held."""
    if not spec.promote:
        return None
    plan = spec.plan
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
    place, zeros = code.read(work.held), ", ".join(["0"] * WORDS)
    for i in range(0, work.products.values // 2, 2 * WORDS):
        code.effect(f"st.shared.v4.b32 [{place}+{_offset(i)}], {{{zeros}}};")
    code.trace(effects=True)


def promote(work: Any, number: Int32, factors: list[Float32], state: Any) -> Any:
    """The state after KV tile `number`, at every so many of which O is added to what is held."""
    lags = [lag * factor for lag, factor in zip(state.lags, factors, strict=True)]
    code = PtxBlock()
    sums, scales = code.update_all(state.sums), code.update_all(lags)
    place, left = code.read(work.held), code.read(number % work.spec.promote)
    due = code.do("setp.eq.b32", left, "0", kind="pred")
    code.effect(f"@!{due} bra.uni KEPT;")
    for i in range(0, len(sums), 2 * WORDS):
        parts = _added(code, place, scales, sums, i)
        words = [
            code.do("cvt.rn.bf16x2.f32", high, low, kind="b32")
            for low, high in zip(parts[::2], parts[1::2], strict=True)
        ]
        code.effect(f"st.shared.v4.b32 [{place}+{_offset(i)}], {{{', '.join(words)}}};")
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
    sums, scales = code.read_all(state.sums), code.read_all(state.lags)
    place = code.read(work.held)
    vectors = (_added(code, place, scales, sums, i) for i in range(0, len(sums), 2 * WORDS))
    return code.trace(*(one for vector in vectors for one in vector), effects=True)


def _added(code: PtxBlock, place: str, scales: list[str], sums: list[str], first: int) -> list[str]:
    """The elements of a vector from `first` on: what is held, times its row's factor, and O's."""
    words = [code.register("b32") for _ in range(WORDS)]
    code.effect(f"ld.shared.v4.b32 {{{', '.join(words)}}}, [{place}+{_offset(first)}];")
    held = []
    for word in words:
        halves = (
            code.do("shl.b32", word, "16", kind="b32"),
            code.do("and.b32", word, "0xffff0000", kind="b32"),
        )
        held += [code.do("mov.b32", half) for half in halves]
    return [
        code.do("fma.rn.f32", one, scales[fragment.row_of(i)], sums[i])
        for i, one in enumerate(held, first)
    ]


def _offset(element: int) -> int:
    """Bytes from a thread's first vector to that with an element."""
    return element // (2 * WORDS) * WARPGROUP * VECTOR_BYTES
