"""Moving rows between registers and tensor memory: a thread owns the lane of its row."""

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
    op = tcgen05.Ld32x32bOp(tcgen05.Repetition(step))
    for first in range(0, width, step):
        source = _columns(address + first, step)
        part = _copy(op, source).partition_S(source)
        registers = cute.make_rmem_tensor(_register_layout(part, step), Float32)
        cute.copy(cute.make_copy_atom(op, Float32), part, registers)
        flat = cute.make_tensor(registers.iterator, cute.make_layout(step))
        values += [flat[c] for c in range(step)]
    return values


def write_columns(words: cute.Tensor, address: Int32) -> None:
    """32-bit registers to as many columns of this thread's lane, by one instruction."""
    width = cute.size(words)
    op = tcgen05.St32x32bOp(tcgen05.Repetition(width))
    target = _columns(address, width)
    part = _copy(op, target).partition_D(target)
    registers = cute.make_tensor(words.iterator, _register_layout(part, width))
    cute.copy(cute.make_copy_atom(op, Float32), registers, part)


def pack_words(values: list[Float32], element: type) -> cute.Tensor:
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


def _columns(address: Int32, width: int) -> cute.Tensor:
    """128 lanes x `width` columns, from the address of this warp's first lane."""
    start = cute.make_ptr(Float32, address, cute.AddressSpace.tmem, assumed_align=16)
    return cute.make_tensor(start, cute.make_layout((WARPGROUP, width), stride=(LANE, 1)))


def _copy(op, tensor: cute.Tensor):
    """The first thread's part of a copy: the warp's lanes are in the address already."""
    return tcgen05.make_tmem_copy(cute.make_copy_atom(op, Float32), tensor).get_slice(0)


def _register_layout(part: cute.Tensor, width: int) -> cute.Layout:
    """Registers of one thread, shaped like its part of tensor memory."""
    return cute.make_layout(((width, 1), *(1 for _ in range(cute.rank(part) - 1))))
