"""A thread's float32 to the same thread of the other warpgroup, through shared memory.

In the order in which both hold them, 16 bytes at a time: those of the lanes lie side by side.
"""

from cutlass import Float32, Int32

from fa4.kit.ptx_block import PtxBlock
from fa4.kit.units import WARPGROUP

VECTOR, VECTOR_BYTES = 4, 16
STEP_BYTES = WARPGROUP * VECTOR_BYTES


def thread_address(start: Int32, thread: Int32) -> Int32:
    """Where a thread's first vector is; start: of the place."""
    return start + thread * VECTOR_BYTES


def hand_over(values: list[Float32], address: Int32) -> None:
    """Store a thread's values."""
    code = PtxBlock()
    base, words = code.read(address), code.read_all(values)
    for number in range(0, len(words), VECTOR):
        some = ", ".join(words[number : number + VECTOR])
        code.effect(f"st.shared.v4.f32 [{base}+{number // VECTOR * STEP_BYTES}], {{{some}}};")
    code.trace(effects=True)


def take_over(first: int, count: int, address: Int32) -> list[Float32]:
    """Load `count` of a thread's values, from one on."""
    code = PtxBlock()
    base = code.read(address)
    vectors = (
        code.load("ld.shared.v4.f32", VECTOR, f"{base}+{number * STEP_BYTES}")
        for number in range(first // VECTOR, (first + count) // VECTOR)
    )
    return code.trace(*(one for vector in vectors for one in vector), effects=True)
