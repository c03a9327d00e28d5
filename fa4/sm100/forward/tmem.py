"""Moving rows between registers and tensor memory: a thread owns the lane of its row."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import tcgen05

from fa4.sm100.forward.context import WARP, WARPGROUP

LANE = 1 << 16  # addresses from one lane of tensor memory to the next (PTX ISA 9.7.16.1)


def warp_lanes() -> Int32:
    """Address of this warp's 32 lanes: warp w of a warpgroup may access lanes 32 w and up.

    The same in all threads of the warp, so that addresses stay in uniform registers.
    """
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    return (warp % (WARPGROUP // WARP)) * (WARP * LANE)


def read_columns(address: Int32, width: int, step: int) -> list[Float32]:
    """`width` columns of this thread's lane, `step` of them per instruction."""
    values: list[Float32] = []
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(step)), Float32)
    for first in range(0, width, step):
        registers = cute.make_rmem_tensor(_registers(step), Float32)
        cute.copy(atom, _lanes(address + first, step), registers)
        flat = cute.make_tensor(registers.iterator, cute.make_layout(step))
        values += [flat[c] for c in range(step)]
    return values


def write_columns(words: cute.Tensor, address: Int32) -> None:
    """32-bit registers to as many columns of this thread's lane, by one instruction."""
    width = cute.size(words)
    atom = cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(width)), Float32)
    cute.copy(atom, cute.make_tensor(words.iterator, _registers(width)), _lanes(address, width))


def pack_words(values: list[Float32], element: Any) -> cute.Tensor:
    """Values as 32-bit registers: rounded to a 16-bit type, two to a register; or float32."""
    exact = cute.make_rmem_tensor(cute.make_layout(len(values)), Float32)
    for c, value in enumerate(values):
        exact[c] = value
    if element is Float32:
        return exact
    rounded = cute.make_rmem_tensor(cute.make_layout(len(values)), element)
    rounded.store(exact.load().to(element))
    words = cute.recast_ptr(rounded.iterator, dtype=Float32)
    return cute.make_tensor(words, cute.make_layout(len(values) * element.width // 32))


def _lanes(address: Int32, width: int) -> cute.Tensor:
    """`width` columns of the 32 lanes of a warp, as the copy of one warp wants them."""
    start = cute.make_ptr(Float32, address, cute.AddressSpace.tmem, assumed_align=16)
    shape, stride = (((width, WARP), 1), 1, 1), (((1, LANE), 0), 0, 0)
    return cute.make_tensor(start, cute.make_layout(shape, stride=stride))


def _registers(width: int) -> cute.Layout:
    """One thread's part of such a copy."""
    return cute.make_layout(((width, 1), 1, 1))
