"""Arithmetic on a thread's part of S^T and dP^T, whose columns are queries.

Elements lie as `fa4.sm90.forward.fragment` says: both keys of the thread have the same columns. The
two numbers of each query, -LSE log2(e) and -D, are read from shared memory, two at a time.
"""

from cutlass import Float32, Int32

from fa4.sm90.forward.fragment import QUAD, RUN
from fa4.sm100.kit.ptx_block import PtxBlock

FLOAT_BYTES = 4
PAIR = 2  # neighbouring columns of a thread


def column_address(start: Int32, thread: Int32) -> Int32:
    """Where the number of the thread's first column is; `start`: of the tile's."""
    return start + thread % QUAD * (PAIR * FLOAT_BYTES)


def powers(values: list[Float32], scale: Float32, address: Int32) -> list[Float32]:
    """2^(value * scale + number of its column); address: of the first element's number."""
    code = PtxBlock()
    registers, factor = code.read_all(values), code.read(scale)
    exponents = [
        code.do("fma.rn.f32", x, factor, term)
        for x, term in zip(registers, _of_elements(code, address, len(values)), strict=True)
    ]
    results = [code.do("ex2.approx.ftz.f32", x) for x in exponents]
    return code.trace(*results, effects=True)


def sums_times(values: list[Float32], factors: list[Float32], address: Int32) -> list[Float32]:
    """(value + number of its column) * factor; address as of `powers`."""
    code = PtxBlock()
    registers, scales = code.read_all(values), code.read_all(factors)
    terms = _of_elements(code, address, len(values))
    results = [
        code.do("mul.rn.f32", code.do("add.rn.f32", x, term), scale)
        for x, term, scale in zip(registers, terms, scales, strict=True)
    ]
    return code.trace(*results, effects=True)


def _of_elements(code: PtxBlock, address: Int32, count: int) -> list[str]:
    """For each element, a register with its column's number."""
    found = _load(code, address, count)
    return [found[i // (2 * PAIR) * PAIR + i % PAIR] for i in range(count)]


def _load(code: PtxBlock, address: Int32, count: int) -> list[str]:
    """The numbers of a thread's columns, two for each run."""
    base = code.read(address)
    runs = range(count // (2 * PAIR))
    pairs = (code.load("ld.shared.v2.f32", PAIR, f"{base}+{i * RUN * FLOAT_BYTES}") for i in runs)
    return [one for pair in pairs for one in pair]
