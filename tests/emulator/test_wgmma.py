"""wgmma.mma_async: whatever the shape, the types and the layouts, it is NumPy's product."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.tcgen05.formats import Format
from tests.emulator.wgmma_kernels import SWIZZLES, Layouts, Types, WgmmaKernel, multiply, product

F32, F16 = Format.F32, Format.F16
FP8 = (Format.E4M3, Format.E5M2)
BYTES = (Format.S8, Format.U8)
TYPES = [
    Types(F32, Format.BF16, Format.BF16),
    Types(F32, F16, F16),
    Types(F16, F16, F16),
    Types(F32, Format.TF32, Format.TF32),
    *(Types(d, a, b) for d in (F32, F16) for a in FP8 for b in FP8),
    *(Types(Format.S32, a, b) for a in BYTES for b in BYTES),
]
BF16 = TYPES[0]


def name(types: Types) -> str:
    """For the names of tests."""
    return f"{types.d}.{types.a}.{types.b}"


def sizes(types: Types) -> st.SearchStrategy[int]:
    """The values of N that the types have."""
    every = range(8, 257, 8)
    return st.sampled_from(
        [n for n in every if types.d is not Format.S32 or n <= 32 or n % 16 == 0]
    )


@st.composite
def layouts(draw: Any, types: Types) -> Layouts:
    """Of A and B; only 16-bit types may be M- or N-major."""
    transposes = st.booleans() if types.a.container_bytes == 2 else st.just(False)
    place = st.tuples(st.sampled_from(SWIZZLES), transposes)
    return Layouts(draw(st.none() | place), draw(place))


@pytest.mark.parametrize("types", TYPES, ids=name)
@settings(max_examples=12)
@given(data=st.data(), schedule=st.sampled_from(["fifo", "random", "adversarial"]))
def test_it_is_the_product(types: Types, data: Any, schedule: str) -> None:
    """Any N, swizzle, transpose, source of A and signs; one or two products on one accumulator."""
    n = data.draw(sizes(types), "n")
    problem = product(types, n, data.draw(layouts(types)), data.draw(st.integers(0, 999), "seed"))
    sign = st.sampled_from([1, -1]) if types.d is not Format.S32 else st.just(1)
    scales = data.draw(sign, "scale-a"), data.draw(sign, "scale-b")
    count = data.draw(st.integers(1, 2), "products")
    work = "".join(multiply(problem, k, scales) for k in range(count))
    found, report = WgmmaKernel(problem, work=work).run(schedule=schedule)
    assert report.ok, str(report)
    expected = scales[0] * scales[1] * count * (problem.a @ problem.b.T)
    np.testing.assert_array_equal(found, expected)


ACCUMULATORS = 3
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("multiply"), st.integers(0, ACCUMULATORS - 1), st.booleans()),
        st.tuples(st.just("commit")),
        st.tuples(st.just("wait"), st.integers(0, 3)),
    ),
    min_size=1,
    max_size=14,
)


@pytest.mark.parametrize("schedule", ["random", "adversarial"])
@settings(max_examples=30)
@given(steps=STEPS, seed=st.integers(0, 99))
def test_groups_in_flight(schedule: str, steps: list[tuple[Any, ...]], seed: int) -> None:
    """Chains on several accumulators, in any groups with any waits, end as if done one by one."""
    n = 8
    problem = product(BF16, n, seed=seed)
    each = BF16.d_registers(n)
    exact = problem.a @ problem.b.T
    sums = [np.zeros_like(exact)] * ACCUMULATORS
    work = "".join(f"  mov.b32 %v{k}, 0;\n" for k in range(ACCUMULATORS * each))
    work += "  wgmma.fence.sync.aligned;\n"
    for step in steps:
        if step[0] == "multiply":
            _, target, accumulate = step
            work += multiply(problem, int(accumulate), first=target * each)
            sums[target] = exact + (sums[target] if accumulate else 0)
        elif step[0] == "commit":
            work += "  wgmma.commit_group.sync.aligned;\n"
        else:
            work += f"  wgmma.wait_group.sync.aligned {step[1]};\n"
    kernel = WgmmaKernel(problem, work=work, registers_stored=ACCUMULATORS * each)
    found, report = kernel.run(schedule=schedule, seed=seed)
    assert report.ok, str(report)
    np.testing.assert_array_equal(found, np.concatenate(sums, axis=1))
