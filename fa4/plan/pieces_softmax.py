"""Softmax warpgroups of a kernel with scores in pieces: one thread per row of a Q tile."""

from __future__ import annotations

from typing import NamedTuple

from fa4.plan.pieces import PiecesPipeline, chain_name, slot_name
from fa4.plan.pieces_layout import ROW_BYTES, held_registers, registers
from fa4.plan.pieces_output import finish_output, rescale_columns, values_done, write_ones
from fa4.plan.schema import (
    GROUP_WARPS,
    Arrive,
    Loop,
    Math,
    Program,
    Role,
    SmemAccess,
    TmemAccess,
    Wait,
    Work,
)
from fa4.plan.work import WARPGROUP, exponentials, fragments, masking, row_max, row_sum

VOTE = Math(alu=2, other=6)  # does any row of a warp have to rescale?
EARLY_FRAGMENTS = {1: 1, 2: 2}  # computed before a speculative maximum is known, by groups


class KeyPiece(NamedTuple):
    """A piece of a warpgroup's scores: of which Q tile and group, its number, is it masked."""

    i: int
    g: int
    turn: int
    masked: bool


def together(first: Math, second: Math) -> Math:
    """Instructions of both, one among the other."""
    return Math(
        mufu=first.mufu + second.mufu,
        fma=first.fma + second.fma,
        alu=first.alu + second.alu,
        other=first.other + second.other,
        chain=max(first.chain, second.chain),
    )


def softmax_role(pipeline: PiecesPipeline, i: int, g: int) -> Role:
    """Group g of Q tile i: S to P, row maximum and sum."""
    name = chain_name(pipeline, i, g)
    number = pipeline.chains.index((i, g))
    step = _interleaved_step if pipeline.softmax == "interleaved" else _serial_step
    loops = tuple(
        Loop(trip, step(pipeline, i, g, masked))
        for trip, masked in (("masked_tiles", True), ("plain_tiles", False))
    )
    begin: Program = ()
    end = _hand_over(pipeline, i, g)
    if pipeline.correction == "inline":
        end = finish_output(pipeline, i, g)
        begin = write_ones(pipeline) if number == 0 else ()
    return Role(
        name=f"softmax{name}",
        warps=tuple(range(GROUP_WARPS * number, GROUP_WARPS * (number + 1))),
        registers=registers(pipeline).softmax,
        prologue=begin,
        program=(*loops, *end),
        live={"a piece of S, its P, statistics and addresses": held_registers(pipeline)},
    )


def _serial_step(pipeline: PiecesPipeline, i: int, g: int, masked: bool) -> Program:
    """One KV tile, a piece after the other."""
    steps: Program = ()
    for turn in range(pipeline.turns):
        piece = KeyPiece(i, g, turn, masked)
        steps += _read(pipeline, piece)
        speculative = pipeline.maximum == "speculative"
        steps += (_speculative if speculative else _exact)(pipeline, piece)
        steps += _released(pipeline, piece)
        if pipeline.row_sums == "after":
            steps += (Work(f"row sum {_label(pipeline, piece)}", row_sum(pipeline.piece)),)
    return steps


def _interleaved_step(pipeline: PiecesPipeline, i: int, g: int, masked: bool) -> Program:
    """One KV tile: the next piece's maximum and the last one's sum run beside exponentials."""
    pieces = [KeyPiece(i, g, turn, masked) for turn in range(pipeline.turns)]
    steps = _read(pipeline, pieces[0]) + _maximum(pipeline, pieces[0])
    sums = pipeline.row_sums != "tensor"
    for piece in pieces:
        beside = Math()
        following = pieces[piece.turn + 1] if piece.turn + 1 < len(pieces) else None
        steps += _told(pipeline, piece)
        if following is not None:
            steps += _read(pipeline, following)
            beside = together(beside, _maximum_math(pipeline))
        if piece.turn and sums:
            beside = together(beside, row_sum(pipeline.piece))
        steps += _probabilities(pipeline, piece, beside)
        steps += _released(pipeline, piece)
        if following is not None:
            steps += _exchanged(pipeline, following)
    last = _label(pipeline, pieces[-1])
    return (*steps, Work(f"row sum {last}", row_sum(pipeline.piece))) if sums else steps


def _label(pipeline: PiecesPipeline, piece: KeyPiece) -> str:
    return f"{chain_name(pipeline, piece.i, piece.g)} {piece.turn}"


def _read(pipeline: PiecesPipeline, piece: KeyPiece) -> Program:
    """Wait for the piece, read it, hide keys."""
    name, label = chain_name(pipeline, piece.i, piece.g), _label(pipeline, piece)
    slot = slot_name(pipeline, piece.i, piece.g, piece.turn)
    access = TmemAccess(kind="load", cols=pipeline.piece)
    steps: Program = (Wait(f"s{name}_full"), Work(f"read S{label}", access, reads=(f"s{slot}",)))
    if piece.masked:
        steps += (Work(f"mask S{label}", masking(pipeline.piece)),)
    return steps


def _maximum_math(pipeline: PiecesPipeline) -> Math:
    """Of a piece; a maximum that is loaded is compared with the last one only."""
    return Math(alu=4) if pipeline.maximum == "loaded" else row_max(pipeline.piece)


def _maximum(pipeline: PiecesPipeline, piece: KeyPiece) -> Program:
    """The row maximum, of all groups of the Q tile."""
    label = _label(pipeline, piece)
    found = Work(f"row max {label}", _maximum_math(pipeline))
    return (found, *_exchanged(pipeline, piece))


def _exchanged(pipeline: PiecesPipeline, piece: KeyPiece) -> Program:
    """Tell the other group of the Q tile the maximum, and take the larger one."""
    return _tell_maximum(pipeline, piece) + _take_maximum(pipeline, piece)


def _tell_maximum(pipeline: PiecesPipeline, piece: KeyPiece) -> Program:
    if pipeline.groups == 1:
        return ()
    name = chain_name(pipeline, piece.i, piece.g)
    access = SmemAccess(num_bytes=ROW_BYTES * WARPGROUP)
    # The same name in each turn: its two stages are used one after the other.
    return Work(f"write maximum {name}", access, writes=(f"row_max{name}",)), Arrive(
        f"max{name}_full"
    )


def _take_maximum(pipeline: PiecesPipeline, piece: KeyPiece) -> Program:
    if pipeline.groups == 1:
        return ()
    other = chain_name(pipeline, piece.i, 1 - piece.g)
    access = SmemAccess(num_bytes=ROW_BYTES * WARPGROUP)
    return Wait(f"max{other}_full"), Work(
        f"read maximum {other}", access, reads=(f"row_max{other}",)
    )


def _told(pipeline: PiecesPipeline, piece: KeyPiece) -> Program:
    """With the maximum known: rescale O, or tell those who do."""
    i, g = piece.i, piece.g
    if pipeline.correction == "inline":
        steps: Program = (*values_done(pipeline, i), *rescale_columns(pipeline, i, g))
        return steps if g == 0 else (*steps, Arrive(f"p{chain_name(pipeline, i, 0)}_full"))
    if g:
        return ()
    name = chain_name(pipeline, i, g)
    access = SmemAccess(num_bytes=ROW_BYTES * WARPGROUP)
    written = Work(f"write alpha {name}", access, writes=(f"row_stats{name}",))
    return written, Arrive(f"stats{name}_full")


def _released(pipeline: PiecesPipeline, piece: KeyPiece) -> Program:
    """Before the next factor is written, the last one must have been read."""
    if pipeline.correction == "inline" or piece.g:
        return ()
    return (Wait(f"stats{chain_name(pipeline, piece.i, piece.g)}_empty"),)


def _exact(pipeline: PiecesPipeline, piece: KeyPiece) -> Program:
    """Maximum, factor, exponentials."""
    return (
        *_maximum(pipeline, piece),
        *_told(pipeline, piece),
        *_probabilities(pipeline, piece),
    )


def _speculative(pipeline: PiecesPipeline, piece: KeyPiece) -> Program:
    """Exponentials with the last maximum while this one is found; again where it rose too far.

    Nobody has seen P before the maximum is known: what is stored is what the exact order stores.
    """
    label, exp2 = _label(pipeline, piece), pipeline.exp2
    early = fragments(pipeline.piece, exp2)[: EARLY_FRAGMENTS[pipeline.groups]]
    works = [exponentials(columns, emulated, exp2.degree) for columns, emulated in early]
    steps: Program = (
        Work(f"exp S{label} 0, row max", together(works[0], row_max(pipeline.piece))),
    )
    steps += _tell_maximum(pipeline, piece)
    steps += tuple(Work(f"exp S{label} {n}", x) for n, x in enumerate(works[1:], 1))
    steps += (*_take_maximum(pipeline, piece), Work(f"vote {label}", VOTE))
    steps += tuple(
        Work(f"exp S{label} {n} again", x, share="rescale_rate") for n, x in enumerate(works)
    )
    steps += _told(pipeline, piece)
    return steps + _probabilities(pipeline, piece, computed=len(early))


def _probabilities(
    pipeline: PiecesPipeline, piece: KeyPiece, beside: Math | None = None, computed: int = 0
) -> Program:
    """P by fragments, and tell the MMA warp. beside: instructions among them. computed: fragments
    whose exponentials are there."""
    exp2, label = pipeline.exp2, _label(pipeline, piece)
    parts = fragments(pipeline.piece, exp2)
    name = chain_name(pipeline, piece.i, piece.g)
    steps: Program = ()
    done, split_at = 0, pipeline.split_columns
    for number, (columns, emulated) in enumerate(parts):
        if number >= computed:
            work = exponentials(columns, emulated, exp2.degree)
            if beside is not None:
                work = together(work, _part(beside, len(parts)))
            if pipeline.row_sums == "merged" and number:
                work = together(work, row_sum(parts[number - 1][0]))
            steps += (Work(f"exp S{label} {number}", work),)
        steps += (_store(pipeline, piece, done, columns),)
        done += columns
        if done == split_at:
            steps += (Arrive(f"p{name}_full"),)
    if split_at < pipeline.piece:
        steps += (Arrive(f"p{name}_last"),)
    if pipeline.row_sums == "merged":
        left = sum(parts[n][0] for n in {*range(computed - 1), len(parts) - 1})
        steps += (Work(f"last row sum {label}", row_sum(left)),)
    return steps


def _part(work: Math, count: int) -> Math:
    """One of `count` equal parts."""
    return Math(mufu=work.mufu / count, fma=work.fma / count, alu=work.alu / count,
                other=work.other / count, chain=work.chain)  # fmt: skip


def _store(pipeline: PiecesPipeline, piece: KeyPiece, first: int, columns: int) -> Work:
    """A fragment of P to tensor memory."""
    slot = slot_name(pipeline, piece.i, piece.g, piece.turn)
    start, stop = (n * pipeline.value_bytes // 4 for n in (first, first + columns))
    access = TmemAccess(kind="store", cols=stop - start)
    return Work(f"write P{_label(pipeline, piece)}", access, writes=(f"p{slot}[{start}:{stop}]",))


def _hand_over(pipeline: PiecesPipeline, i: int, g: int) -> Program:
    """Sums and maxima of the work tile, for the correction warps."""
    name, what = chain_name(pipeline, i, g), "stats" if g == 0 else "sum"
    access = SmemAccess(num_bytes=2 * ROW_BYTES * WARPGROUP)
    return (
        Work(f"write sums {name}", access, writes=(f"row_stats{name}",)),
        Arrive(f"{what}{name}_full"),
        Wait(f"{what}{name}_empty"),
    )
