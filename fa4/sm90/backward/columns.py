"""Arithmetic on a thread's part of S^T and dP^T, whose columns are queries.

Elements lie as `fa4.sm90.forward.fragment` says: both keys of the thread have the same columns. The
two numbers of each query, -LSE log2(e) and -D, are read from shared memory, two at a time.
"""

from cutlass import Float32, Int32

from fa4.kit.ptx_block import PtxBlock
from fa4.sm90.forward.fragment import QUAD, RUN

FLOAT_BYTES = 4
PAIR = 2  # neighbouring columns of a thread


def column_address(start: Int32, thread: Int32) -> Int32:
    """Where the number of the thread's first column is; `start`: of the tile's."""
    return start + thread % QUAD * (PAIR * FLOAT_BYTES)


def numbers(address: Int32, count: int) -> list[Float32]:
    """The numbers of a thread's columns, `count` of them; address: of the first one's."""
    code = PtxBlock()
    return code.trace(*_load(code, address, count), effects=True)


def powers(values: list[Float32], scale: Float32, terms: list[Float32] | Int32) -> list[Float32]:
    """2^(value * scale + number of its column); terms: as of `numbers`, or their address."""
    code = PtxBlock()
    registers, factor = code.read_all(values), code.read(scale)
    read = isinstance(terms, list)
    numbers = code.read_all(terms) if read else _load(code, terms, len(values) // 2)
    found = _of_elements(numbers, len(values))
    exponents = [
        code.do("fma.rn.f32", x, factor, term) for x, term in zip(registers, found, strict=True)
    ]
    results = [code.do("ex2.approx.ftz.f32", x) for x in exponents]
    return code.trace(*results, effects=True)


def sums_times(values: list[Float32], factors: list[Float32], address: Int32) -> list[Float32]:
    """(value + number of its column) * factor; address: of the first element's number."""
    code = PtxBlock()
    registers, scales = code.read_all(values), code.read_all(factors)
    terms = _of_elements(_load(code, address, len(values) // 2), len(values))
    results = [
        code.do("mul.rn.f32", code.do("add.rn.f32", x, term), scale)
        for x, term, scale in zip(registers, terms, scales, strict=True)
    ]
    return code.trace(*results, effects=True)


def _of_elements(found: list[str], count: int) -> list[str]:
    """For each element, the register with its column's number."""
    return [found[i // (2 * PAIR) * PAIR + i % PAIR] for i in range(count)]


def _load(code: PtxBlock, address: Int32, count: int) -> list[str]:
    """The numbers of a thread's columns, two for each run."""
    base = code.read(address)
    runs = range(count // PAIR)
    pairs = (code.load("ld.shared.v2.f32", PAIR, f"{base}+{i * RUN * FLOAT_BYTES}") for i in runs)
    return [one for pair in pairs for one in pair]
