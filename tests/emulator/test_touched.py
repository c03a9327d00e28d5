"""What an instruction is said to touch, against what the shadows of its run saw it touch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fa4.emulator.checks.conflict import ASYNC_PROXY, FLAG_BITS
from fa4.emulator.checks.records import FIRST_ROW, WORD
from fa4.emulator.machine.shadows import Shadows
from fa4.emulator.tools.touched import EVERYTHING, Touched, touched
from lab.bug_zoo import BUGS, Bug
from tests.emulator.tcgen05_ring import Ring
from tests.emulator.test_wgmma import BF16
from tests.emulator.wgmma_kernels import Layouts, WgmmaKernel, product

Claim = Callable[[Any], tuple[Touched, Touched]]


class Seen:
    """The shadows of a run, and the programs whose lines they name."""

    def __init__(self) -> None:
        self.shadows: list[tuple[Any, Touched]] = []
        self.programs: list[Any] = []

    def wrong(self, claim: Claim = touched) -> set[str]:
        """Opcodes that touched what is not claimed. Of several programs lines say too little."""
        assert len({id(program) for program in self.programs}) == 1
        found = set()
        for shadow, kind in self.shadows:
            listed = int(shadow._state["listed"][0])
            for word in shadow._accesses[FIRST_ROW:listed, WORD].tolist():
                instruction = self.programs[0].instruction_at(word >> FLAG_BITS)
                by_threads, at_all = claim(instruction)
                # An mbarrier lies in shared memory; the tensor pipe's accesses are no thread's.
                kinds = kind | Touched.BARRIER if "mbarrier" in instruction.opcode else kind
                of_threads = not word & ASYNC_PROXY and not instruction.opcode.startswith(
                    "tcgen05.mma"
                )
                if not kinds & at_all or (of_threads and not kinds & by_threads):
                    found.add(instruction.opcode)
        return found

    def count(self) -> int:
        """Accesses."""
        return sum(int(shadow._state["listed"][0]) - FIRST_ROW for shadow, _ in self.shadows)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """Filled by the next run."""
    found = Seen()

    def watch(name: str, kind: Touched) -> None:
        make = getattr(Shadows, name)

        def made(self: Shadows, *args: Any) -> Any:
            shadow = make(self, *args)
            if shadow is not None:
                found.shadows.append((shadow, kind))
            return shadow

        monkeypatch.setattr(Shadows, name, made)

    def add(self: Shadows, program: Any) -> None:
        found.programs.append(program)
        added(self, program)

    added = Shadows.add_program
    monkeypatch.setattr(Shadows, "add_program", add)
    watch("of_smem", Touched.SHARED)
    watch("of_tmem", Touched.TENSOR)
    watch("of_buffer", Touched.GLOBAL)
    yield found


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_small_kernels(bug: Bug, seen: Seen) -> None:
    bug.run(bug.mended)
    assert seen.wrong() == set()


@pytest.mark.parametrize("group", [1, 2])
def test_products_of_the_tensor_pipe(group: int, seen: Seen) -> None:
    Ring(group=group).run()
    assert seen.wrong() == set()


@pytest.mark.parametrize("registers", [False, True])
def test_products_of_warpgroups(registers: bool, seen: Seen) -> None:
    layouts = Layouts()
    problem = product(BF16, 16, Layouts(a=None, b=layouts.b) if registers else layouts)
    WgmmaKernel(problem).run()
    assert seen.wrong() == set() and seen.count()
    assert seen.wrong(lambda _: (EVERYTHING, EVERYTHING)) == set()
    # Planted: it is noticed where something is said to touch nothing.
    missing = seen.wrong(lambda x: (x.opcode.startswith("st.") and (Touched.NOTHING,) * 2)
                         or touched(x))  # fmt: skip
    assert missing == {"st.shared.v4.b32", "st.global.b32"}
    assert "wgmma.mma_async" in " ".join(seen.wrong(lambda _: (Touched.NOTHING,) * 2))
