"""What each warp role of the forward kernel does, per work tile (see `forward`)."""

from __future__ import annotations

from fa4.config import ForwardPipeline
from fa4.plan.forward_layout import output_over_queries, registers, spilled, split_columns
from fa4.plan.schema import (
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
from fa4.plan.work import (
    WARPGROUP,
    exponentials,
    fragments,
    masking,
    mma,
    rescale,
    row_max,
    row_sum,
)

SOFTMAX_WARPS = ((0, 1, 2, 3), (4, 5, 6, 7))
CORRECTION_WARPS = (8, 9, 10, 11)
MMA_WARP, EPILOGUE_WARP, LOAD_WARP = 12, 13, 14


def load_role(pipeline: ForwardPipeline, stages: int) -> Role:
    """K, Q0, Q1, V, then K and V of the later tiles, as far ahead as the ring allows.

    stages: of that ring. At the end it waits until the products have used what it loaded.
    """
    tile_n, size = pipeline.numerics.tile_n, pipeline.element_bytes

    def fetch(what: str, signal: str, num_bytes: int, cold: bool = False) -> Program:
        copy = Copy(kind="load", num_bytes=num_bytes, cold=cold)
        place = f"kv:{what}" if signal == "kv" else signal
        return (
            Wait(f"{signal}_empty"),
            Work(f"load {what}", copy, asynchronous=True, writes=(place,)),
            Arrive(f"{signal}_full", after="tma"),
        )

    k_bytes = tile_n * pipeline.head_dim * size // pipeline.cta_group
    k = fetch("K", "kv", k_bytes)
    v = fetch("V", "kv", tile_n * pipeline.head_dim_v * size // pipeline.cta_group)
    q: Program = (Wait("o_stored"),) if output_over_queries(pipeline) else ()
    for i in range(pipeline.numerics.q_tiles):
        q += fetch(f"Q{i}", f"q{i}", WARPGROUP * pipeline.head_dim * size, cold=True)
    program = (*fetch("K", "kv", k_bytes, cold=True), *q, *v, Loop("kv_tiles", (*k, *v), offset=-1))
    return Role(
        name="load",
        warps=(LOAD_WARP,),
        registers=registers(pipeline).others,
        program=program,
        closing=(
            *(Wait("kv_empty") for _ in range(stages)),
            *(Wait(f"q{i}_empty") for i in range(pipeline.numerics.q_tiles)),
        ),
    )


def mma_role(pipeline: ForwardPipeline) -> Role:
    """One warp issues every product; commits signal their completion in order."""
    tiles = range(pipeline.numerics.q_tiles)
    first: Program = ()
    for i in tiles:
        first += (Wait(f"q{i}_full"), *((Wait("kv_full"),) if i == 0 else ()))
        first += _scores(pipeline, i)
    last = tiles[-1]
    release = (Arrive("kv_empty", after="tensor"),)
    steady: Program = (Wait("kv_full"),)
    for i in tiles:
        steady += _values(pipeline, i)
        steady += release if i == last else ()
        if pipeline.ping_pong:
            steady += ((Wait("kv_full"),) if i == 0 else ()) + _scores(pipeline, i)
    if not pipeline.ping_pong:
        steady += (Wait("kv_full"),)
        for i in tiles:
            steady += _scores(pipeline, i)
    steady += release
    tail: Program = tuple(Arrive(f"q{i}_empty", after="tensor") for i in tiles)
    tail += (Wait("kv_full"),)
    for i in tiles:
        tail += (*_values(pipeline, i), Arrive(f"o{i}_full", after="tensor"))
    return Role(
        name="mma",
        warps=(MMA_WARP,),
        registers=registers(pipeline).others,
        program=(*first, *release, Loop("kv_tiles", steady, offset=-1), *tail, *release),
    )


def _scores(pipeline: ForwardPipeline, i: int) -> Program:
    """S_i = Q_i K^T, and tell the softmax warps."""
    amount = mma(
        WARPGROUP,
        pipeline.numerics.tile_n,
        pipeline.head_dim,
        element_bytes=pipeline.element_bytes,
        cta_group=pipeline.cta_group,
    )
    product = Work(f"QK{i}", amount, asynchronous=True, reads=(f"q{i}", "kv:K"), writes=(f"s{i}",))
    return product, Arrive(f"s{i}_full", after="tensor")


def _values(pipeline: ForwardPipeline, i: int) -> Program:
    """O_i += P_i V in two parts: the first may start when split_p of P is stored."""
    tile_n = pipeline.numerics.tile_n
    head = split_columns(pipeline)

    def part(what: str, first: int, keys: int) -> Work:
        amount = mma(
            WARPGROUP,
            pipeline.head_dim_v,
            keys,
            element_bytes=pipeline.element_bytes,
            a_in_tmem=pipeline.p_space == "tmem",
            cta_group=pipeline.cta_group,
        )
        return Work(
            what,
            amount,
            asynchronous=True,
            reads=(_probabilities(pipeline, i, first, keys), "kv:V"),
            writes=(f"o{i}",),
        )

    steps: Program = (Wait(f"p{i}_full_o{i}_scaled"), part(f"PV{i} head", 0, head))
    if head < tile_n:
        steps += (Wait(f"p{i}_last"), part(f"PV{i} tail", head, tile_n - head))
    if pipeline.correction == "inline":
        steps += (Arrive(f"pv{i}_done", after="tensor"),)
    return steps


def softmax_role(pipeline: ForwardPipeline, i: int) -> Role:
    """One warpgroup, one thread per row of Q tile i: S to P, row maximum and sum."""
    inline = pipeline.correction == "inline"
    end: Program = (Arrive(f"stats{i}_full"), Wait(f"stats{i}_empty"))
    if inline:
        end = _finish_output(pipeline, i)
    loops = tuple(
        Loop(trip, _softmax_step(pipeline, i, masked))
        for trip, masked in (("masked_tiles", True), ("plain_tiles", False))
    )
    return Role(
        name=f"softmax{i}",
        warps=SOFTMAX_WARPS[i],
        registers=registers(pipeline).softmax,
        program=(*loops, *end),
    )


def _softmax_step(pipeline: ForwardPipeline, i: int, masked: bool) -> Program:
    """One KV tile: read S, maximum, alpha, exponentials by fragments, store P, row sum."""
    tile_n, split = pipeline.numerics.tile_n, pipeline.numerics.exp2
    inline = pipeline.correction == "inline"
    steps: Program = (
        Wait(f"s{i}_full"),
        Work(f"read S{i}", TmemAccess(kind="load", cols=tile_n), reads=(f"s{i}",)),
    )
    if masked:
        steps += (Work(f"mask S{i}", masking(tile_n)),)
    steps += (Work(f"row max {i}", row_max(tile_n)),)
    moved = spilled(pipeline)
    if moved is not None:
        steps += (Work(f"spill {i}", moved),)
    if inline:
        steps += (Wait(f"pv{i}_done"), *rescale(pipeline.head_dim_v, f"o{i}"))
    else:
        steps += (
            Work(f"write alpha {i}", SmemAccess(num_bytes=4 * WARPGROUP), writes=(_statistics(i),)),
            Arrive(f"stats{i}_full"),
        )
    done, split_at = 0, split_columns(pipeline)
    for number, (columns, emulated) in enumerate(fragments(tile_n, split)):
        exps = exponentials(columns, emulated, split.degree)
        steps += (Work(f"exp S{i} {number}", exps), _store_p(pipeline, i, done, columns))
        done += columns
        if done == split_at:
            steps += (Arrive(f"p{i}_full_o{i}_scaled"),)
    if split_at < tile_n:
        steps += (Arrive(f"p{i}_last"),)
    if not inline:
        steps += (Wait(f"stats{i}_empty"),)
    return (*steps, Work(f"row sum {i}", row_sum(tile_n)))


def _probabilities(pipeline: ForwardPipeline, i: int, first: int, columns: int) -> str:
    """Where columns of P_i are: words of tensor memory, or their share of shared memory."""
    size = pipeline.element_bytes
    unit = (1, 4) if pipeline.p_space == "tmem" else (WARPGROUP, 1)
    start, stop = (column * size * unit[0] // unit[1] for column in (first, first + columns))
    return f"p{i}[{start}:{stop}]"


def _store_p(pipeline: ForwardPipeline, i: int, first: int, columns: int) -> Work:
    """A fragment of P to tensor memory, or to shared memory."""
    num_bytes, place = columns * pipeline.element_bytes, _probabilities(pipeline, i, first, columns)
    if pipeline.p_space == "tmem":
        access = TmemAccess(kind="store", cols=num_bytes // 4)
        return Work(f"write P{i}", access, writes=(place,))
    return Work(f"write P{i}", SmemAccess(num_bytes=WARPGROUP * num_bytes), writes=(place,))


def _statistics(i: int) -> str:
    """Where Q tile i's rows have their alphas, sums and maxima."""
    num_bytes = 2 * 4 * WARPGROUP
    return f"row_stats[{i * num_bytes}:{(i + 1) * num_bytes}]"


def _output(pipeline: ForwardPipeline, i: int) -> str:
    """Where O_i waits for its store."""
    num_bytes = WARPGROUP * pipeline.head_dim_v * max(2, pipeline.element_bytes)
    return f"o[{i * num_bytes}:{(i + 1) * num_bytes}]"


def correction_role(pipeline: ForwardPipeline) -> Role:
    """Rescales O between products where a warp needs it; at the end scales and converts O.

    Releasing the other Q tile's statistics slot staggers the two softmax warpgroups.
    """
    tiles = range(pipeline.numerics.q_tiles)
    last = tiles[-1]
    # The first block needs no rescale: its signals only pass through.
    start: Program = (Wait("stats0_full"), Arrive("stats0_empty"))
    if last == 1:
        start += (Wait("stats1_full"),)
    steady: Program = ()
    for i in tiles:
        steady += (
            Wait(f"stats{i}_full"),
            Work(f"vote {i}", Math(alu=2, other=6), reads=(_statistics(i),)),
            *rescale(pipeline.head_dim_v, f"o{i}"),
            Arrive(f"p{i}_full_o{i}_scaled"),
            Arrive(f"stats{last - i}_empty"),
        )
    end: Program = (Arrive("stats1_empty"),) if last == 1 else ()
    for i in tiles:
        end += (Wait(f"stats{i}_full"), Arrive(f"stats{i}_empty"), *_finish_output(pipeline, i))
    return Role(
        name="correction",
        warps=CORRECTION_WARPS,
        registers=registers(pipeline).correction,
        prologue=tuple(Arrive(f"p{i}_full_o{i}_scaled") for i in tiles),
        program=(*start, Loop("kv_tiles", steady, offset=-1), *end),
    )


def _finish_output(pipeline: ForwardPipeline, i: int) -> Program:
    """O_i out of tensor memory, times 1/l, rounded, into shared memory for the store."""
    dim = pipeline.head_dim_v
    steps: Program = (
        Wait(f"o{i}_full"),
        Wait(f"epi{i}_empty"),
        Work(f"read O{i}", TmemAccess(kind="load", cols=dim), reads=(f"o{i}",)),
        Work(f"scale O{i}", Math(fma=dim, alu=dim / 2, other=dim / 8)),
        Work(
            f"write O{i}", SmemAccess(num_bytes=WARPGROUP * dim * 2), writes=(_output(pipeline, i),)
        ),
    )
    freed = () if pipeline.correction == "inline" else (Arrive(f"p{i}_full_o{i}_scaled"),)
    return (*steps, *freed, Arrive(f"epi{i}_full"))


def epilogue_role(pipeline: ForwardPipeline) -> Role:
    """Stores O tiles by TMA."""
    program: Program = ()
    for i in range(pipeline.numerics.q_tiles):
        store = Copy(kind="store", num_bytes=WARPGROUP * pipeline.head_dim_v * 2)
        program += (
            Wait(f"epi{i}_full"),
            Work(f"store O{i}", store, asynchronous=True, reads=(_output(pipeline, i),)),
            Arrive(f"epi{i}_empty", after="tma"),
        )
    if output_over_queries(pipeline):
        program += (Arrive("o_stored", after="tma"),)
    return Role(
        name="epilogue",
        warps=(EPILOGUE_WARP,),
        registers=registers(pipeline).others,
        program=program,
    )
