"""What each warp role of the published backward kernel does (see `published_backward`)."""

from __future__ import annotations

import math

from fa4.config import BackwardPipeline
from fa4.plan.schema import (
    Arrive,
    Copy,
    Loop,
    Math,
    Program,
    Role,
    Semaphore,
    SmemAccess,
    Sync,
    TmemAccess,
    Wait,
    Work,
)
from fa4.plan.work import masking, mma

TILE = 128
REDUCE_WARPS = (0, 1, 2, 3)
COMPUTE_WARPS = tuple(range(4, 12))
MMA_WARP, LOAD_WARP = 12, 13
# Registers of (reduce, compute, load and MMA) threads (flash_attn.cute).
REGISTERS = {"one": (152, 136, 88), "one causal": (136, 144, 88), "pair": (136, 136, 104)}


def _registers(pipeline: BackwardPipeline) -> tuple[int, int, int]:
    if pipeline.numerics.cta_group == 2:
        return REGISTERS["pair"]
    causal = pipeline.causal and not pipeline.deterministic
    return REGISTERS["one causal" if causal else "one"]


def dq_slices(pipeline: BackwardPipeline) -> tuple[int, int]:
    """(columns, stages) of the dQ staging buffers: flash_attn.cute's, narrower if they must."""
    cols, stages = 32, 2
    if pipeline.numerics.cta_group == 2:
        cols, stages = (16, 2) if pipeline.deterministic else (8, 4)
    return math.gcd(cols, pipeline.head_dim // pipeline.numerics.cta_group), stages


def first_key_bytes(pipeline: BackwardPipeline) -> int:
    """Bytes of K that one CTA loads: a pair takes it twice, by rows for S and by columns for dQ."""
    return TILE * pipeline.head_dim * pipeline.element_bytes * pipeline.numerics.cta_group


def load_role(pipeline: BackwardPipeline) -> Role:
    """Q with K, dO with V, then Q and dO of the later query tiles, and their LSE and D."""
    pair = pipeline.numerics.cta_group == 2
    d, dv = pipeline.head_dim, pipeline.head_dim_v
    row = TILE * pipeline.element_bytes
    part = 2 if pair else 1

    k_bytes, k_buffers = first_key_bytes(pipeline), ("k", "k_t") if pair else ("k",)

    def fetch(signal: str, num_bytes: int, *more: str, cold: bool = False) -> Program:
        copy = Copy(kind="load", num_bytes=num_bytes, cold=cold)
        return (
            Wait(f"{signal}_empty"),
            Work(f"load {signal}", copy, asynchronous=True, writes=(signal, *more)),
            Arrive(f"{signal}_full", after="tma"),
        )

    def query_tile(first: bool) -> Program:
        q_bytes, do_bytes = row * d // part, row * dv // part
        if first:
            steps = fetch("q", q_bytes + k_bytes, *k_buffers, cold=True)
        else:
            steps = fetch("q", q_bytes)
        steps += fetch("row_stats", 2 * TILE * 4)
        if first:
            steps += fetch("do", do_bytes + row * dv, "v", cold=True)
        else:
            steps += fetch("do", do_bytes)
        if pair:
            steps += fetch("q_t", row * d // 2) + fetch("do_t", row * dv // 2)
        return steps

    rest = Loop("q_tiles", query_tile(first=False), offset=-1)
    return Role(
        name="load",
        warps=(LOAD_WARP,),
        registers=_registers(pipeline)[2],
        program=(Wait("dkv_empty"), *query_tile(first=True), rest),
    )


def _product(pipeline: BackwardPipeline, what: str) -> Work:
    """One of the five products, as one CTA sees it."""
    size, group = pipeline.element_bytes, pipeline.numerics.cta_group
    d, dv = pipeline.head_dim, pipeline.head_dim_v
    shapes = {  # rows, columns, depth, A in tensor memory
        "S": (TILE, TILE, d, False),
        "dP": (TILE, TILE, dv, False),
        "dV": (TILE, dv, TILE, True),
        "dK": (TILE, d, TILE, True),
        "dQ": (TILE // group, d, TILE * group, False),
    }
    turned = "_t" if group == 2 else ""  # a pair halves B by rows for S and dP, else by columns
    reads = {"S": ("k", "q"), "dP": ("v", "do"), "dV": ("p", f"do{turned}"),
             "dK": ("ds_t", f"q{turned}"), "dQ": ("ds", f"k{turned}")}  # fmt: skip
    rows, cols, depth, in_tmem = shapes[what]
    amount = mma(rows, cols, depth, element_bytes=size, a_in_tmem=in_tmem, cta_group=group)
    target = what.lower()
    return Work(what, amount, asynchronous=True, reads=reads[what], writes=(target,))


def mma_role(pipeline: BackwardPipeline) -> Role:
    """One warp issues the five products in the order that the shared regions allow."""
    pair = pipeline.numerics.cta_group == 2
    program = _pair_products(pipeline) if pair else _single_products(pipeline)
    return Role(name="mma", warps=(MMA_WARP,), registers=_registers(pipeline)[2], program=program)


def _commit(signal: str) -> Arrive:
    return Arrive(signal, after="tensor")


def _single_products(pipeline: BackwardPipeline) -> Program:
    """S dP dV | S' dK dQ dP' dV' | dK dQ."""
    s, dp, dv, dk, dq = (_product(pipeline, what) for what in ("S", "dP", "dV", "dK", "dQ"))
    scores: Program = (Wait("q_full"), s, _commit("s_full"))
    upstream: Program = (Wait("do_full"), Wait("dq_empty"), dp, _commit("dp_full"))
    values: Program = (Wait("p_full"), dv, _commit("do_empty"))
    keys: Program = (Wait("ds_full"), dk, _commit("q_empty"))
    queries: Program = (dq, _commit("dq_full"), _commit("ds_empty"))
    return (
        *scores,
        *upstream,
        *values,
        Loop("q_tiles", (*scores, *keys, *queries, *upstream, *values), offset=-1),
        *keys,
        *queries,
        _commit("dkv_full"),
    )


def _pair_products(pipeline: BackwardPipeline) -> Program:
    """S dP dV | S' dK dP' dQ dV' | dK dQ; the leader CTA issues for both."""
    s, dp, dv, dk, dq = (_product(pipeline, what) for what in ("S", "dP", "dV", "dK", "dQ"))
    scores: Program = (Wait("q_full"), s, _commit("s_full"), _commit("q_empty"))
    upstream: Program = (Wait("do_full"), dp, _commit("dp_full"), _commit("do_empty"))
    values: Program = (Wait("do_t_full"), Wait("p_full"), dv, _commit("do_t_empty"))
    keys: Program = (Wait("q_t_full"), Wait("ds_full"), dk, _commit("q_t_empty"))
    queries: Program = (Wait("ds_peer"), dq, _commit("dq_full"), _commit("ds_empty"))
    # dQ lies over S and is issued after the next S: compute must have read that one, and only the
    # S after it may overwrite dQ.
    read, drained = Wait("s_read"), Wait("dq_empty")
    steady = (*scores, *keys, *upstream, read, *queries, *values, drained)
    return (
        drained,
        *scores,
        *upstream,
        read,
        *values,
        Loop("q_tiles", steady, offset=-1),
        *keys,
        *queries,
        _commit("dkv_full"),
    )


def compute_role(pipeline: BackwardPipeline) -> Role:
    """Two warpgroups, each half of the columns: P from S, dS from dP; at the end dK and dV."""
    loops = tuple(
        Loop(trip, _compute_step(pipeline, masked))
        for trip, masked in (("masked_tiles", True), ("plain_tiles", False))
    )
    end: Program = (Wait("dkv_full"),)
    # dV and dK leave through the places of operands that are used up.
    pair = pipeline.numerics.cta_group == 2
    staging = {"dV": "v" if pair else "do", "dK": "k" if pair else "q"}
    for what, dim in (("dV", pipeline.head_dim_v), ("dK", pipeline.head_dim)):
        half = TILE * dim  # bytes of a warpgroup's
        cols, place = (
            dim // 2,
            tuple(f"{staging[what]}[{half * i}:{half * (i + 1)}]" for i in (0, 1)),
        )
        end += (
            Work(f"read {what}", TmemAccess(kind="load", cols=cols), reads=(what.lower(),)),
            Work(f"scale {what}", Math(fma=cols, alu=cols / 2, other=cols / 8)),
            Work(f"write {what}", SmemAccess(num_bytes=TILE * dim * 2), writes=place,
                 by_group=True),
            Work(f"store {what}", Copy(kind="store", num_bytes=TILE * dim * 2), asynchronous=True,
                 reads=place, by_group=True),
        )  # fmt: skip
    return Role(
        name="compute",
        warps=COMPUTE_WARPS,
        registers=_registers(pipeline)[1],
        program=(*loops, *end, Arrive("dkv_empty", after="tma")),
    )


def _compute_step(pipeline: BackwardPipeline, masked: bool) -> Program:
    """One query tile; each thread has a key row and half of the query columns."""
    cols, size = TILE // 2, pipeline.element_bytes
    exps = Math(mufu=cols, fma=cols, alu=cols / 2, other=cols / 4)
    products = Math(fma=2 * cols, alu=cols / 2, other=cols / 4)
    store = TmemAccess(kind="store", cols=cols * size // 4)
    pair = pipeline.numerics.cta_group == 2
    sent = TILE * TILE * size // 2
    own, peers = f"ds[0:{sent}]", f"ds[{sent}:{2 * sent}]"  # a CTA's own keys, and the other's
    shared = (own, "ds_exchange") if pair else ("ds",)
    steps: Program = (
        Wait("s_full"),
        Wait("row_stats_full"),
        Work("read S", TmemAccess(kind="load", cols=cols), reads=("s",)),
        Work("sync compute", Sync(fenced=True)),
    )
    steps += (Arrive("s_read"),) if pair else ()
    if masked:
        steps += (Work("mask S", masking(cols)),)
    steps += (
        Work("exp S", exps, reads=("row_stats",)),
        Work("write P", store, writes=("p[0:32]", "p[32:64]"), by_group=True),
        Work("sync compute", Sync(fenced=True)),
        Arrive("p_full"),
        Wait("dp_full"),
        Work("read dP", TmemAccess(kind="load", cols=cols), reads=("dp",)),
        Work("sync compute", Sync(fenced=True)),
        Work("dS", products, reads=("row_stats",)),
        Arrive("row_stats_empty"),
        Wait("ds_empty"),
        Work("write dS", store, writes=("ds_t[0:32]", "ds_t[32:64]"), by_group=True),
        Work("write dS", SmemAccess(num_bytes=TILE * TILE * size), writes=shared),
        Work("sync compute", Sync(fenced=True)),
        Arrive("ds_full"),
    )
    if pair:
        push = Copy(kind="dsmem", num_bytes=sent)
        steps += (
            Work("push dS", push, asynchronous=True, reads=("ds_exchange",), writes=(peers,)),
            Arrive("ds_peer", after="dsmem"),
        )
    return steps


def reduce_role(pipeline: BackwardPipeline) -> Role:
    """dQ out of tensor memory by slices, into staging buffers, added into global memory."""
    cols, _ = dq_slices(pipeline)
    # A CTA of a pair owns half of the rows, spread over all lanes of half as many columns.
    count = pipeline.head_dim // pipeline.numerics.cta_group // cols
    num_bytes = TILE * cols * 4
    # All of dQ goes to registers first, so that its region is free again at once.
    program: Program = (
        Wait("dq_full"),
        Work("read dQ", TmemAccess(kind="load", cols=count * cols), reads=("dq",)),
        Arrive("dq_empty"),
    )
    if pipeline.deterministic:
        program += (Work("wait for turn", Semaphore()),)
    for _ in range(count):
        program += (
            Wait("dq_slot_empty"),
            Work("write dQ", SmemAccess(num_bytes=num_bytes), writes=("dq_staging",)),
            Work("sync reduce", Sync()),
            Work("add dQ", Copy(kind="reduce", num_bytes=num_bytes), asynchronous=True,
                 reads=("dq_staging",)),
            Arrive("dq_slot_empty", after="reduce"),
        )  # fmt: skip
    return Role(
        name="reduce",
        warps=REDUCE_WARPS,
        registers=_registers(pipeline)[0],
        program=(Loop("q_tiles", program),),
    )
