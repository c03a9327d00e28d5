"""O of a kernel with scores in pieces: rescaled, finished and stored."""

from __future__ import annotations

from fa4.plan.pieces import PiecesPipeline, chain_name
from fa4.plan.pieces_layout import SUM_COLUMNS, output_over_queries, registers
from fa4.plan.schema import (
    GROUP_WARPS,
    Arrive,
    Copy,
    Loop,
    Math,
    Program,
    Role,
    SmemAccess,
    TmemAccess,
    Wait,
    Work,
)
from fa4.plan.work import WARPGROUP, rescale


def write_ones(pipeline: PiecesPipeline) -> Program:
    """Once: the columns beside V by which a product adds up rows of P."""
    if pipeline.row_sums != "tensor":
        return ()
    num_bytes = pipeline.tile_n * SUM_COLUMNS * pipeline.value_bytes // pipeline.cta_group
    return (Work("write ones", SmemAccess(num_bytes=num_bytes), writes=("ones",)),)


def rescale_columns(pipeline: PiecesPipeline, i: int, g: int) -> Program:
    """Inline: each group rescales its part of O's columns."""
    columns = pipeline.head_dim_v // pipeline.groups
    return rescale(columns, f"o{i}[{g * columns}:{(g + 1) * columns}]")


def correction_role(pipeline: PiecesPipeline) -> Role:
    """Rescales O between products where a warp needs it; at the end scales and converts O.

    The first piece of a work tile needs no rescale: its signals only pass through.
    """
    tiles = range(pipeline.q_tiles)
    start: Program = ()
    for i in tiles:
        start += (Wait(f"stats{_first(pipeline, i)}_full"), *_release(pipeline, i, first=True))
    every = tuple(step for i in tiles for step in _piece(pipeline, i))
    end: Program = ()
    if pipeline.stagger:
        end += (Arrive(f"stats{_first(pipeline, 1)}_empty"),)
    for i in tiles:
        end += _finish(pipeline, i)
    warps = GROUP_WARPS * len(pipeline.chains)
    return Role(
        name="correction",
        warps=tuple(range(warps, warps + GROUP_WARPS)),
        registers=registers(pipeline).correction,
        prologue=(
            *write_ones(pipeline),
            *(Arrive(f"p{_first(pipeline, i)}_full") for i in tiles),
        ),
        program=(
            *start,
            *(every * (pipeline.turns - 1)),
            Loop("kv_tiles", every * pipeline.turns, offset=-1),
            *end,
        ),
    )


def _first(pipeline: PiecesPipeline, i: int) -> str:
    return chain_name(pipeline, i, 0)


def values_done(pipeline: PiecesPipeline, i: int) -> Program:
    """Wait for the P V before this piece's, unless its scores tell that."""
    return () if pipeline.rescales_alone else (Wait(f"pv{i}_done"),)


def _release(pipeline: PiecesPipeline, i: int, *, first: bool = False) -> Program:
    """Let softmax write its next factors; staggered, it is the other Q tile's turn.

    The first pieces release the first Q tile only.
    """
    if not pipeline.stagger:
        return (Arrive(f"stats{_first(pipeline, i)}_empty"),)
    if first:
        return (Arrive(f"stats{_first(pipeline, 0)}_empty"),) if i == 0 else ()
    return (Arrive(f"stats{_first(pipeline, 1 - i)}_empty"),)


def _piece(pipeline: PiecesPipeline, i: int) -> Program:
    """One piece of Q tile i after the first."""
    name = _first(pipeline, i)
    return (
        Wait(f"stats{name}_full"),
        Work(f"vote {i}", Math(alu=2, other=6), reads=(f"row_stats{name}",)),
        *values_done(pipeline, i),
        *rescale(pipeline.head_dim_v, f"o{i}"),
        Arrive(f"p{name}_full"),
        *_release(pipeline, i),
    )


def _finish(pipeline: PiecesPipeline, i: int) -> Program:
    """Sums of all groups, then O."""
    steps: Program = ()
    for g in range(pipeline.groups):
        name, what = chain_name(pipeline, i, g), "stats" if g == 0 else "sum"
        read = SmemAccess(num_bytes=2 * 4 * WARPGROUP)
        steps += (
            Wait(f"{what}{name}_full"),
            Work(f"read sums {name}", read, reads=(f"row_stats{name}",)),
            Arrive(f"{what}{name}_empty"),
        )
    return (
        steps
        + _converted(pipeline, i, 0, 1)
        + (
            Arrive(f"p{_first(pipeline, i)}_full"),
            Arrive(f"epi{i}_full"),
        )
    )


def finish_output(pipeline: PiecesPipeline, i: int, g: int) -> Program:
    """Inline: each group finishes its part of O, with the sums of both."""
    steps: Program = ()
    if pipeline.groups > 1:
        own, other = (chain_name(pipeline, i, x) for x in (g, 1 - g))
        access = SmemAccess(num_bytes=4 * WARPGROUP)
        steps += (
            Work(f"write maximum {own}", access, writes=(f"row_max{own}",)),
            Arrive(f"max{own}_full"),
            Wait(f"max{other}_full"),
            Work(f"read maximum {other}", access, reads=(f"row_max{other}",)),
        )
    return (*steps, *_converted(pipeline, i, g, pipeline.groups), Arrive(f"epi{i}_full"))


def last_values(pipeline: PiecesPipeline, i: int) -> str:
    """The signal of a work tile's last P V: of its own, or that of every piece."""
    every = pipeline.correction == "warpgroup" and not pipeline.rescales_alone
    return f"pv{i}_done" if every else f"o{i}_full"


def _converted(pipeline: PiecesPipeline, i: int, g: int, groups: int) -> Program:
    """One of `groups` parts of O out of tensor memory, times 1/l, rounded, to shared memory."""
    columns = pipeline.head_dim_v // groups
    row = WARPGROUP * pipeline.head_dim_v * 2
    start = i * row + g * row // groups
    name = f"{i}" if groups == 1 else chain_name(pipeline, i, g)
    read = [f"o{i}[{g * columns}:{(g + 1) * columns}]"]
    total = columns
    if pipeline.row_sums == "tensor":
        read.append(f"o{i}[{pipeline.head_dim_v}:{pipeline.head_dim_v + SUM_COLUMNS}]")
        total += SUM_COLUMNS
    return (
        Wait(last_values(pipeline, i)),
        Wait(f"epi{i}_empty"),
        Work(f"read O{name}", TmemAccess(kind="load", cols=total), reads=tuple(read)),
        Work(f"scale O{name}", Math(fma=columns, alu=columns / 2, other=columns / 8)),
        Work(
            f"write O{name}",
            SmemAccess(num_bytes=row // groups),
            writes=(f"o[{start}:{start + row // groups}]",),
        ),
    )


def epilogue_role(pipeline: PiecesPipeline) -> Role:
    """Stores O tiles by TMA."""
    groups = len(pipeline.chains) + (pipeline.correction == "warpgroup")
    num_bytes = WARPGROUP * pipeline.head_dim_v * 2
    program: Program = ()
    for i in range(pipeline.q_tiles):
        place = f"o[{i * num_bytes}:{(i + 1) * num_bytes}]"
        program += (
            Wait(f"epi{i}_full"),
            Work(
                f"store O{i}", Copy(kind="store", num_bytes=num_bytes), asynchronous=True,
                reads=(place,),
            ),
            Arrive(f"epi{i}_empty", after="tma"),
        )  # fmt: skip
    if output_over_queries(pipeline):
        program += (Arrive("o_stored", after="tma"),)
    return Role(
        name="epilogue",
        warps=(GROUP_WARPS * groups + 1,),
        registers=registers(pipeline).others,
        program=program,
    )
