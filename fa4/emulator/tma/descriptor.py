"""The tensor map (CUtensorMap, tiled mode): 128 bytes in memory <-> `TensorMap`.

NVIDIA does not document the encoding. It was read off from maps that the driver and CuTe-DSL
encode, one parameter changed at a time, and checked against the driver on random maps; the rules
for the values are those of `cuTensorMapEncodeTiled` in the CUDA driver API documentation.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from fa4.emulator.errors import EmulatorError
from fa4.emulator.tma.swizzle import PATTERNS

MAP_BYTES = 128
MAX_RANK = 5

# In the order of the encoding. tf32 is f32 with a flag of its own.
ELEMENTS = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f32_ftz", "f64", "bf16")
ELEMENT_BYTES = dict(zip(ELEMENTS, (1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2), strict=True)) | {
    "tf32": 4,
    "tf32_ftz": 4,
}
TF32_CODES = {"tf32": ELEMENTS.index("f32"), "tf32_ftz": ELEMENTS.index("f32_ftz")}
FLOATS = frozenset(ELEMENT_BYTES) - {"u8", "u16", "u32", "s32", "u64", "s64"}

# Types below a byte, 16 elements together (PTX ISA 5.5.1): bits of one in global and in shared
# memory, where those of the last two lie in units of 16 bytes, padding last. The codes were read
# off maps that CuTe-DSL 4.8.1 and Triton 3.9 make for sm_100a.
SUB_BYTE = {"b4x16": (4, 4), "b4x16_p64": (4, 8), "b6x16_p32": (6, 8)}
SUB_BYTE_CODES = {"b4x16": 11, "b4x16_p64": 12, "b6x16_p32": 13}
PADDED_BOX = 128  # elements of dimension 0, and what its coordinate is a multiple of

SPANS = (0, 32, 64, 128)
INTERLEAVES = (0, 16, 32)
ATOMS = (16, 32, None, 64)  # None: 32 bytes with the 8-byte halves flipped on alternate lines

# Word 1, bits that move no byte: sm_100 format (1), L2 promotion (17-18), a CuTe-DSL flag (21).
HINTS_MASK = 0x00260002
IM2COL_BIT = 1
# Bits that are 0 in every tiled map; anything there is not a map.
RESERVED = {1: 0xFFC0000C, 3: 0xFFFF << 48, 6: 0x1FF << 47, 7: 0xFFFFFFFF << 32}


class TmaError(EmulatorError):
    """An operand that the TMA unit does not accept: says the field, its value, what is allowed."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field, self.value, self.allowed = field, value, allowed
        super().__init__(f"TMA: {field} is {value}, allowed: {allowed}")


class TensorMapError(TmaError):
    """A tensor map that makes no sense, or whose mode the emulator does not execute."""


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory and the box that one copy moves. Dimension 0 is the innermost.

    address: of element (0, ..., 0), bytes. element: a key of ELEMENT_BYTES. dims: elements.
    strides_bytes: of dimensions 1 to rank - 1 (dimension 0 is contiguous). box: elements that one
    copy spans; element_strides: only every n-th of them is moved (ignored in dimension 0 without
    interleave, as the driver and the hardware do). swizzle: span in bytes (0: none);
    swizzle_atom_bytes: what the swizzle keeps together. interleave: slice in bytes (0: none).
    fill_nan: out-of-bounds elements load as NaN instead of zero. hints: bits of word 1 that change
    no data, kept so that encode gives back what decode read (2: as CuTe-DSL encodes for sm_100a).

    Every TensorMap obeys the rules of cuTensorMapEncodeTiled: the constructor raises
    TensorMapError otherwise.
    """

    address: int
    element: str
    dims: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: int = 0
    interleave: int = 0
    fill_nan: bool = False
    swizzle_atom_bytes: int = 16
    hints: int = 2

    def __post_init__(self) -> None:
        _check_tensor(self)
        _check_modes(self)
        _check_box(self)

    @property
    def rank(self) -> int:
        """Number of dimensions, 1 to 5."""
        return len(self.dims)

    @property
    def element_bytes(self) -> int:
        """Size of one element: 1, 2, 4 or 8; 1 below a byte."""
        return ELEMENT_BYTES.get(self.element, 1)

    @property
    def is_sub_byte(self) -> bool:
        """Whether elements are smaller than a byte."""
        return self.element in SUB_BYTE

    @property
    def inner_bytes(self) -> int:
        """Bytes of a row of the box (dimension 0) in shared memory."""
        shared_bits = SUB_BYTE[self.element][1] if self.is_sub_byte else 8 * self.element_bytes
        return self.counts[0] * shared_bits // 8

    def of_bytes(self, bits: int, swizzle: int) -> TensorMap:
        """The same box with `bits` for an element, as a map of bytes."""
        sizes = ((values[0] * bits // 8, *values[1:]) for values in (self.dims, self.box))
        dims, box = sizes
        return replace(self, element="u8", dims=dims, box=box, swizzle=swizzle)

    @property
    def steps(self) -> tuple[int, ...]:
        """Elements from one moved element to the next, along each dimension."""
        return self.element_strides if self.interleave else (1, *self.element_strides[1:])

    @property
    def counts(self) -> tuple[int, ...]:
        """Elements that one copy moves along each dimension: ceil(box / step)."""
        return tuple(-(-b // s) for b, s in zip(self.box, self.steps, strict=True))

    @property
    def box_bytes(self) -> int:
        """Bytes that one copy moves, out-of-bounds elements included: what complete_tx counts."""
        return prod(self.counts[1:]) * self.inner_bytes

    @property
    def row_pitch_bytes(self) -> int:
        """From one row of the box (dimension 0) to the next in shared memory, before swizzling.

        Rows narrower than the swizzle span leave the rest of it untouched (measured on an H200).
        """
        return self.swizzle or self.inner_bytes

    @staticmethod
    def decode(raw: bytes) -> TensorMap:
        """The map in `raw` (128 bytes; the first 64 carry it). Raises TensorMapError."""
        return _decode(bytes(raw))

    def encode(self) -> bytes:
        """The 128 bytes that `decode` reads back as this map."""
        return _encode(self)


def _require(condition: bool, field: str, value: object, allowed: str) -> None:
    if not condition:
        raise TensorMapError(field, value, allowed)


def _check_tensor(m: TensorMap) -> None:
    _require(1 <= m.rank <= MAX_RANK, "rank", m.rank, "1 to 5")
    names = (*ELEMENT_BYTES, *SUB_BYTE)
    _require(m.element in names, "element", m.element, ", ".join(names))
    _require(not m.is_sub_byte or m.dims[0] % 2 == 0, "dims", m.dims, "even below a byte")
    unit = 32 if m.interleave == 32 else 16
    _require(
        m.address % unit == 0 and 0 <= m.address < 1 << 57,
        "address",
        hex(m.address),
        f"a multiple of {unit} below 2^57",
    )
    _require(all(1 <= d <= 1 << 32 for d in m.dims), "dims", m.dims, "1 to 2^32 each")
    _require(
        len(m.strides_bytes) == m.rank - 1, "strides_bytes", m.strides_bytes, f"{m.rank - 1} values"
    )
    _require(
        all(s % unit == 0 and 0 <= s < 1 << 40 for s in m.strides_bytes),
        "strides_bytes",
        m.strides_bytes,
        f"multiples of {unit} below 2^40",
    )


def _check_box(m: TensorMap) -> None:
    _require(len(m.box) == m.rank, "box", m.box, f"{m.rank} values")
    _require(all(1 <= b <= 256 for b in m.box), "box", m.box, "1 to 256 each")
    _require(
        len(m.element_strides) == m.rank, "element_strides", m.element_strides, f"{m.rank} values"
    )
    _require(
        all(1 <= s <= 8 for s in m.element_strides),
        "element_strides",
        m.element_strides,
        "1 to 8 each",
    )
    inner_bytes = m.inner_bytes if m.is_sub_byte else m.box[0] * m.element_bytes
    padded = m.is_sub_byte and m.element != "b4x16"
    _require(not padded or m.box[0] == PADDED_BOX, "box", m.box, f"{PADDED_BOX} in dimension 0")
    _require(inner_bytes % 16 == 0, "box inner bytes", inner_bytes, "a multiple of 16")
    _require(
        inner_bytes <= m.swizzle or not m.swizzle or bool(m.interleave),
        "box inner bytes",
        inner_bytes,
        f"at most the swizzle span, {m.swizzle}",
    )


def _check_modes(m: TensorMap) -> None:
    _require(not (m.is_sub_byte and m.interleave), "interleave", m.interleave, "0 below a byte")
    _require(m.swizzle in SPANS, "swizzle", m.swizzle, "0, 32, 64 or 128 bytes")
    _require(
        (m.swizzle, m.swizzle_atom_bytes) in PATTERNS,
        "swizzle_atom_bytes",
        m.swizzle_atom_bytes,
        "16, or 32 and 64 with the 128-byte swizzle (the 8-byte flip is not supported)",
    )
    _require(m.interleave in INTERLEAVES, "interleave", m.interleave, "0, 16 or 32 bytes")
    _require(m.interleave == 0 or m.rank >= 3, "rank", m.rank, "3 to 5 with interleave")
    _require(
        m.interleave != 32 or m.swizzle == 32,
        "swizzle",
        m.swizzle,
        "32 with the 32-byte interleave",
    )
    _require(
        not m.fill_nan or m.element in FLOATS, "element", m.element, "floating point with NaN fill"
    )
    _require(m.hints & ~HINTS_MASK == 0, "hints", hex(m.hints), f"bits of {HINTS_MASK:#x}")


def _bits(word: int, low: int, count: int) -> int:
    return (word >> low) & ((1 << count) - 1)


def _element(word: int) -> str:
    code = _bits(word, 7, 4)
    small = {code: name for name, code in SUB_BYTE_CODES.items()}
    last = len(ELEMENTS) - 1
    _require(code <= last or code in small, "element type code", code, f"0 to {max(small)}")
    if code in small:
        return small[code]
    if not _bits(word, 16, 1):
        return ELEMENTS[code]
    names = {code: name for name, code in TF32_CODES.items()}
    _require(code in names, "element type code", code, "f32 or f32_ftz with the tf32 flag")
    return names[code]


@lru_cache(maxsize=256)
def _decode(raw: bytes) -> TensorMap:
    _require(len(raw) == MAP_BYTES, "size", len(raw), "128 bytes")
    word = struct.unpack_from("<8Q", raw)
    _require(not word[1] & IM2COL_BIT, "mode", "im2col", "tiled, as the instruction is")
    for index, mask in RESERVED.items():
        _require(word[index] & mask == 0, f"word {index}", hex(word[index]), f"0 in {mask:#x}")
    rank = _bits(word[1], 4, 3) + 1
    _require(rank <= MAX_RANK, "rank", rank, "1 to 5")
    interleave = _bits(word[1], 11, 2)
    _require(interleave < len(INTERLEAVES), "interleave code", interleave, "0, 1 or 2")
    span, atom = SPANS[_bits(word[1], 13, 2)], ATOMS[_bits(word[1], 19, 2)]
    strides = (word[1] >> 32, *struct.unpack_from("<3I", raw, 16))
    sizes = struct.unpack_from("<5I", raw, 32)
    return TensorMap(
        address=word[0],
        element=_element(word[1]),
        dims=tuple(sizes[d] + 1 for d in range(rank)),
        strides_bytes=tuple(
            (strides[d] | _bits(word[3], 32 + 4 * d, 4) << 32) * 16 for d in range(rank - 1)
        ),
        box=tuple(raw[55 + d] + 1 for d in range(rank)),
        element_strides=tuple(_bits(word[6], 32 + 3 * d, 3) + 1 for d in range(rank)),
        swizzle=span,
        interleave=INTERLEAVES[interleave],
        fill_nan=bool(_bits(word[1], 15, 1)),
        swizzle_atom_bytes=-1 if atom is None else atom,
        hints=word[1] & HINTS_MASK,
    )


def _encode(m: TensorMap) -> bytes:
    special = TF32_CODES | SUB_BYTE_CODES
    code = special[m.element] if m.element in special else ELEMENTS.index(m.element)
    word = [m.address, m.hints, 0, 0, 0, 0, 0, 0]
    word[1] |= (m.rank - 1) << 4 | code << 7 | INTERLEAVES.index(m.interleave) << 11
    word[1] |= SPANS.index(m.swizzle) << 13 | int(m.fill_nan) << 15
    word[1] |= int(m.element in TF32_CODES) << 16 | ATOMS.index(m.swizzle_atom_bytes) << 19
    for d, stride in enumerate(m.strides_bytes):
        half = d + 3  # the low halves are 32-bit fields 3 to 6 of the map
        word[half // 2] |= (stride // 16 & 0xFFFFFFFF) << half % 2 * 32
        word[3] |= stride // 16 >> 32 << 32 + 4 * d
    for d in range(m.rank):
        word[4 + d // 2] |= (m.dims[d] - 1) << d % 2 * 32
        word[6] |= (m.element_strides[d] - 1) << 32 + 3 * d
    raw = bytearray(struct.pack("<8Q", *word) + bytes(MAP_BYTES - 64))
    raw[55 : 55 + m.rank] = (b - 1 for b in m.box)
    return bytes(raw)
