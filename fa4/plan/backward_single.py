"""The backward kernel of one CTA: no barrier among its compute warps, dQ added by each warp alone.

A CTA owns a KV tile and walks the query tiles m of the query heads that share it:

    S dP dV | S' dK dQ dP' dV' ... | dK dQ

Each compute warpgroup has half of the columns (queries) of S^T, and packs P into the first half of
those, as dS over dP: a thread overwrites what it alone has read, so that nobody waits for others.
Where tensor memory has room dQ has columns of its own; else it lies over dP, and the next dP waits
until it is drained. What was committed later tells that earlier products have ended: dP of a tile
is complete only after dQ of the tile before has read its dS, so no signal says so again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import gcd

from fa4.config import BackwardPipeline
from fa4.hardware import Gpu
from fa4.plan.memory import Layout, require_fit
from fa4.plan.schema import (
    Arrive,
    Copy,
    Loop,
    Math,
    PipelinePlan,
    Program,
    Role,
    Semaphore,
    Signal,
    SmemAccess,
    Sync,
    TmemAccess,
    Wait,
    Work,
    ring,
)
from fa4.plan.work import WARPGROUP, masking, mma

TILE = WARPGROUP  # rows and keys of a tile: the lanes of tensor memory
HALF = TILE // 2  # queries of a tile that a compute warpgroup has
COMPUTE_WARPS, REDUCE_WARPS = tuple(range(8)), tuple(range(8, 12))
MMA_WARP, LOAD_WARP = 12, 13
# 2 x 144 + 144 + 80 = 512 registers over the four warpgroups: all that there are.
COMPUTE_REGISTERS, REDUCE_REGISTERS, OTHER_REGISTERS = 144, 144, 80
DQ_STAGES = 2
DQ_SLICE_COLS = 32
STATS_BYTES = 2 * TILE * 4  # -LSE and -D of a tile's rows


def single_plan(pipeline: BackwardPipeline, gpu: Gpu) -> PipelinePlan:
    """The plan. Raises ValueError for a head dim above 128, or with the sum of what exceeds."""
    if pipeline.head_dim > TILE:
        raise ValueError(
            f"head_dim must be at most {TILE}: dQ lies over a tile of dP; got {pipeline.head_dim}"
        )
    roles = (_compute(pipeline), _reduce(pipeline), _mma(pipeline), _load(pipeline))
    return whole_plan(pipeline, gpu, _lay_out(pipeline), _signals(pipeline), roles)


def whole_plan(
    pipeline: BackwardPipeline, gpu: Gpu, layout: Layout, signals: tuple[Signal, ...],
    roles: tuple[Role, ...],
) -> PipelinePlan:  # fmt: skip
    """A plan of its parts. Raises ValueError with the sum of what does not fit."""
    require_fit(layout.buffers, "tmem", gpu.tmem_cols, gpu.name)
    require_fit(layout.buffers, "smem", gpu.smem_bytes_per_cta, gpu.name)
    return PipelinePlan(
        name=f"backward d{pipeline.head_dim} cta_group {pipeline.numerics.cta_group} of fa4",
        roles=roles,
        signals=signals,
        buffers=tuple(layout.buffers),
        cta_group=pipeline.numerics.cta_group,
        trips=("q_tiles", "masked_tiles", "plain_tiles"),
        persistent=False,
    )


def dq_over_dp(pipeline: BackwardPipeline) -> bool:
    """Is there no room for dQ in tensor memory but over dP?"""
    return 2 * TILE + pipeline.head_dim_v + 2 * pipeline.head_dim > 512


def dq_slice_cols(head_dim: int) -> int:
    """Columns of dQ that a warp hands over at a time."""
    return gcd(DQ_SLICE_COLS, head_dim)


def query_stages(pipeline: BackwardPipeline) -> int:
    """Of Q and of the row statistics: the next S needs its Q while dK still reads the last one."""
    del pipeline
    return 2


def _lay_out(pipeline: BackwardPipeline) -> Layout:
    d, dv, size = pipeline.head_dim, pipeline.head_dim_v, pipeline.element_bytes
    layout, tile = Layout(), TILE * size
    stages = query_stages(pipeline)
    layout.add("q", "smem", tile * d, stages=stages, align=1024)
    layout.add("k", "smem", tile * d, align=1024)
    layout.add("v", "smem", tile * dv, align=1024)
    layout.add("do", "smem", tile * dv, align=1024)
    layout.add("ds", "smem", tile * TILE, align=1024)
    slice_bytes = WARPGROUP * dq_slice_cols(d) * 4
    layout.add("dq_staging", "smem", slice_bytes, stages=DQ_STAGES, align=128)
    layout.add("row_stats", "smem", STATS_BYTES, stages=stages, align=128)
    layout.add("barriers", "smem", 8 * 20, align=8)
    s, dp = layout.add("s", "tmem", TILE), layout.add("dp", "tmem", TILE)
    layout.add("dv", "tmem", dv)
    layout.add("dk", "tmem", d)
    for half in (0, 1):
        words, own = HALF // 2, half * HALF
        layout.alias(f"p{half}", "tmem", s.start + own, words,
                     {"s": "a thread writes only over what it alone has read"})  # fmt: skip
        layout.alias(f"ds{half}", "tmem", dp.start + own, words,
                     {"dp": "a thread writes only over what it alone has read"})  # fmt: skip
    if dq_over_dp(pipeline):
        drained = "the next dP waits until dQ is drained, and dQ until dK has read dS"
        over = ("dp", "ds0", *(("ds1",) if d > HALF else ()))
        layout.alias("dq", "tmem", dp.start, d, dict.fromkeys(over, drained))
    else:
        layout.add("dq", "tmem", d)
    return layout


def _signals(pipeline: BackwardPipeline) -> tuple[Signal, ...]:
    d, dv, size = pipeline.head_dim, pipeline.head_dim_v, pipeline.element_bytes
    stages = query_stages(pipeline)
    return (
        # A tile's first Q brings K along and its first dO brings V.
        *ring("q", "load", "mma", stages, tx_bytes=TILE * d * size, first_tx_bytes=TILE * d * size),
        *ring("do", "load", "mma", 1, tx_bytes=TILE * dv * size, first_tx_bytes=TILE * dv * size),
        *ring("row_stats", "load", "compute", stages, tx_bytes=STATS_BYTES, releases=8),
        Signal(name="s_full", arrivals={"mma": 1}, waiters=("compute",)),
        Signal(name="p_full", arrivals={"compute": 8}, waiters=("mma",)),
        Signal(name="dp_full", arrivals={"mma": 1}, waiters=("compute",)),
        Signal(name="ds_full", arrivals={"compute": 8}, waiters=("mma",)),
        Signal(name="dq_full", arrivals={"mma": 1}, waiters=("reduce",)),
        Signal(name="dq_empty", arrivals={"reduce": 4}, waiters=("mma",), free=1),
        Signal(name="dq_slot_empty", arrivals={"reduce": 1}, waiters=("reduce",), kind="group",
               free=DQ_STAGES),
        Signal(name="dv_full", arrivals={"mma": 1}, waiters=("compute",)),
        Signal(name="dk_full", arrivals={"mma": 1}, waiters=("compute",)),
    )  # fmt: skip


def _load(pipeline: BackwardPipeline) -> Role:
    """Q with K, dO with V, then Q and dO of the later query tiles, and their LSE and D."""
    q_bytes = TILE * pipeline.head_dim * pipeline.element_bytes
    do_bytes = TILE * pipeline.head_dim_v * pipeline.element_bytes

    def fetch(what: str, num_bytes: int, more: str = "") -> Program:
        copy = Copy(kind="load", num_bytes=num_bytes * (2 if more else 1), cold=bool(more))
        writes = (what, more) if more else (what,)
        return (
            Wait(f"{what}_empty"),
            Work(f"load {what}", copy, asynchronous=True, writes=writes),
            Arrive(f"{what}_full", after="tma"),
        )

    first = (
        *fetch("q", q_bytes, "k"), *fetch("row_stats", STATS_BYTES), *fetch("do", do_bytes, "v")
    )  # fmt: skip
    later = (*fetch("q", q_bytes), *fetch("row_stats", STATS_BYTES), *fetch("do", do_bytes))
    return Role(
        name="load",
        warps=(LOAD_WARP,),
        registers=OTHER_REGISTERS,
        program=(*first, Loop("q_tiles", later, offset=-1)),
        closing=(*(Wait("q_empty") for _ in range(query_stages(pipeline))), Wait("do_empty")),
    )


def _product(pipeline: BackwardPipeline, what: str) -> Work:
    """One of the five products."""
    d, dv, size = pipeline.head_dim, pipeline.head_dim_v, pipeline.element_bytes
    shapes = {  # rows, columns, depth, A in tensor memory
        "S": (TILE, TILE, d, False),
        "dP": (TILE, TILE, dv, False),
        "dV": (TILE, dv, TILE, True),
        "dK": (TILE, d, TILE, True),
        "dQ": (TILE, d, TILE, False),
    }
    reads = {"S": ("k", "q"), "dP": ("v", "do"), "dV": ("p0", "p1", "do"),
             "dK": ("ds0", "ds1", "q"), "dQ": ("ds", "k")}  # fmt: skip
    rows, cols, depth, in_tmem = shapes[what]
    amount = mma(rows, cols, depth, element_bytes=size, a_in_tmem=in_tmem)
    return Work(what, amount, asynchronous=True, reads=reads[what], writes=(what.lower(),))


def _mma(pipeline: BackwardPipeline) -> Role:
    """One warp issues the five products in the order that the shared regions allow."""
    s, dp, dv, dk, dq = (_product(pipeline, what) for what in ("S", "dP", "dV", "dK", "dQ"))

    def commit(signal: str) -> Arrive:
        return Arrive(signal, after="tensor")

    drained: Program = (Wait("dq_empty"),)
    before_dp, before_dq = (drained, ()) if dq_over_dp(pipeline) else ((), drained)
    scores: Program = (Wait("q_full"), s, commit("s_full"))
    upstream: Program = (Wait("do_full"), *before_dp, dp, commit("dp_full"))
    values: Program = (Wait("p_full"), dv, commit("do_empty"))
    keys: Program = (dk, commit("q_empty"))
    queries: Program = (*before_dq, dq, commit("dq_full"))
    steady = (*scores, Wait("ds_full"), *keys, *queries, *upstream, *values)
    return Role(
        name="mma",
        warps=(MMA_WARP,),
        registers=OTHER_REGISTERS,
        program=(
            *scores,
            *upstream,
            *values,
            Loop("q_tiles", steady, offset=-1),
            commit("dv_full"),
            Wait("ds_full"),
            *keys,
            commit("dk_full"),
            *queries,
        ),
    )


def _compute(pipeline: BackwardPipeline) -> Role:
    end = store_gradients(pipeline, "do", "q")
    return compute_role(partial(_compute_step, pipeline), COMPUTE_REGISTERS, end)


def compute_role(step: Callable[[bool], Program], registers: int, end: Program) -> Role:
    """Two warpgroups, each half of the queries: P from S, dS from dP; at the end dV and dK.

    step: of a query tile, with a mask or without.
    """
    loops = (Loop("masked_tiles", step(True)), Loop("plain_tiles", step(False)))
    return Role(name="compute", warps=COMPUTE_WARPS, registers=registers, program=(*loops, *end))


def store_gradients(pipeline: BackwardPipeline, dv_place: str, dk_place: str) -> Program:
    """dV and dK leave through the places of operands that are used up."""
    program: Program = ()
    for what, dim, place in (
        ("dV", pipeline.head_dim_v, dv_place),
        ("dK", pipeline.head_dim, dk_place),
    ):
        cols, num_bytes = dim // 2, TILE * dim * pipeline.element_bytes
        program += (
            Wait(f"{what.lower()}_full"),
            Work(f"read {what}", TmemAccess(kind="load", cols=cols), reads=(what.lower(),)),
            Work(f"scale {what}", Math(fma=cols, alu=cols / 2, other=cols / 8)),
            Work(f"write {what}", SmemAccess(num_bytes=num_bytes), writes=(place,)),
            Work("sync compute", Sync(fenced=True)),
            Work(f"store {what}", Copy(kind="store", num_bytes=num_bytes), reads=(place,)),
        )
    return program


def _own(name: str) -> tuple[str, str]:
    """The columns of S or dP that each compute warpgroup has."""
    return f"{name}[0:64]", f"{name}[64:128]"


def _compute_step(pipeline: BackwardPipeline, masked: bool) -> Program:
    """One query tile; each thread has a key and half of the queries."""
    words, stats = HALF * pipeline.element_bytes // 4, ("row_stats",)
    mask: Program = (Work("mask S", masking(HALF)),) if masked else ()
    return (
        Wait("s_full"),
        Wait("row_stats_full"),
        Work("read S", TmemAccess(kind="load", cols=HALF), reads=_own("s"), by_group=True),
        *mask,
        Work("exp S", Math(mufu=HALF, fma=HALF, alu=HALF / 2, other=HALF / 4), reads=stats),
        Work("write P", TmemAccess(kind="store", cols=words), writes=("p0", "p1"), by_group=True),
        Arrive("p_full"),
        Wait("dp_full"),
        Work("read dP", TmemAccess(kind="load", cols=HALF), reads=_own("dp"), by_group=True),
        Work("dS", Math(fma=2 * HALF, alu=HALF / 2, other=HALF / 4), reads=stats),
        Work(
            "write dS", TmemAccess(kind="store", cols=words), writes=("ds0", "ds1"), by_group=True
        ),
        Work(
            "write dS",
            SmemAccess(num_bytes=TILE * TILE * pipeline.element_bytes),
            writes=("ds",),
        ),
        Arrive("ds_full"),
        Arrive("row_stats_empty"),
    )


def _reduce(pipeline: BackwardPipeline) -> Role:
    d = pipeline.head_dim
    return reduce_role(pipeline, d, dq_slice_cols(d), REDUCE_REGISTERS)


def reduce_role(pipeline: BackwardPipeline, dq_cols: int, cols: int, registers: int) -> Role:
    """dQ out of tensor memory and, by slices of `cols`, added into global memory; each warp for
    itself. dq_cols: that a warp has."""
    num_bytes = TILE * cols * 4
    turn: Program = (Work("wait for turn", Semaphore()),) if pipeline.deterministic else ()
    program: Program = (
        Wait("dq_full"),
        # All of dQ goes to registers first, so that its region is free again at once.
        Work("read dQ", TmemAccess(kind="load", cols=dq_cols), reads=("dq",)),
        Arrive("dq_empty"),
        *turn,
    )
    for _ in range(dq_cols // cols):
        program += (
            Wait("dq_slot_empty"),
            Work("write dQ", SmemAccess(num_bytes=num_bytes), writes=("dq_staging",)),
            Work("add dQ", Copy(kind="reduce", num_bytes=num_bytes), asynchronous=True,
                 reads=("dq_staging",)),
            Arrive("dq_slot_empty", after="reduce"),
        )  # fmt: skip
    return Role(
        name="reduce", warps=REDUCE_WARPS, registers=registers, program=(Loop("q_tiles", program),)
    )
