"""The backward kernel of a CTA pair for head dims (192, 128): one query tile after the other.

dV and dK fill 320 columns of tensor memory, so S, dP and dQ share 192:

    columns   0       64      96  128     192
    S         [P     |            ]
    dP                [dS           |      ]
    dQ                        [            ]

    S dP dK dV dQ | S' dP' dK' dV' dQ' ...

dP waits until S is read, dQ until dK has read dS, and the next S until dQ is drained: the products
of two query tiles do not overlap. Nor is there shared memory for Q and dO both by rows and by
columns: each is loaded twice into one place. Otherwise as `backward_pair`.
"""

from __future__ import annotations

from functools import partial

from fa4.config import BackwardPipeline
from fa4.hardware import Gpu
from fa4.plan.backward_pair import (
    EXCHANGED_BYTES,
    OWN_DS,
    PEERS_DS,
    STATS_STAGES,
    exchange_signals,
    own_columns,
    relay_role,
    words_over,
)
from fa4.plan.backward_single import (
    DQ_STAGES,
    HALF,
    LOAD_WARP,
    MMA_WARP,
    STATS_BYTES,
    TILE,
    compute_role,
    reduce_role,
    store_gradients,
    whole_plan,
)
from fa4.plan.memory import Layout
from fa4.plan.schema import (
    Arrive,
    Copy,
    Loop,
    Math,
    PipelinePlan,
    Program,
    Role,
    Signal,
    SmemAccess,
    TmemAccess,
    Wait,
    Work,
    ring,
)
from fa4.plan.work import WARPGROUP, masking, mma

SERIAL_DIMS = (192, 128)
# The load warp has twelve copies for a query tile, and needs more than 80 for their addresses;
# dQ of a row has 96 columns.
COMPUTE_REGISTERS, REDUCE_REGISTERS, OTHER_REGISTERS = 152, 112, 96
DQ_SLICE_COLS = 16  # of the 96 of a warp: what fits beside the operands


def serial_plan(pipeline: BackwardPipeline, gpu: Gpu) -> PipelinePlan:
    """The plan. Raises ValueError for other head dims, or if it does not fit."""
    if (pipeline.head_dim, pipeline.head_dim_v) != SERIAL_DIMS:
        raise ValueError(
            f"head_dim and head_dim_v must be {SERIAL_DIMS}; "
            f"got {(pipeline.head_dim, pipeline.head_dim_v)}"
        )
    roles = (
        _compute(pipeline),
        reduce_role(pipeline, pipeline.head_dim // 2, DQ_SLICE_COLS, REDUCE_REGISTERS),
        _mma(pipeline),
        _load(pipeline),
        relay_role(OTHER_REGISTERS),
    )
    return whole_plan(pipeline, gpu, _lay_out(pipeline), _signals(pipeline), roles)


def _lay_out(pipeline: BackwardPipeline) -> Layout:
    d, dv, size = pipeline.head_dim, pipeline.head_dim_v, pipeline.element_bytes
    layout = Layout()
    tiles = {"q": HALF * d, "do": HALF * dv, "k": TILE * d, "v": TILE * dv,
             "k_t": 2 * TILE * d // 2, "ds": 2 * TILE * HALF}  # fmt: skip
    for name, elements in tiles.items():
        layout.add(name, "smem", elements * size, align=1024)
    for turned, name in (("q_t", "q"), ("do_t", "do")):
        place = next(b for b in layout.buffers if b.name == name)
        ended = "loaded when the product of the rows has ended, and the other way round"
        layout.alias(turned, "smem", place.start, place.size, {name: ended})
    layout.add("dq_staging", "smem", WARPGROUP * DQ_SLICE_COLS * 4, stages=DQ_STAGES, align=128)
    layout.add("row_stats", "smem", STATS_BYTES, stages=STATS_STAGES, align=128)
    layout.add("barriers", "smem", 8 * 32, align=8)
    layout.add("dv", "tmem", dv)
    layout.add("dk", "tmem", d)
    s = layout.add("s", "tmem", TILE)
    read = "dP waits until S is read, the next S until dQ is drained and so dP read"
    layout.alias("dp", "tmem", s.start + HALF, TILE, {"s": read})
    dp = layout.buffers[-1]
    words_over(layout, s, "p")
    words_over(layout, dp, "ds", "s")
    drained = "dQ waits for dS, and so for dP and S to be read; the next S until dQ is drained"
    dq_start = dp.stop - d // 2
    layout.alias("dq", "tmem", dq_start, d // 2,
                 {"dp": drained, "s": drained, "ds1": "dQ is issued behind dK"})  # fmt: skip
    return layout


def _signals(pipeline: BackwardPipeline) -> tuple[Signal, ...]:
    d, dv, size = pipeline.head_dim, pipeline.head_dim_v, pipeline.element_bytes
    q_bytes, do_bytes = TILE * d * size, TILE * dv * size
    return (
        # K comes with the first Q, V with the first dO; Q and dO come by rows, then by columns.
        *ring("q", "load", "mma", 1, tx_bytes=q_bytes, first_tx_bytes=2 * q_bytes),
        *ring("do", "load", "mma", 1, tx_bytes=do_bytes, first_tx_bytes=2 * do_bytes),
        Signal(name="k_t_full", arrivals={"load": 1}, waiters=("mma",), tx_bytes=2 * q_bytes),
        *ring("row_stats", "load", "compute", STATS_STAGES, tx_bytes=STATS_BYTES, releases=8),
        Signal(name="s_full", arrivals={"mma": 1}, waiters=("compute",)),
        Signal(name="dp_full", arrivals={"mma": 1}, waiters=("compute",)),
        *exchange_signals(),
        Signal(name="dv_full", arrivals={"mma": 1}, waiters=("compute",)),
        Signal(name="dk_full", arrivals={"mma": 1}, waiters=("compute",)),
    )


def _load(pipeline: BackwardPipeline) -> Role:
    """Q and dO by rows for the scores, then by columns for the sums."""
    d, dv, size = pipeline.head_dim, pipeline.head_dim_v, pipeline.element_bytes
    q_bytes, do_bytes, key_bytes = HALF * d * size, HALF * dv * size, TILE * d * size

    def fetch(signal: str, num_bytes: int, *writes: str) -> Program:
        copy = Copy(kind="load", num_bytes=num_bytes, cold=len(writes) > 1)
        return (
            Wait(f"{signal}_empty"),
            Work(f"load {writes[0]}", copy, asynchronous=True, writes=writes),
            Arrive(f"{signal}_full", after="tma"),
        )

    stats = fetch("row_stats", STATS_BYTES, "row_stats")
    turned = (*fetch("q", q_bytes, "q_t"), *fetch("do", do_bytes, "do_t"))
    return Role(
        name="load",
        warps=(LOAD_WARP,),
        registers=OTHER_REGISTERS,
        program=(
            *fetch("q", q_bytes + key_bytes, "q", "k"),
            *stats,
            *fetch("do", do_bytes + TILE * dv * size, "do", "v"),
            Work("load k_t", Copy(kind="load", num_bytes=key_bytes, cold=True), asynchronous=True,
                 writes=("k_t",)),
            Arrive("k_t_full", after="tma"),
            *turned,
            Loop("q_tiles", (*fetch("q", q_bytes, "q"), *stats, *fetch("do", do_bytes, "do"),
                             *turned), offset=-1),
        ),
        closing=(Wait("q_empty"), Wait("do_empty")),
    )  # fmt: skip


def _mma(pipeline: BackwardPipeline) -> Role:
    """The leader's warp issues the products of both CTAs."""
    d, dv, size = pipeline.head_dim, pipeline.head_dim_v, pipeline.element_bytes

    def product(what: str, shape: tuple[int, int, int], in_tmem: bool, *reads: str) -> Work:
        rows, cols, depth = shape
        amount = mma(rows, cols, depth, element_bytes=size, a_in_tmem=in_tmem, cta_group=2)
        return Work(what, amount, asynchronous=True, reads=reads, writes=(what.lower(),))

    def commit(signal: str) -> Arrive:
        return Arrive(signal, after="tensor")

    tile: Program = (
        Wait("q_full"),
        Wait("dq_empty"),
        product("S", (TILE, TILE, d), False, "k", "q"),
        commit("s_full"),
        commit("q_empty"),
        Wait("do_full"),
        Wait("s_read"),
        product("dP", (TILE, TILE, dv), False, "v", "do"),
        commit("dp_full"),
        commit("do_empty"),
        Wait("q_full"),
        Wait("ds_full"),
        product("dK", (TILE, d, TILE), True, "ds0", "ds1", "q_t"),
        commit("q_empty"),
        Wait("do_full"),
        Wait("p_full"),
        product("dV", (TILE, dv, TILE), True, "p0", "p1", "do_t"),
        commit("do_empty"),
        Wait("ds_relayed"),
        product("dQ", (HALF, d, 2 * TILE), False, "ds", "k_t"),
        commit("dq_full"),
    )
    return Role(
        name="mma",
        warps=(MMA_WARP,),
        registers=OTHER_REGISTERS,
        program=(Wait("k_t_full"), Loop("q_tiles", tile), commit("dv_full"), commit("dk_full")),
    )


def _compute(pipeline: BackwardPipeline) -> Role:
    end = store_gradients(pipeline, "v", "k")
    return compute_role(partial(_compute_step, pipeline), COMPUTE_REGISTERS, end)


def _compute_step(pipeline: BackwardPipeline, masked: bool) -> Program:
    """One query tile; each thread has a key and half of the queries."""
    words, stats = HALF * pipeline.element_bytes // 4, ("row_stats",)
    mask: Program = (Work("mask S", masking(HALF)),) if masked else ()
    return (
        Wait("s_full"),
        Wait("row_stats_full"),
        Work("read S", TmemAccess(kind="load", cols=HALF), reads=own_columns("s"),
             by_group=True),
        Arrive("s_read"),
        *mask,
        Work("exp S", Math(mufu=HALF, fma=HALF, alu=HALF / 2, other=HALF / 4), reads=stats),
        Work("write P", TmemAccess(kind="store", cols=words), writes=("p0", "p1"),
             by_group=True),
        Arrive("p_full"),
        Wait("dp_full"),
        Work("read dP", TmemAccess(kind="load", cols=HALF), reads=own_columns("dp"),
             by_group=True),
        Work("dS", Math(fma=2 * HALF, alu=HALF / 2, other=HALF / 4), reads=stats),
        Work("write dS", TmemAccess(kind="store", cols=words), writes=("ds0", "ds1"),
             by_group=True),
        Work("write dS", SmemAccess(num_bytes=EXCHANGED_BYTES), writes=(OWN_DS,)),
        Work("push dS", Copy(kind="dsmem", num_bytes=EXCHANGED_BYTES), asynchronous=True,
             writes=(PEERS_DS,)),
        Arrive("ds_peer", after="dsmem"),
        Arrive("ds_full"),
        Arrive("row_stats_empty"),
    )  # fmt: skip
