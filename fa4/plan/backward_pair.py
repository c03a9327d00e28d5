"""The backward kernel of a CTA pair: products over both KV tiles, dS exchanged, half of dQ each.

The leader's MMA warp issues every product for both CTAs, so that each holds half of its second
operand: half of the rows of Q and dO for S and dP, half of their columns for dV and dK, and half
of K's columns for dQ. dQ of 64 rows needs their dS of both KV tiles: each CTA stores the other's
rows of its dS straight into the other's shared memory.

    S dP dV | S' dK dP' dQ dV' ... | dK dQ

Tensor memory is full: dQ lies over the half of S that P leaves free. So dQ waits until the S after
its own is read, and the S after that until dQ is drained. What says that S is read says as well
that the dS before it is in shared memory: a compute warp has stored it before. dS may be written
again when dQ has read it in both CTAs, which the commit after dQ tells both.
"""

from __future__ import annotations

from functools import partial

from fa4.config import BackwardPipeline
from fa4.hardware import Gpu
from fa4.plan.backward_single import (
    COMPUTE_REGISTERS,
    DQ_SLICE_COLS,
    DQ_STAGES,
    HALF,
    LOAD_WARP,
    MMA_WARP,
    OTHER_REGISTERS,
    REDUCE_REGISTERS,
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
    Buffer,
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

RELAY_WARP = 14
STATS_STAGES = 2
EXCHANGED_BYTES = TILE * HALF * 2  # of dS, from each CTA to the other
# dS of a CTA's rows for its own keys and for the other's; in memory the leader's keys come first.
OWN_DS, PEERS_DS = f"ds[0:{EXCHANGED_BYTES}]", f"ds[{EXCHANGED_BYTES}:{2 * EXCHANGED_BYTES}]"


def pair_plan(pipeline: BackwardPipeline, gpu: Gpu) -> PipelinePlan:
    """The plan. Raises ValueError for a head dim that is not 128, or what does not fit."""
    if pipeline.head_dim != TILE or pipeline.head_dim_v != TILE:
        raise ValueError(
            f"a pair's head_dim and head_dim_v must be {TILE}: dQ lies over half of S; "
            f"got {pipeline.head_dim} and {pipeline.head_dim_v}"
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
    tiles = {"q": HALF * d, "k": TILE * d, "v": TILE * dv, "do": HALF * dv,
             "q_t": TILE * d // 2, "do_t": TILE * dv // 2, "k_t": 2 * TILE * d // 2,
             "ds": 2 * TILE * HALF}  # fmt: skip
    for name, elements in tiles.items():
        layout.add(name, "smem", elements * size, align=1024)
    slice_bytes = WARPGROUP * DQ_SLICE_COLS * 4
    layout.add("dq_staging", "smem", slice_bytes, stages=DQ_STAGES, align=128)
    layout.add("row_stats", "smem", STATS_BYTES, stages=STATS_STAGES, align=128)
    layout.add("barriers", "smem", 8 * 32, align=8)
    s, dp = layout.add("s", "tmem", TILE), layout.add("dp", "tmem", TILE)
    layout.add("dv", "tmem", dv)
    layout.add("dk", "tmem", d)
    words_over(layout, s, "p")
    words_over(layout, dp, "ds")
    safe = {"s": "dQ waits until the next S is read, the S after that until dQ is drained"}
    layout.alias("dq", "tmem", s.start + HALF, d // 2, safe)
    return layout


def words_over(layout: Layout, scores: Buffer, name: str, *more: str) -> None:
    """P or dS of each warpgroup over the first half of S or dP, whose second half stays free.

    more: what else lies there, and has been read before.
    """
    own = "a thread writes only over what it alone has read"
    for half in (0, 1):
        words = HALF // 2
        overlaps = {scores.name: own} | dict.fromkeys(more, "is read before dP is written")
        layout.alias(f"{name}{half}", "tmem", scores.start + half * words, words, overlaps)


def _signals(pipeline: BackwardPipeline) -> tuple[Signal, ...]:
    d, dv, size = pipeline.head_dim, pipeline.head_dim_v, pipeline.element_bytes
    q_bytes, do_bytes = TILE * d * size, TILE * dv * size
    return (
        # The first Q brings K along, the first dO V, and the first Q by columns K by columns.
        *ring("q", "load", "mma", 1, tx_bytes=q_bytes, first_tx_bytes=2 * q_bytes),
        *ring("q_t", "load", "mma", 1, tx_bytes=q_bytes, first_tx_bytes=2 * q_bytes),
        *ring("do", "load", "mma", 1, tx_bytes=do_bytes, first_tx_bytes=2 * do_bytes),
        *ring("do_t", "load", "mma", 1, tx_bytes=do_bytes),
        *ring("row_stats", "load", "compute", STATS_STAGES, tx_bytes=STATS_BYTES, releases=8),
        Signal(name="s_full", arrivals={"mma": 1}, waiters=("compute",)),
        Signal(name="dp_full", arrivals={"mma": 1}, waiters=("compute",)),
        *exchange_signals(),
        Signal(name="ds_empty", arrivals={"mma": 1}, waiters=("compute",), free=1),
        Signal(name="dv_full", arrivals={"mma": 1}, waiters=("compute",)),
        Signal(name="dk_full", arrivals={"mma": 1}, waiters=("compute",)),
    )


def exchange_signals() -> tuple[Signal, ...]:
    """What both CTAs of a pair tell the leader, and dS on its way from one to the other."""
    compute, reduce = {"compute": 16}, {"reduce": 8}
    return (
        Signal(name="s_read", arrivals=compute, waiters=("mma",), remote=True),
        Signal(name="p_full", arrivals=compute, waiters=("mma",), remote=True),
        Signal(name="ds_full", arrivals=compute, waiters=("mma",), remote=True),
        Signal(name="ds_peer", arrivals={"compute": 1}, waiters=("relay",),
               tx_bytes=EXCHANGED_BYTES),
        Signal(name="ds_relayed", arrivals={"relay": 2}, waiters=("mma",), remote=True),
        Signal(name="dq_full", arrivals={"mma": 1}, waiters=("reduce",)),
        Signal(name="dq_empty", arrivals=reduce, waiters=("mma",), free=1, remote=True),
        Signal(name="dq_slot_empty", arrivals={"reduce": 1}, waiters=("reduce",), kind="group",
               free=DQ_STAGES),
    )  # fmt: skip


def _load(pipeline: BackwardPipeline) -> Role:
    """Operands in the order in which the products before them free their places."""
    d, dv, size = pipeline.head_dim, pipeline.head_dim_v, pipeline.element_bytes
    num_bytes = {"q": HALF * d * size, "q_t": HALF * d * size, "do": HALF * dv * size,
                 "do_t": HALF * dv * size, "row_stats": STATS_BYTES}  # fmt: skip
    keys = {"q": ("k", TILE * d * size), "do": ("v", TILE * dv * size),
            "q_t": ("k_t", TILE * d * size)}  # fmt: skip

    def fetch(what: str, first: bool) -> Program:
        more, extra = keys[what] if first and what in keys else ("", 0)
        copy = Copy(kind="load", num_bytes=num_bytes[what] + extra, cold=bool(more))
        return (
            Wait(f"{what}_empty"),
            Work(f"load {what}", copy, asynchronous=True, writes=(what, more) if more else (what,)),
            Arrive(f"{what}_full", after="tma"),
        )

    def tile(first: bool) -> Program:
        order = ("q", "row_stats", "do", "do_t", "q_t")
        return tuple(step for what in order for step in fetch(what, first))

    operands = ("q", "do", "do_t", "q_t")
    return Role(
        name="load",
        warps=(LOAD_WARP,),
        registers=OTHER_REGISTERS,
        program=(*tile(True), Loop("q_tiles", tile(False), offset=-1)),
        closing=tuple(Wait(f"{what}_empty") for what in operands),
    )


def _product(pipeline: BackwardPipeline, what: str) -> Work:
    """One of the five products, as one CTA sees it."""
    d, dv, size = pipeline.head_dim, pipeline.head_dim_v, pipeline.element_bytes
    shapes = {  # rows, columns, depth, A in tensor memory
        "S": (TILE, TILE, d, False),
        "dP": (TILE, TILE, dv, False),
        "dV": (TILE, dv, TILE, True),
        "dK": (TILE, d, TILE, True),
        "dQ": (HALF, d, 2 * TILE, False),
    }
    reads = {"S": ("k", "q"), "dP": ("v", "do"), "dV": ("p0", "p1", "do_t"),
             "dK": ("ds0", "ds1", "q_t"), "dQ": ("ds", "k_t")}  # fmt: skip
    rows, cols, depth, in_tmem = shapes[what]
    amount = mma(rows, cols, depth, element_bytes=size, a_in_tmem=in_tmem, cta_group=2)
    return Work(what, amount, asynchronous=True, reads=reads[what], writes=(what.lower(),))


def _mma(pipeline: BackwardPipeline) -> Role:
    """The leader's warp issues the products of both CTAs."""
    s, dp, dv, dk, dq = (_product(pipeline, what) for what in ("S", "dP", "dV", "dK", "dQ"))

    def commit(signal: str) -> Arrive:
        return Arrive(signal, after="tensor")

    scores: Program = (s, commit("s_full"), commit("q_empty"))
    upstream: Program = (Wait("do_full"), dp, commit("dp_full"), commit("do_empty"))
    values: Program = (Wait("do_t_full"), Wait("p_full"), dv, commit("do_t_empty"))
    keys: Program = (Wait("q_t_full"), Wait("ds_full"), dk, commit("q_t_empty"))
    queries: Program = (Wait("s_read"), Wait("ds_relayed"), dq, commit("dq_full"),
                        commit("ds_empty"))  # fmt: skip
    steady = (Wait("q_full"), Wait("dq_empty"), *scores, *keys, *upstream, *queries, *values)
    return Role(
        name="mma",
        warps=(MMA_WARP,),
        registers=OTHER_REGISTERS,
        program=(
            Wait("q_full"),
            *scores,
            Wait("s_read"),  # before dP, after which the next arrival may come
            *upstream,
            *values,
            Loop("q_tiles", steady, offset=-1),
            commit("dv_full"),
            *keys,
            commit("dk_full"),
            Wait("dq_empty"),
            *queries,
        ),
    )


def relay_role(registers: int) -> Role:
    """Tells the leader that this CTA's half of dS from the other one is here."""
    return Role(
        name="relay",
        warps=(RELAY_WARP,),
        registers=registers,
        program=(Loop("q_tiles", (Wait("ds_peer"), Arrive("ds_relayed"))),),
    )


def _compute(pipeline: BackwardPipeline) -> Role:
    stored = Arrive("s_read")  # no further S: the last dS is stored
    end = (stored, *store_gradients(pipeline, "v", "k"))
    return compute_role(partial(_compute_step, pipeline), COMPUTE_REGISTERS, end)


def own_columns(name: str) -> tuple[str, str]:
    """The columns of S or dP that each compute warpgroup has."""
    return f"{name}[0:32,64:96]", f"{name}[32:64,96:128]"


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
        Arrive("ds_full"),
        Wait("ds_empty"),
        Work("write dS", SmemAccess(num_bytes=EXCHANGED_BYTES), writes=(OWN_DS,)),
        Work("push dS", Copy(kind="dsmem", num_bytes=EXCHANGED_BYTES), asynchronous=True,
             writes=(PEERS_DS,)),
        Arrive("ds_peer", after="dsmem"),
        Arrive("row_stats_empty"),
    )  # fmt: skip
