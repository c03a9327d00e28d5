"""Calls of device functions and their returns: frames in local memory, saved registers.

All lanes of a fragment are in one activation of a function. A function's registers have one place
in the register file, so a call of a function that is active already, by recursion, saves them.
"""

from __future__ import annotations

import numpy as np

from fa4.emulator.machine.activation import Activation
from fa4.emulator.machine.state import Fragment, Warp
from fa4.emulator.translate.calls import CallFrame, Places, routine_at
from fa4.emulator.translate.layout import FRAME
from fa4.emulator.translate.program import Step
from fa4.emulator.warp_lanes import FULL_MASK, Array, lane_flags, lanes_of


def frame_of(fragment: Fragment) -> int:
    """Where the frame of the function begins that the lanes are in."""
    return fragment.activation.frame if fragment.activation is not None else 0


def called(fragment: Fragment, step: Step, mask: int) -> dict[int, int]:
    """The routines that lanes of a mask call -> those lanes."""
    call, warp = step.call, fragment.warp
    assert call is not None
    if call.address is None:
        return {call.routine: mask}
    found: dict[int, int] = {}
    addresses = call.address(warp)
    frames = warp.program.frames
    for lane in lanes_of(mask).tolist():
        number = routine_at(int(addresses[lane]))
        if not 0 < number < len(frames):
            raise fragment.fatal("fault", f"a call of {int(addresses[lane]):#x}, no function")
        frame = frames[number]
        given = [[size for _, size in places] for places in (call.arguments, call.results)]
        if given != [[size for _, size in places] for places in (frame.parameters, frame.results)]:
            message = f"a call of {frame.name} with arguments or results of other sizes than it has"
            raise fragment.fatal("fault", message)
        found[number] = found.get(number, 0) | 1 << lane
    return found


def enter(fragment: Fragment, step: Step, number: int) -> None:
    """The fragment's lanes call a function: arguments are passed, and its first step comes next."""
    warp, caller = fragment.warp, fragment.activation
    call, routine = step.call, warp.program.frames[number]
    assert call is not None
    own = frame_of(fragment)
    frame = own + (caller.routine if caller is not None else warp.program.frames[0]).size_bytes
    available = warp.program.variables.local_bytes
    if frame + routine.size_bytes > available:
        depth = caller.depth if caller is not None else 0
        raise fragment.fatal(
            "fault",
            f"stack overflow: the call of {routine.name} inside {depth} others needs "
            f"{frame + routine.size_bytes} bytes of local memory, a thread has {available}",
        )
    is_active = False
    activation = caller
    while activation is not None and not is_active:
        is_active = activation.routine is routine
        activation = activation.caller
    saved = warp.words.copy() if is_active else None
    _copy(fragment, call.arguments, own, routine.parameters, frame)
    fragment.activation = Activation(caller, routine, frame, step.index + 1, call.results, saved)
    _set_frame(fragment, frame)
    fragment.pc = routine.entry


def leave(fragment: Fragment) -> None:
    """The fragment's lanes return: results are passed, and the step behind the call comes next."""
    activation = fragment.activation
    assert activation is not None
    fragment.activation = activation.caller
    own = frame_of(fragment)
    _copy(fragment, activation.routine.results, activation.frame, activation.results, own)
    if activation.saved is not None:
        _restore(fragment.warp, activation.saved, activation.routine, fragment.mask)
    _set_frame(fragment, own)
    fragment.pc = activation.resume


def _restore(warp: Warp, saved: Array, routine: CallFrame, mask: int) -> None:
    for offset, bits in routine.registers:
        first = offset // 4
        if bits == 1:
            kept = int(warp.words[first]) & ~mask & FULL_MASK
            warp.words[first] = kept | (int(saved[first]) & mask)
            continue
        place = slice(first, first + bits)  # 32 lanes of bits / 32 words
        now, before = (words[place].view(np.uint8).reshape(32, -1) for words in (warp.words, saved))
        now[lane_flags[mask]] = before[lane_flags[mask]]


def _set_frame(fragment: Fragment, frame: int) -> None:
    offset, bits = fragment.warp.program.registers.offsets[FRAME]
    first = offset // (bits // 8)
    view = fragment.warp.views[bits][first : first + 32]
    np.copyto(view, np.uint64(frame), where=lane_flags[fragment.mask])


def _copy(fragment: Fragment, sources: Places, start: int, targets: Places, end: int) -> None:
    """Bytes from one frame of the fragment's lanes to another."""
    local, lanes = fragment.warp.local, lanes_of(fragment.mask)
    for (source, size), (target, _) in zip(sources, targets, strict=True):
        kept = local[lanes, start + source : start + source + size]
        local[lanes, end + target : end + target + size] = kept
