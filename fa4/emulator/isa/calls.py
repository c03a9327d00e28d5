"""call: the two functions that the CUDA driver provides, vprintf and __assertfail.

Those of the module are the machine's: `fa4.emulator.machine.calls`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

import numpy as np

from fa4.emulator.isa.spaces import Space, units
from fa4.emulator.machine.calls import frame_of
from fa4.emulator.machine.state import Fragment, Warp
from fa4.emulator.ptx.syntax import PtxInstruction
from fa4.emulator.translate.calls import Places, calls_function, places
from fa4.emulator.translate.context import Handler, KernelContext
from fa4.emulator.translate.link import callee
from fa4.emulator.translate.table import TableRows, Unsupported

ROWS = TableRows()

LONGEST_TEXT_BYTES = 1 << 16

# printf's conversions: flags, width, precision, length, letter (C17 7.21.6.1).
_CONVERSION = re.compile(rb"%([-+ #0]*)(\d*)(\.\d*)?(hh|h|ll|l|z|j|t)?([diouxXcspfFeEgGaA%])")
_LENGTHS = {b"hh": 1, b"h": 2, b"": 4, b"ll": 8, b"l": 8, b"z": 8, b"j": 8, b"t": 8}


@ROWS.machine(
    "call",
    "9.7.12.4",
    "call{.uni} of vprintf and __assertfail, which the driver provides",
    accepts=lambda instruction: not calls_function(instruction),
)
def bind_call(instruction: PtxInstruction, context: KernelContext) -> Handler:
    """vprintf appends to the output, __assertfail ends the run with the finding "assert"."""
    arguments, results = places(instruction, context)
    name = str(callee(instruction))
    if name == "vprintf" and len(arguments) == 2:
        return _bind_print(arguments, results)
    if name == "__assertfail" and len(arguments) >= 4:
        return _bind_assertion(arguments)
    raise Unsupported(f"{len(arguments)} arguments of {name}")


def _argument(fragment: Fragment, lane: int, place: tuple[int, int]) -> int:
    """What a lane passes, in its frame."""
    start, size = frame_of(fragment) + place[0], place[1]
    return int.from_bytes(fragment.warp.local[lane, start : start + size].tobytes(), "little")


def _bind_print(arguments: Places, results: Places) -> Handler:
    def handler(fragment: Fragment, mask: int) -> None:
        warp = fragment.warp
        for lane in _bits(mask):
            at, values = (_argument(fragment, lane, place) for place in arguments)
            text, count = format_text(warp, lane, read_text(warp, lane, at), values)
            warp.cta.machine.output.append(text)
            for offset, size in results:
                start = frame_of(fragment) + offset
                bits = np.frombuffer(count.to_bytes(size, "little"), np.uint8)
                warp.local[lane, start : start + size] = bits

    return handler


def _bind_assertion(arguments: Places) -> Handler:
    def handler(fragment: Fragment, mask: int) -> None:
        warp, lane = fragment.warp, next(_bits(mask))
        passed = [_argument(fragment, lane, place) for place in arguments]
        condition, file, function = (
            read_text(warp, lane, passed[k]).decode("utf-8", "replace") for k in (0, 1, 3)
        )
        line = passed[2] & 0xFFFFFFFF
        raise fragment.fatal("assert", f"{file}:{line}: {function}: assertion `{condition}` failed")

    return handler


def _bits(mask: int) -> Iterator[int]:
    return (lane for lane in range(32) if mask >> lane & 1)


def _load(warp: Warp, lane: int, address: int, size_bytes: int) -> bytes:
    place, who = np.array([address], np.uint64), np.array([lane])
    (piece,) = Space("").pieces(warp, place, who, size_bytes, write=False)
    return bytes(units(piece.data, size_bytes)[piece.offsets].tobytes())


def read_text(warp: Warp, lane: int, address: int) -> bytes:
    """The zero-terminated string at a generic address."""
    found = bytearray()
    while len(found) < LONGEST_TEXT_BYTES:
        byte = _load(warp, lane, address + len(found), 1)
        if byte == b"\0":
            break
        found += byte
    return bytes(found)


def format_text(warp: Warp, lane: int, form: bytes, buffer: int) -> tuple[str, int]:
    """printf with the arguments at `buffer`, each at a multiple of its size (4 or 8 bytes).

    Returns the text and how many arguments it took.
    """
    position, count = buffer, 0

    def replace(match: re.Match[bytes]) -> bytes:
        nonlocal position, count
        flags, width, precision, length, letter = (part or b"" for part in match.groups())
        if letter == b"%":
            return b"%"
        size = 8 if letter in b"spfFeEgGaA" else max(_LENGTHS[length], 4)
        position = -(-position // size) * size
        raw = _load(warp, lane, position, size)
        position += size
        count += 1
        if letter == b"s":
            text = read_text(warp, lane, int.from_bytes(raw, "little"))
            return (b"%" + flags + width + precision + b"s") % text
        return _number(raw, b"%" + flags + width + precision, _LENGTHS[length], letter)

    return _CONVERSION.sub(replace, form).decode("utf-8", "replace"), count


def _number(raw: bytes, form: bytes, size_bytes: int, letter: bytes) -> bytes:
    if letter in b"fFeEgG":
        return (form + letter) % struct.unpack("<d", raw)[0]
    if letter in b"aA":
        text = struct.unpack("<d", raw)[0].hex().encode()
        return text.upper() if letter == b"A" else bytes(text)
    if letter == b"p":
        return b"0x%x" % int.from_bytes(raw, "little")
    if letter == b"c":
        return (form + b"c") % raw[0]
    value = int.from_bytes(raw[:size_bytes], "little", signed=letter in b"di")
    return (form + (b"d" if letter == b"u" else letter)) % value
