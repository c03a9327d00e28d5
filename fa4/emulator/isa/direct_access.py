"""Plans for `fa4.emulator.machine.direct`: what a load or store moves between which places."""

from __future__ import annotations

from typing import Any

import numpy as np

from fa4.emulator.isa.spaces import SHARED
from fa4.emulator.machine.direct import DONE, transfer
from fa4.emulator.machine.state import Fragment
from fa4.emulator.machine.state_addresses import (
    ANY_SPACE,
    FIXED,
    GLOBAL_SPACE,
    MOST_WORDS,
    NOWHERE,
    PLAN,
    REGISTER_32,
    REGISTER_64,
    SHARED_SPACE,
    WITH_RANK,
)
from fa4.emulator.ptx.syntax import (
    Address,
    FloatBits,
    Integer,
    Operand,
    PtxInstruction,
    Register,
    Sink,
    Symbol,
)
from fa4.emulator.translate.context import Handler, KernelContext
from fa4.emulator.translate.lanes import width_of
from fa4.emulator.warp_lanes import Array

_SPACES = dict.fromkeys(SHARED, SHARED_SPACE) | {"global": GLOBAL_SPACE, "generic": ANY_SPACE}
_BASES = {32: REGISTER_32, 64: REGISTER_64}


def load_directly(
    instruction: PtxInstruction, context: KernelContext, kind: str, access: int, general: Handler
) -> Handler:
    """A handler of a weak load of type `kind` that leaves to `general` what is unusual.

    access: the word of its `Access`.
    """
    data, address = instruction.operands[:2]  # a cache policy may follow
    plan = _plan(instruction, context, address, data, kind)
    if plan is None:
        return general
    plan["access"] = access
    at, move = int(plan.ctypes.data), transfer()

    def handler(fragment: Fragment, mask: int, _kept: Array = plan) -> Any:
        warp = fragment.warp
        clock = warp.clock
        if move(warp.described_at, at, mask, clock.epoch, clock.knowledge.known_from) == DONE:
            return None
        return general(fragment, mask)

    return handler


def store_directly(
    instruction: PtxInstruction, context: KernelContext, kind: str, access: int, general: Handler
) -> Handler:
    """The same for a weak store."""
    address, data = instruction.operands[:2]
    plan = _plan(instruction, context, address, data, kind)
    if plan is None:
        return general
    plan["access"], plan["is_write"] = access, 1
    at, move = int(plan.ctypes.data), transfer()

    def handler(fragment: Fragment, mask: int, _kept: Array = plan) -> Any:
        warp = fragment.warp
        clock = warp.clock
        if move(warp.described_at, at, mask, clock.epoch, clock.knowledge.known_from) != DONE:
            return general(fragment, mask)
        warp.cta.machine.progress += 1
        return None

    return handler


def _plan(
    instruction: PtxInstruction, context: KernelContext, address: Operand, data: Operand, kind: str
) -> Array | None:
    """A PLAN, an array of one; None for what the general handlers must do always."""
    spaces = [_SPACES[part] for part in instruction.parts if part in _SPACES]
    others = {"const", "local", "param", "param::entry", "param::func"}
    start = _start(context, address)
    words = _words(context, data, kind)
    if others & set(instruction.parts) or start is None or words is None:
        return None
    plan = np.zeros(1, PLAN)
    plan["space"] = spaces[0] if spaces else ANY_SPACE
    plan["base"], plan["register"], plan["fixed"] = start
    plan["size_bytes"] = width_of(kind) // 8 * len(context.elements(data))
    plan["words"], plan["word_bytes"] = len(words), min(width_of(kind) // 8, 8)
    plan["signed"] = kind.startswith("s")
    for k, word in enumerate(words):
        for name, value in zip(("places", "strides", "widths", "constants"), word, strict=True):
            plan[name][0, k] = value
    return plan


def _start(context: KernelContext, operand: Operand) -> tuple[int, int, int] | None:
    """(base, register, fixed) of an address: see KernelContext.address."""
    if not isinstance(operand, Address):
        return None
    base, offset = operand.base, operand.offset
    if isinstance(base, Integer):
        return FIXED, 0, _signed(base.value + offset)
    if isinstance(base, Symbol):
        value = context.variables.addresses.get(base.name)
        if value is None:
            return None
        shared = base.name in context.variables.shared
        return WITH_RANK if shared else FIXED, 0, _signed(value + base.offset + offset)
    place, bits = context.locate(base.name)
    return (_BASES[bits], place, offset) if bits in _BASES else None


def _words(
    context: KernelContext, data: Operand, kind: str
) -> list[tuple[int, int, int, int]] | None:
    """(place, stride, width, constant) of each word: see PLAN."""
    bits = width_of(kind)
    words = []
    for element in context.elements(data):
        if isinstance(element, Register):
            place, own_bits = context.locate(element.name)
            width = min(own_bits, 64) // 8
            if own_bits == 1 or (own_bits == 128) != (bits == 128):
                return None
            words += [(place + 8 * k, own_bits // 8, width, 0) for k in range(-(-own_bits // 64))]
        elif isinstance(element, Sink):
            words += [(NOWHERE, 0, 0, 0)] * -(-bits // 64)
        elif isinstance(element, Integer) and bits <= 64:
            words.append((NOWHERE, 0, 0, _signed(element.value)))
        elif isinstance(element, FloatBits) and element.width == bits:
            words.append((NOWHERE, 0, 0, _signed(element.bits)))
        else:
            return None
    return words if len(words) <= MOST_WORDS else None


def _signed(value: int) -> int:
    """The low 64 bits of an integer, as a signed one."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
