"""Operands of the probes: codes drawn from the name of a case, the same on every machine.

A case draws tiles of A (64, K), B (64, K) and D (64, 64) of one combination of types.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Codes = np.ndarray[Any, np.dtype[np.int64]]
ROWS = COLUMNS = 64
TILES = 25  # of each case: 102,400 outputs
K_BYTES = 32


@dataclass(frozen=True)
class Type:
    """An element type. extremes: codes of its zeros, ends, infinities and NaNs, without sign."""

    name: str
    size_bytes: int
    exponent_bits: int
    mantissa_bits: int
    infinities: bool = True

    @property
    def bias(self) -> int:
        """Of the exponent."""
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def largest_field(self) -> int:
        """The exponent field of the largest finite number."""
        return (1 << self.exponent_bits) - (2 if self.infinities else 1)

    @property
    def sign_bit(self) -> int:
        """Its position."""
        return self.exponent_bits + self.mantissa_bits

    @property
    def extremes(self) -> list[int]:
        """Codes of zero, subnormals, one, the largest, infinities and NaNs, without sign."""
        m = self.mantissa_bits
        ones = (1 << m) - 1
        top = (1 << self.exponent_bits) - 1
        found = [0, 0, 0, 1, ones, 1 << m, self.bias << m, self.bias << m | ones]
        if self.infinities:
            return [*found, (top << m) - 1, top << m, top << m | 1, top << m | 1 << (m - 1)]
        return [*found, (top << m | ones) - 1, top << m | ones]


TYPES = {
    t.name: t
    for t in (
        Type("f16", 2, 5, 10),
        Type("bf16", 2, 8, 7),
        Type("tf32", 4, 8, 10),
        Type("e4m3", 1, 4, 3, infinities=False),
        Type("e5m2", 1, 5, 2),
        Type("f32", 4, 8, 23),
    )
}


@dataclass(frozen=True)
class Combination:
    """Types of D, A and B."""

    d: str
    a: str
    b: str

    @property
    def name(self) -> str:
        """Such as "f32.bf16.bf16"."""
        return f"{self.d}.{self.a}.{self.b}"

    @property
    def k(self) -> int:
        """Elements of K of one instruction."""
        return K_BYTES // TYPES[self.a].size_bytes


FP8 = ("e4m3", "e5m2")
COMBINATIONS = [
    Combination("f32", "bf16", "bf16"),
    Combination("f32", "f16", "f16"),
    Combination("f16", "f16", "f16"),
    Combination("f32", "tf32", "tf32"),
    *(Combination(d, a, b) for d in ("f32", "f16") for a in FP8 for b in FP8),
]


class Draws:
    """Random integers from a name: splitmix64 of a counter."""

    def __init__(self, name: str) -> None:
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        self._next = int.from_bytes(digest, "little")

    def bits(self, *shape: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """uint64 of this shape."""
        count = int(np.prod(shape))
        start = np.uint64(self._next)
        with np.errstate(over="ignore"):
            z = start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            self._next = int(z[-1])
            z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return (z ^ z >> np.uint64(31)).reshape(shape)

    def below(self, limit: int, *shape: int) -> Codes:
        """Integers 0 .. limit - 1."""
        return ((self.bits(*shape) >> np.uint64(11)) % np.uint64(limit)).astype(np.int64)

    def between(self, low: int, high: int, *shape: int) -> Codes:
        """Integers low .. high."""
        return low + self.below(high - low + 1, *shape)


def compose(kind: Type, sign: Codes, field: Codes, mantissa: Codes) -> Codes:
    """Codes of finite numbers; exponent fields are clipped to those of the type."""
    field = np.clip(field, 0, kind.largest_field)
    if not kind.infinities:  # the largest mantissa there is the NaN
        top = (field == kind.largest_field) & (mantissa == (1 << kind.mantissa_bits) - 1)
        mantissa = np.where(top, mantissa - 1, mantissa)
    return sign << kind.sign_bit | field << kind.mantissa_bits | mantissa


@dataclass(frozen=True)
class Tiles:
    """Codes: a (tiles, 64, K), b (tiles, 64, K), d (tiles, 64, 64)."""

    a: Codes
    b: Codes
    d: Codes


def _numbers(draws: Draws, kind: Type, low: int, high: int, *shape: int) -> Codes:
    """Random numbers with exponents (not fields) from low to high."""
    field = draws.between(low, high, *shape) + kind.bias
    return compose(
        kind, draws.below(2, *shape), field, draws.below(1 << kind.mantissa_bits, *shape)
    )


def _window(low_a: int, high_a: int, low_b: int, high_b: int, low_d: int, high_d: int) -> Any:
    """A case: exponents of A, B and D from windows."""

    def draw(draws: Draws, types: Combination) -> Tiles:
        a, b, d = (TYPES[name] for name in (types.a, types.b, types.d))
        return Tiles(
            _numbers(draws, a, low_a, high_a, TILES, ROWS, types.k),
            _numbers(draws, b, low_b, high_b, TILES, COLUMNS, types.k),
            _numbers(draws, d, low_d, high_d, TILES, ROWS, COLUMNS),
        )

    return draw


def _ends(high: bool) -> Any:
    """A case: exponents of A at one end of its range."""

    def draw(draws: Draws, types: Combination) -> Tiles:
        a, b, d = (TYPES[name] for name in (types.a, types.b, types.d))
        a_end = a.largest_field - a.bias if high else -a.bias
        d_end = d.largest_field - d.bias if high else -d.bias
        a_low, a_high = (a_end - 3, a_end) if high else (a_end, a_end + 3)
        d_low, d_high = (d_end - 3, d_end) if high else (d_end, d_end + 3)
        b_low, b_high = (-3, 2) if high else (-24, 1)
        return Tiles(
            _numbers(draws, a, a_low, a_high, TILES, ROWS, types.k),
            _numbers(draws, b, b_low, b_high, TILES, COLUMNS, types.k),
            _numbers(draws, d, d_low, d_high, TILES, ROWS, COLUMNS),
        )

    return draw


def _extremes(draws: Draws, types: Combination) -> Tiles:
    """Zeros of both signs, subnormals, ends, infinities and NaNs."""

    def some(name: str, rare: int, *shape: int) -> Codes:
        kind = TYPES[name]
        listed = np.array(kind.extremes, np.int64)
        mild = np.array(kind.extremes[:8], np.int64)
        wild = draws.below(rare, *shape) == 0
        chosen = np.where(
            wild, listed[draws.below(len(listed), *shape)], mild[draws.below(8, *shape)]
        )
        return draws.below(2, *shape) << kind.sign_bit | chosen

    return Tiles(
        some(types.a, 30, TILES, ROWS, types.k),
        some(types.b, 30, TILES, COLUMNS, types.k),
        some(types.d, 6, TILES, ROWS, COLUMNS),
    )


def _zeros(draws: Draws, types: Combination) -> Tiles:
    """Nothing but zeros and, rarely, ones: signs of zero sums."""

    def some(name: str, *shape: int) -> Codes:
        kind = TYPES[name]
        one = np.where(draws.below(12, *shape) == 0, kind.bias << kind.mantissa_bits, 0)
        lean = draws.below(16, *shape[:-1], 1)  # how likely a row's elements are negative
        sign = (draws.below(16, *shape) < lean).astype(np.int64)
        return sign << kind.sign_bit | one

    return Tiles(
        some(types.a, TILES, ROWS, types.k),
        some(types.b, TILES, COLUMNS, types.k),
        some(types.d, TILES, ROWS, COLUMNS),
    )


def _cancel(draws: Draws, types: Combination) -> Tiles:
    """Two large addends that cancel, at any two places (D too), and small ones below them.

    All of a column of B is one power of two, so that a row of A says what is added.
    """
    a, b, d = (TYPES[name] for name in (types.a, types.b, types.d))
    k = types.k
    top, reach = a.largest_field - a.bias - 2, min(a.largest_field + a.mantissa_bits, 40)
    distance = draws.between(0, reach, TILES, ROWS, 1)
    small = top - distance - draws.below(4, TILES, ROWS, k)
    keep = draws.below(4, TILES, ROWS, 1) >= draws.below(4, TILES, ROWS, k)
    field = np.where(keep, small + a.bias, -1)
    mantissa = draws.below(1 << a.mantissa_bits, TILES, ROWS, k)
    sign = draws.below(2, TILES, ROWS, k)
    first, second = (draws.below(k, TILES, ROWS, 1) for _ in range(2))
    with_d = draws.below(3, TILES, ROWS, 1) == 0
    place = np.arange(k)
    large = (place == first) | (place == second) & ~with_d
    field = np.where(large, top + a.bias, field)
    mantissa = np.where(large, 0, mantissa)
    sign = np.where(place == first, 0, np.where(large, 1, sign))
    codes = compose(a, sign, field, mantissa)
    codes = np.where(~large & (field < 0), 0, codes)
    shift = draws.between(-4, 2, TILES, COLUMNS, 1)
    b_codes = np.broadcast_to((shift + b.bias) << b.mantissa_bits, (TILES, COLUMNS, k)).copy()
    d_field = top + shift.transpose(0, 2, 1) + d.bias
    d_large = compose(d, np.ones_like(d_field), d_field, np.zeros_like(d_field))
    d_small = _numbers(draws, d, -12, top, TILES, ROWS, COLUMNS)
    d_small = np.where(draws.below(2, TILES, ROWS, 1) == 0, d_small, 0)
    return Tiles(codes, b_codes, np.where(with_d, d_large, d_small))


CASES: dict[str, Callable[[Draws, Combination], Tiles]] = {
    "equal": _window(0, 0, 0, 0, 0, 4),
    "near": _window(-1, 1, -1, 1, -2, 5),
    "middle": _window(-4, 4, -4, 4, -6, 8),
    "wide": _window(-8, 8, -8, 8, -14, 14),
    "widest": _window(-30, 30, -30, 30, -40, 40),
    "high": _ends(True),
    "low": _ends(False),
    "cancel": _cancel,
    "extremes": _extremes,
    "zeros": _zeros,
}


def tiles(types: Combination, case: str) -> Tiles:
    """The operands of a case."""
    return CASES[case](Draws(f"{types.name} {case}"), types)


def all_tiles(types: Combination) -> Tiles:
    """The operands of all cases, one behind the other."""
    every = [tiles(types, case) for case in CASES]
    parts = [[getattr(each, name) for each in every] for name in "abd"]
    return Tiles(*(np.concatenate(part) for part in parts))


# How codes lie in bytes and registers.


def operand_bytes(name: str, codes: Codes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes of codes, (..., K * size). The low bits of tf32, which nothing looks at, are not 0."""
    kind = TYPES[name]
    if name == "tf32":
        low = (codes * 2654435761 >> 7) & 0x1FFF
        return np.ascontiguousarray((codes << 13 | low).astype(np.uint32)).view(np.uint8)
    unsigned = {1: np.uint8, 2: np.uint16}[kind.size_bytes]
    return np.ascontiguousarray(codes.astype(unsigned)).view(np.uint8)


def image_of(data: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Rows of 32 bytes (tiles, rows, 32) as shared memory holds them without swizzling.

    Blocks of 8 rows x 16 bytes: the second half of K 128 bytes behind the first, the next rows 256.
    """
    count, rows, _ = data.shape
    blocks = data.reshape(count, rows // 8, 8, 2, 16).transpose(0, 1, 3, 2, 4)
    return np.ascontiguousarray(blocks).reshape(count, rows * K_BYTES)


def to_registers(name: str, codes: Codes) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """D (tiles, 64, n) as the registers of 128 threads, (tiles, registers, 128)."""
    count, _, n = codes.shape
    # tile, warp, half of the rows, g, block of columns, t, one of the pair
    placed = codes.reshape(count, 4, 2, 8, n // 8, 4, 2)
    if name == "f16":
        halves = placed.transpose(0, 4, 2, 1, 3, 5, 6).astype(np.uint16)
        return np.ascontiguousarray(halves).view(np.uint32).reshape(count, n // 4, 128)
    words = placed.transpose(0, 4, 2, 6, 1, 3, 5).astype(np.uint32)
    return np.ascontiguousarray(words).reshape(count, n // 2, 128)


def from_registers(name: str, words: np.ndarray[Any, np.dtype[np.uint32]]) -> Codes:
    """The inverse of `to_registers`."""
    count, registers, _ = words.shape
    if name == "f16":
        halves = np.ascontiguousarray(words).view(np.uint16)
        placed = halves.reshape(count, registers // 2, 2, 4, 8, 4, 2).transpose(0, 3, 2, 4, 1, 5, 6)
        return placed.reshape(count, ROWS, registers * 4).astype(np.int64)
    placed = words.reshape(count, registers // 4, 2, 2, 4, 8, 4).transpose(0, 4, 2, 5, 1, 6, 3)
    return placed.reshape(count, ROWS, registers * 2).astype(np.int64)
