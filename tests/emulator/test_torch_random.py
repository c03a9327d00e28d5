"""Generators of a pretended GPU's random numbers: what is restored is drawn again."""

from __future__ import annotations

from typing import Any, TypeAlias

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fa4 import emulator
from fa4.emulator.errors import LaunchError

torch = pytest.importorskip("torch", reason="torch is not installed")

Steps: TypeAlias = list[tuple[str, int]]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("draw"), st.integers(1, 5)),
        st.tuples(st.just("save"), st.just(0)),
        st.tuples(st.just("restore"), st.integers(0, 9)),
        st.tuples(st.just("seed"), st.sampled_from([0, 3, 2**63, 2**64 - 1])),
        st.tuples(st.just("advance"), st.integers(1, 3)),
    ),
    max_size=12,
)


class Drawn:
    """A generator, or torch.cuda's own, by which steps are done."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator
        self.states: list[Any] = []

    def draw(self, count: int) -> list[float]:
        given = {} if self.generator is None else {"generator": self.generator}
        return torch.rand(count, device="cuda", **given).tolist()

    def do(self, kind: str, number: int) -> None:
        used = self.generator or torch.cuda.default_generators[0]
        if kind == "draw":
            self.draw(number)
        elif kind == "save":
            self.states.append(used.get_state())
        elif kind == "restore" and self.states:
            used.set_state(self.states[number % len(self.states)])
        elif kind == "seed":
            used.manual_seed(number)
            assert used.initial_seed() == number
        elif kind == "advance":  # as kernels with a generator of their own do
            state = used.get_state()
            state.view(torch.int64)[1] += 4 * number
            used.set_state(state)


@given(before=STEPS, between=STEPS, own=st.booleans())
@example(before=[], between=[("seed", 3)], own=False)
def test_what_is_restored_is_drawn_again(before: Steps, between: Steps, own: bool) -> None:
    """Whatever was drawn, seeded and advanced before and between."""
    torch.manual_seed(3)
    torch.rand(2)
    with emulator.emulate(cuda=True):
        drawn = Drawn(torch.Generator(device="cuda") if own else None)
        for kind, number in before:
            drawn.do(kind, number)
        used = drawn.generator or torch.cuda.default_generators[0]
        saved = used.get_state()
        assert saved.dtype == torch.uint8 and saved.numel() == 16
        first = drawn.draw(4)
        for kind, number in between:
            drawn.do(kind, number)
        used.set_state(saved)
        assert used.get_state().tolist() == saved.tolist()
        assert drawn.draw(4) == first


@given(seed=st.integers(0, 2**64 - 1))
def test_a_seed_gives_the_same(seed: int) -> None:
    """By either way of giving it; another seed other numbers."""
    with emulator.emulate(cuda=True):
        results = []
        for give in (torch.manual_seed, torch.cuda.manual_seed, torch.cuda.manual_seed_all):
            give(seed)
            assert torch.cuda.initial_seed() == seed
            assert torch.cuda.get_rng_state().view(torch.int64)[1] == 0
            results.append(torch.randn(3, device="cuda").tolist())
        results.append(Drawn(torch.Generator("cuda:0").manual_seed(seed)).generator)
        results[-1] = torch.randn(3, device="cuda", generator=results[-1]).tolist()
        assert results.count(results[0]) == 4
        torch.cuda.manual_seed(seed ^ 1)
        assert torch.randn(3, device="cuda").tolist() != results[0]


def test_what_is_torchs_stays_so() -> None:
    """Types, the CPU's generators, forks of the state, and all of it after the end."""
    own = torch.Generator
    with emulator.emulate(cuda=True):
        gpu, cpu = torch.Generator("cuda"), torch.Generator()
        assert isinstance(gpu, torch.Generator) and isinstance(cpu, torch.Generator)
        assert isinstance(torch.default_generator, torch.Generator) and type(cpu) is own
        assert not isinstance(3, torch.Generator)
        assert str(gpu.device) == "cuda:0" and gpu.seed() == gpu.initial_seed()
        torch.manual_seed(1)
        with torch.random.fork_rng():
            inside = torch.rand(2, device="cuda").tolist()
        assert torch.rand(2, device="cuda").tolist() == inside
        first, other = Drawn(gpu), Drawn(gpu.clone_state())
        assert other.draw(3) == first.draw(3) and str(other.generator.device) == "cuda:0"
        with pytest.raises(LaunchError, match="device cuda:1: the pretended GPU"):
            torch.Generator("cuda:1")
        with pytest.raises(RuntimeError, match=r"is 16 bytes \(uint8\); got 5056 of torch.uint8"):
            gpu.set_state(cpu.get_state())
    assert torch.Generator is own and not torch.cuda.default_generators
