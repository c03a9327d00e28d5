"""Amounts of work that several plans share: instructions per thread, operand bytes."""

from __future__ import annotations

from fa4.config import FRAGMENT_COLS, Exp2Split
from fa4.plan.schema import Math, Mma, Program, TmemAccess, Work

WARPGROUP = 128  # threads, and rows of a tile: one thread per row
REGISTER_STEP, MOST_REGISTERS = 8, 255  # of setmaxnreg; that a thread's instructions can name
FRAGMENT = FRAGMENT_COLS  # columns of S that a thread turns into P at a time

# Software exp2 per element, packed two by two where the hardware can (facts: fma clamp, round-down
# add, two subtractions and the Horner steps as f32x2; max and the exponent insertion one by one).
_EMULATED_PACKED = 3
_EMULATED_ALU = 2.0
_EMULATED_CHAIN = 6  # clamp, add, two subtractions, shift and add, before and after Horner's steps

# Instructions of the softmax loop beyond arithmetic, per 128-column row: FlashAttention-4's SASS
# loop has 447-453 instructions without emulation, of which 64 max, 64 FMA2, 128 exponentials, 64
# conversions and 64 packed additions are counted here by name (docs/notes, peers' SASS counts).
_OTHER_PER_COLUMN = 66 / 128


def launch_registers(warpgroups: int, registers_per_sm: int) -> int:
    """Registers of each thread that a CTA of so many warpgroups is launched with, at most.

    setmaxnreg moves them between its warps and finds no more: a quarter of the SM has an equal
    share for each of its warps, in steps of 8 (measured on Hopper: a CTA waits for ever for what is
    left beside that).
    """
    each = registers_per_sm // (WARPGROUP * warpgroups)
    return min(each, MOST_REGISTERS) // REGISTER_STEP * REGISTER_STEP


def mma(
    rows: int,
    cols: int,
    depth: int,
    *,
    element_bytes: int,
    a_in_tmem: bool = False,
    in_registers: bool = False,
    cta_group: int = 1,
) -> Mma:
    """rows x cols x depth for one CTA; in a pair, each CTA stages half of the B operand.

    in_registers: where other products have tensor memory, this one has the warpgroup's registers.
    """
    a_bytes = 0 if a_in_tmem else rows * depth * element_bytes
    b_bytes = cols * depth * element_bytes // cta_group
    return Mma(rows=rows, cols=cols, depth=depth, a_bytes=a_bytes, b_bytes=b_bytes,
               cta_group=cta_group, element_bytes=element_bytes,
               in_registers=in_registers)  # fmt: skip


def row_max(columns: int) -> Math:
    """3-input maximum over a row: one instruction per two columns."""
    return Math(alu=columns / 2, other=columns * _OTHER_PER_COLUMN / 4)


def exponentials(columns: int, emulated: int, degree: int) -> Math:
    """Scale and subtract, exponentials, conversion to 16 bits of `columns` elements of a row."""
    polynomial = emulated * (_EMULATED_PACKED + degree)
    return Math(
        mufu=columns - emulated,
        fma=columns + polynomial,
        alu=columns / 2 + emulated * _EMULATED_ALU,
        other=columns * _OTHER_PER_COLUMN / 2,
        chain=_EMULATED_CHAIN + degree if emulated else 0,
    )


def row_sum(columns: int) -> Math:
    """Packed additions over a row."""
    return Math(fma=columns, other=columns * _OTHER_PER_COLUMN / 4)


def masking(columns: int) -> Math:
    """One select per column, and a limit turned into predicates per 32 columns."""
    return Math(alu=columns + 4 * columns / FRAGMENT, other=columns / FRAGMENT)


def multiply(columns: int) -> Math:
    """Packed multiplication of a row by a factor."""
    return Math(fma=columns, other=columns / 8)


def fragments(tile_n: int, split: Exp2Split) -> list[tuple[int, int]]:
    """(columns, emulated columns) of each fragment of a row."""
    flags = split.emulated_columns(tile_n)
    return [
        (len(flags[start : start + FRAGMENT]), sum(flags[start : start + FRAGMENT]))
        for start in range(0, tile_n, FRAGMENT)
    ]


def rescale(cols: int, buffer: str) -> Program:
    """O from TMEM, times alpha, back; in the share of steps in which a warp has to."""

    def step(what: str, amount: TmemAccess | Math) -> Work:
        return Work(what, amount, reads=(buffer,), writes=(buffer,), share="rescale_rate")

    return (
        step(f"read {buffer}", TmemAccess(kind="load", cols=cols)),
        step(f"rescale {buffer}", multiply(cols)),
        step(f"write {buffer}", TmemAccess(kind="store", cols=cols)),
    )
