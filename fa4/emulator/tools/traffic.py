"""Counts the bytes that a run moves through the shared memory of each CTA, and by what.

    traffic = SharedTraffic()
    run([launch], memory, Options(events=traffic))
    print(traffic.of(0))  # CTA 0: {"products": 1048576, "loads": 98304, ...}

Counted is what is read or written, once for each time: operands of matrix instructions, both sides
of copies, stores of the CTA itself and of its peers. What lanes of a warp load from one address
counts once: they get it in one go. Barriers are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from fa4.emulator.machine.events import RunEvents
from fa4.emulator.ptx.syntax import Address, PtxInstruction, Register
from fa4.emulator.translate.program import Step
from fa4.emulator.warp_lanes import Array, lanes_of

# What moves the bytes, by prefix of the PTX opcode; the longest one counts.
KINDS: Mapping[str, str] = {
    "tcgen05.mma": "products",
    "wgmma.mma_async": "products",
    "tcgen05.cp": "copies to tensor memory",
    "cp.async.bulk": "copies",
    "cp.reduce.async.bulk": "bulk reductions",
    "st.async": "stores from a peer",
    "red.async": "stores from a peer",
    "ld.shared": "loads",
    "st.shared": "stores",
}
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}


class SharedTraffic(RunEvents):
    """A recorder (`Options.events`) of bytes by CTA, by warp and by what moves them.

    by_warp: (index of the CTA, warp, kind) -> bytes; warp None for asynchronous operations.
    by_issuer: (index of the issuing CTA, kind) -> bytes of asynchronous operations.
    """

    def __init__(self) -> None:
        self.by_warp: Counter[tuple[int, int | None, str]] = Counter()
        self.by_issuer: Counter[tuple[int, str]] = Counter()
        self._kinds: dict[tuple[int, int], str] = {}

    def of(self, cta: int) -> dict[str, int]:
        """Bytes of one CTA's shared memory by what moved them."""
        found: Counter[str] = Counter()
        for (index, _, kind), num_bytes in self.by_warp.items():
            if index == cta:
                found[kind] += num_bytes
        return dict(found)

    def of_warps(self, cta: int, warps: range, kind: str) -> int:
        """Bytes that some warps of a CTA have moved themselves."""
        return sum(self.by_warp[cta, warp, kind] for warp in warps)

    # Called by the machine.

    def moved(self, issuer: Any, owner: Any, line: int, num_bytes: int) -> None:
        """An asynchronous operation reads or writes shared memory."""
        kind = self._kind_at(issuer, line)
        self.by_warp[owner.index, None, kind] += num_bytes
        self.by_issuer[issuer.index, kind] += num_bytes

    def executed(self, fragment: Any, step: Step, outcome: Any, tick: int) -> None:
        """Loads and stores of threads."""
        instruction, warp = step.instruction, fragment.warp
        if outcome is not None or not instruction.opcode.startswith(("ld.shared", "st.shared")):
            return
        mask = fragment.mask
        if step.guard is not None:
            word, flip = step.guard
            mask &= int(warp.words[word]) ^ flip
        places = _addresses(instruction, warp)[lanes_of(mask)]
        num_bytes = len(np.unique(places)) * _size_bytes(instruction)
        self.by_warp[warp.cta.index, warp.index, kind_of(instruction.opcode)] += num_bytes

    def _kind_at(self, cta: Any, line: int) -> str:
        program = cta.grid.program
        if (id(program), line) not in self._kinds:
            for step in program.steps:
                for one in step.instructions:
                    self._kinds[id(program), one.line] = kind_of(one.opcode)
        return self._kinds[id(program), line]


def kind_of(opcode: str) -> str:
    """What an instruction is counted as; its opcode where `KINDS` does not name it."""
    known = [prefix for prefix in KINDS if opcode.startswith(prefix)]
    return KINDS[max(known, key=len)] if known else opcode


def _addresses(instruction: PtxInstruction, warp: Any) -> Array:
    """The address of each lane (32,), int64."""
    loads = instruction.opcode.startswith("ld")
    operand = instruction.operands[1 if loads else 0]
    assert isinstance(operand, Address)
    if not isinstance(operand.base, Register):
        return np.zeros(32, np.int64)  # a constant: all lanes have the same one
    offset, bits = warp.program.registers.offsets[operand.base.name]
    first = offset * 8 // bits
    values: Array = warp.views[bits][first : first + 32]
    return values.astype(np.int64) + operand.offset


def _size_bytes(instruction: PtxInstruction) -> int:
    """Of one lane."""
    parts = instruction.opcode.split(".")
    count = next((_VECTORS[part] for part in parts if part in _VECTORS), 1)
    return count * int("".join(filter(str.isdigit, parts[-1]))) // 8
