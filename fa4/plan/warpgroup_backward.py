"""The backward kernel before tensor memory: two consumer warpgroups and a producer warp.

A work tile is a KV tile of 128 keys, of which each warpgroup has 64, and walks the query tiles m of
the query heads that share it. Scores are transposed, so that a warpgroup's P^T and dS^T are
operands of its dV and dK as they come out of the registers:

    S = K Q^T    dP = V dO^T    dV += P^T dO    dK += dS^T Q    dQ = dS K

dQ sums over all keys: both warpgroups write their dS to shared memory, and each computes one half
of dQ, of the columns or, of tiles with 128 queries, of the rows. It leaves its half in shared
memory, and a warp adds it to global memory in float32, which nobody waits for.

dQ of m is computed a tile later, behind S of m + 1: by then the other warpgroup has long written
its dS, so that neither waits, and the tensor core has work under the exponentials. dS has two
places, so that they meet once per tile: who writes dS of m + 2 has met the other after its dQ of m.

CTAs stay and draw their work tiles (`work_queue`). The next one's K, of which there are two places,
Q, dO and V come while this one ends, and its first S is computed beside the last dQ. dV leaves over
dS, dK over K, by the warps that add dQ.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa4.config import PRODUCT_DEPTH_BYTES, WARPGROUP_ROWS, require
from fa4.hardware import Gpu
from fa4.plan.memory import Layout, require_fit
from fa4.plan.memory_rules import RUN_BYTES, SLOT_ALIGN_BYTES, TILE_ALIGN_BYTES, whole_runs
from fa4.plan.schema import (
    Arrive,
    Buffer,
    Copy,
    Loop,
    PipelinePlan,
    Program,
    Role,
    Semaphore,
    Signal,
    SmemAccess,
    Sync,
    Turns,
    Wait,
    Work,
)
from fa4.plan.warpgroup_code import unpacked
from fa4.plan.work import WARPGROUP, mma
from fa4.plan.work_queue import PLACES, draw_number, queue_signals, read_number

CONSUMERS = 2
STAGES = 2  # of Q, dO and dS, and of K
WORK_WORDS = 8  # of 4 bytes, that describe a work tile
KEY_RUN_COLS = 16  # of K, the fewest that are swizzled
NARROW, TALL = WARPGROUP_ROWS, 2 * WARPGROUP_ROWS  # queries of a tile
RELEASES = 4  # arrivals of a warpgroup that has used a slot: one lane of each warp
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24
BARRIER_BYTES = 8 * 40
FLOAT_BYTES = 4
# CTAs of each SM, at least, that the last heads have whose longest work tiles start first: of heads
# by themselves, and of heads that share keys, of which more queries lie in L2 at a time. By a model
# of random calls, lab/benchmarks/gradient_order.py (docs/hopper.md).
LAST_ROUNDS = 2, 1
LOAD_WARP = CONSUMERS * WARPGROUP // 32


@dataclass(frozen=True, kw_only=True)
class WarpgroupBackwardPipeline:
    """A backward kernel before tensor memory: two warpgroups, each with 64 keys of a KV tile.

    Head dimensions are those of the tiles in shared memory; cols, cols_v: of these columns, those
    that products take but for dQ, all for None. dq_cols: columns of dQ, likewise. tile_m: queries
    of a tile, 64 or 128. deterministic: CTAs add to a dQ tile one after the other. scheduler:
    "naive", or "spt" (shortest first).
    """

    head_dim: int = 128
    head_dim_v: int = 128
    cols: int | None = None
    cols_v: int | None = None
    dq_cols: int | None = None
    element_bytes: int = 2
    causal: bool = False
    tile_m: int = 64
    deterministic: bool = False
    scheduler: str = "naive"

    def __post_init__(self) -> None:
        """Check ranges."""
        for name in ("head_dim", "head_dim_v"):
            value = getattr(self, name)
            require(value in (64, 128), f"{name} must be 64 or 128", value)
        depth = PRODUCT_DEPTH_BYTES // self.element_bytes
        for name, cols, most in (
            ("cols", self.cols, self.head_dim),
            ("cols_v", self.cols_v, self.head_dim_v),
            ("dq_cols", self.dq_cols, self.head_dim),
        ):
            if cols is not None:
                require(
                    0 < cols <= most and cols % depth == 0,
                    f"{name} must be a multiple of {depth}, at most {most}",
                    cols,
                )
        require(self.element_bytes == 2, "element_bytes must be 2", self.element_bytes)
        require(self.tile_m in (NARROW, TALL), f"tile_m must be {NARROW} or {TALL}", self.tile_m)
        choices = ("naive", "spt")
        require(self.scheduler in choices, f"scheduler must be one of {', '.join(choices)}",
                self.scheduler)  # fmt: skip

    @property
    def product_dims(self) -> tuple[int, int]:
        """Columns of K and of V that products take, but for dQ."""
        return self.cols or self.head_dim, self.cols_v or self.head_dim_v

    @property
    def dq_dim(self) -> int:
        """Columns of dQ, those of K."""
        return self.dq_cols or self.head_dim

    @property
    def halves_end_inside(self) -> bool:
        """Do the warpgroups' halves of dQ's columns meet inside a run of 64?"""
        return self.tile_m == NARROW < self.head_dim > self.dq_dim

    @property
    def key_dim(self) -> int:
        """Columns of K's tile in shared memory."""
        return self.dq_dim if self.halves_end_inside else self.head_dim

    @property
    def key_run_bytes(self) -> int:
        """Of a row of K's tile that lie together.

        The fewest that are swizzled where halves end inside more: they are loaded more slowly, but
        K only once.
        """
        return KEY_RUN_COLS * self.element_bytes if self.halves_end_inside else RUN_BYTES

    @property
    def tile_n(self) -> int:
        """Keys of a KV tile."""
        return 2 * WARPGROUP_ROWS


def warpgroup_backward_plan(pipeline: WarpgroupBackwardPipeline, gpu: Gpu) -> PipelinePlan:
    """The plan. Raises ValueError, with the sum of what exceeds, if it does not fit the machine."""
    buffers = _lay_out(pipeline)
    require_fit(buffers, "smem", gpu.smem_bytes_per_cta, gpu.name)
    turns = None
    if pipeline.deterministic:
        order = "descending" if pipeline.scheduler == "spt" else "ascending"
        turns = Turns(order=order, launches=(order,))
    return PipelinePlan(
        name=f"backward d{pipeline.head_dim}, {CONSUMERS} warpgroups",
        roles=(
            *(_consumer(pipeline, i) for i in range(CONSUMERS)),
            _load(pipeline),
            *(_reduce(pipeline, i) for i in range(CONSUMERS)),
        ),
        signals=tuple(_signals(pipeline)),
        buffers=tuple(buffers),
        trips=("q_tiles",),
        turns=turns,
    )


def stats_bytes(pipeline: WarpgroupBackwardPipeline) -> int:
    """One of the two numbers of each query of a tile."""
    return pipeline.tile_m * FLOAT_BYTES


def fastest_tile(head_dim: int, head_dim_v: int) -> int:
    """Queries of a tile where scores need not be kept beside P."""
    return TALL if head_dim == head_dim_v == 64 else NARROW


def fewest_dq_cols(head_dim: int, tile_m: int, *, ragged: bool) -> int:
    """Columns of which dQ is computed: as few as divide among the warpgroups.

    Each has 64 rows of tiles with 128 queries, else a half of the columns, in whole runs of 16 of
    K's. ragged: a run that no key has must not be loaded where sequences have
    lengths of their own, as tensor maps do not begin at a tensor then.
    """
    cols = -(-head_dim // KEY_RUN_COLS) * KEY_RUN_COLS
    if tile_m == TALL:
        return cols
    halves = CONSUMERS * KEY_RUN_COLS * -(-cols // (CONSUMERS * KEY_RUN_COLS))
    if cols > WARPGROUP_ROWS and not (ragged and halves > cols):
        return halves
    return whole_runs(cols)


def dq_columns(pipeline: WarpgroupBackwardPipeline) -> int:
    """Columns of a warpgroup's 64 rows of dQ: all, or a half if there are no more rows."""
    return pipeline.dq_dim * pipeline.tile_m // (CONSUMERS * WARPGROUP_ROWS)


def _dq_bytes(pipeline: WarpgroupBackwardPipeline) -> int:
    """A warpgroup's part of dQ of a tile, in float32."""
    return WARPGROUP_ROWS * dq_columns(pipeline) * FLOAT_BYTES


def _tile_bytes(pipeline: WarpgroupBackwardPipeline) -> dict[str, int]:
    """Bytes of a tile in shared memory; of k, v and ds a warpgroup's part."""
    d, dv, size = pipeline.head_dim, pipeline.head_dim_v, pipeline.element_bytes
    return {
        "q": pipeline.tile_m * d * size,
        "do": pipeline.tile_m * dv * size,
        "k": WARPGROUP_ROWS * pipeline.key_dim * size,
        "v": WARPGROUP_ROWS * dv * size,
        "ds": WARPGROUP_ROWS * pipeline.tile_m * size,
    }


def _lay_out(pipeline: WarpgroupBackwardPipeline) -> list[Buffer]:
    layout, size = Layout(), _tile_bytes(pipeline)
    for name in ("q", "do"):
        layout.add(name, "smem", size[name], stages=STAGES, align=TILE_ALIGN_BYTES)
    for name, stages in (("k", STAGES), ("v", 1), ("ds", STAGES)):
        for i in range(CONSUMERS):
            layout.add(f"{name}{i}", "smem", size[name], stages=stages, align=TILE_ALIGN_BYTES)
    for i in range(CONSUMERS):
        layout.add(f"dq{i}", "smem", _dq_bytes(pipeline), align=SLOT_ALIGN_BYTES)
    for name in ("lse", "d"):
        layout.add(name, "smem", stats_bytes(pipeline), stages=STAGES, align=SLOT_ALIGN_BYTES)
    layout.add("barriers", "smem", BARRIER_BYTES, align=8)
    layout.add("work", "smem", 4 * WORK_WORDS, stages=PLACES, align=SLOT_ALIGN_BYTES)
    return layout.buffers


def _signals(pipeline: WarpgroupBackwardPipeline) -> list[Signal]:
    """Rings of Q and dO with their statistics; what each warpgroup waits for by itself; meetings.

    The first Q brings K along, the first dO brings V.
    """
    names, size = [f"consumer{i}" for i in range(CONSUMERS)], _tile_bytes(pipeline)
    releases = dict.fromkeys(names, RELEASES)
    readers = releases | {f"reduce{i}": 1 for i in range(CONSUMERS)}
    signals = [
        *(Signal(name=name, arrivals=releases, waiters=tuple(names)) for name in ("met", "left")),
        *queue_signals(readers),
        *(x for name in ("q", "do")
          for x in _loads(name, STAGES, size[name] + stats_bytes(pipeline), names, releases)),
    ]  # fmt: skip
    for i, name in enumerate(names):
        sender = {f"reduce{i}": 1}
        signals += [
            *_loads(f"k{i}", STAGES, size["k"], names, sender),
            *_loads(f"v{i}", 1, size["v"], [name], {name: RELEASES}),
        ]
        products = ("s", "dp", "dv", "dq", "dk")
        signals += [
            Signal(name=f"{what}{i}_done", arrivals={name: 1}, waiters=(name,), kind="products")
            for what in products
        ]
        signals += [
            Signal(name=f"stored{i}", arrivals=sender, waiters=(f"reduce{i}",), kind="group"),
        ]
        signals += [
            Signal(name=f"{what}{i}_full", arrivals={name: RELEASES}, waiters=(f"reduce{i}",),
                   stages=stages)
            for what, stages in (("dq", 1), ("dv", 1), ("dk", STAGES))
        ]  # fmt: skip
        signals += [
            Signal(name=f"{what}{i}_empty", arrivals=sender, waiters=(name,), free=1)
            for what in ("dq", "dv")
        ]
    return signals


def _loads(
    ring: str, stages: int, num_bytes: int, readers: list[str], releases: dict[str, int]
) -> list[Signal]:
    """Of a ring that the load warp fills: who waits for a slot, and who gives it back."""
    return [
        Signal(name=f"{ring}_full", arrivals={"load": 1}, waiters=tuple(readers), stages=stages,
               tx_bytes=num_bytes),
        Signal(name=f"{ring}_empty", arrivals=releases, waiters=("load",), stages=stages,
               free=stages),
    ]  # fmt: skip


def _load(pipeline: WarpgroupBackwardPipeline) -> Role:
    """dO and V, Q and dO of the later tiles, and of the next work tile K and the first Q.

    Q and dO each come with a number of every row; V behind dO, as its place is free later.
    """
    size = _tile_bytes(pipeline)

    def fetch(what: str, num_bytes: int, writes: tuple[str, ...], cold: bool = False) -> Program:
        copy = Copy(kind="load", num_bytes=num_bytes, cold=cold)
        return (
            Wait(f"{what}_empty"),
            Work(f"load {what}", copy, asynchronous=True, writes=writes),
            Arrive(f"{what}_full", after="tma"),
        )

    def rows(what: str, stats: str, cold: bool = False) -> Program:
        return fetch(what, size[what] + stats_bytes(pipeline), (what, stats), cold)

    def keys(what: str) -> Program:
        every = (fetch(f"{what}{i}", size[what], (f"{what}{i}",), True) for i in range(CONSUMERS))
        return tuple(step for program in every for step in program)

    begin = (*draw_number(), *keys("k"), *rows("q", "lse", True))
    return Role(
        name="load",
        warps=(LOAD_WARP,),
        registers=PRODUCER_REGISTERS,
        prologue=begin,
        program=(
            *rows("do", "d", True),
            *keys("v"),
            Loop("q_tiles", (*rows("q", "lse"), *rows("do", "d")), offset=-1),
            *begin,
        ),
    )


def _consumer(pipeline: WarpgroupBackwardPipeline, i: int) -> Role:
    """Warpgroup i's program."""
    return Role(
        name=f"consumer{i}",
        warps=tuple(range(4 * i, 4 * i + 4)),
        registers=CONSUMER_REGISTERS,
        live=live_registers(pipeline),
        prologue=_begin(pipeline, i),
        program=(
            *_step(pipeline, i, first=True),
            Loop("q_tiles", _step(pipeline, i), offset=-1),
            *_finish(pipeline, i),
        ),
    )


def _reduce(pipeline: WarpgroupBackwardPipeline, i: int) -> Role:
    """Adds warpgroup i's part of dQ, stores dV and dK, and gives places back when they are read."""
    cols, cols_v = pipeline.product_dims
    turn: Program = (Work("wait for turn", Semaphore()),) if pipeline.deterministic else ()
    copy = Copy(kind="reduce", num_bytes=_dq_bytes(pipeline))
    add: Program = (
        Wait(f"dq{i}_full"),
        *turn,
        Work(f"add dQ{i}", copy, reads=(f"dq{i}",)),
        Arrive(f"dq{i}_empty"),
    )
    return Role(
        name=f"reduce{i}",
        warps=(LOAD_WARP + 1 + i,),
        registers=PRODUCER_REGISTERS,
        prologue=read_number(),
        program=(
            Loop("q_tiles", add),
            Wait(f"dv{i}_full"),
            *_store(pipeline, i, "dV", cols_v),
            Arrive(f"dv{i}_empty"),
            Wait(f"dk{i}_full"),
            *_store(pipeline, i, "dK", cols),
            Arrive(f"k{i}_empty"),
            *read_number(),
        ),
    )


def live_registers(pipeline: WarpgroupBackwardPipeline) -> dict[str, int]:
    """Registers of a consumer thread that hold values at once where most do, by what they hold.

    When dP is done: P in float32 and in 16 bits.
    """
    tile, (cols, cols_v) = pipeline.tile_m // 2, pipeline.product_dims
    return {
        "dK": cols // 2, "dV": cols_v // 2, "P": tile, "dP": tile,
        "words of P": tile // 2, "addresses": 12,
    }  # fmt: skip


def _step(pipeline: WarpgroupBackwardPipeline, i: int, *, first: bool = False) -> Program:
    """A query tile, and dQ of the one before under the first half of its exponentials.

    In the first one, which has no such dQ, all of them run under dP. dV's product is issued when dS
    is written. Where scores are kept beside P, the kernel computes all exponentials under dQ.
    """
    tile, elements = pipeline.tile_m // 2, pipeline.tile_m * WARPGROUP_ROWS
    mine = tile if first else tile / 2
    exponentials = unpacked(mufu=mine, fma=mine, alu=mine / 2)
    gradients = Work(f"dS{i}", unpacked(fma=2 * tile, alu=tile / 2), reads=("d",))
    write = SmemAccess(num_bytes=elements * pipeline.element_bytes)
    return (
        *(() if first else (Wait("q_full"), *_product(pipeline, i, "s"))),
        *(() if first else _start_queries(pipeline, i)),
        Wait(f"s{i}_done"),
        *(() if first else (Work(f"exp S{i}", exponentials), *_leave_queries(pipeline, i))),
        Wait("do_full"),
        *((Wait(f"v{i}_full"),) if first else ()),
        *_product(pipeline, i, "dp"),
        # Of the statistics read for the last time there is one mention per tile.
        Work(f"exp S{i}", exponentials, reads=("lse",)),
        Wait(f"dp{i}_done"),
        gradients,
        *((Wait(f"dv{i}_empty"),) if first else ()),
        Work(f"write dS{i}", write, writes=(f"ds{i}",)),
        *_product(pipeline, i, "dv"),
        Work(f"show dS{i}", Sync(fenced=True)),
        Arrive("met"),
        *_product(pipeline, i, "dk"),
        Wait(f"dv{i}_done"),
        Arrive("do_empty"),
        Wait(f"dk{i}_done"),
        Arrive("q_empty"),
    )


def _begin(pipeline: WarpgroupBackwardPipeline, i: int) -> Program:
    """The first S of a work tile. Behind the last one there is K, of which nobody uses S."""
    keys = (Wait(f"k{warpgroup}_full") for warpgroup in range(CONSUMERS))
    return *read_number(), *keys, Wait("q_full"), *_product(pipeline, i, "s")


def _start_queries(pipeline: WarpgroupBackwardPipeline, i: int) -> Program:
    """dQ's product, when the other warpgroup has written its dS."""
    return Wait("met"), *_product(pipeline, i, "dq")


def _leave_queries(pipeline: WarpgroupBackwardPipeline, i: int) -> Program:
    """dQ into shared memory, when its last place there is free."""
    write = SmemAccess(num_bytes=_dq_bytes(pipeline))
    return (
        Wait(f"dq{i}_done"),
        Wait(f"dq{i}_empty"),
        Work(f"write dQ{i}", write, writes=(f"dq{i}",)),
        Work(f"show dQ{i}", Sync(fenced=True)),
        Arrive(f"dq{i}_full"),
    )


def _product(pipeline: WarpgroupBackwardPipeline, i: int, what: str) -> Program:
    """One of the five products; dS of both warpgroups goes into dQ."""
    (d, dv), m = pipeline.product_dims, pipeline.tile_m
    rows, cols, depth, in_registers, reads = {
        "s": (WARPGROUP_ROWS, m, d, False, (f"k{i}@", "q")),
        "dp": (WARPGROUP_ROWS, m, dv, False, (f"v{i}", "do")),
        "dv": (WARPGROUP_ROWS, dv, m, True, ("do",)),
        "dk": (WARPGROUP_ROWS, d, m, True, ("q",)),
        "dq": (WARPGROUP_ROWS, dq_columns(pipeline), pipeline.tile_n, False,
               ("ds0", "ds1", "k0@", "k1@")),
    }[what]  # fmt: skip
    amount = mma(rows, cols, depth, element_bytes=pipeline.element_bytes,
                 a_in_tmem=in_registers, in_registers=True)  # fmt: skip
    return (
        Work(f"{what}{i}", amount, asynchronous=True, reads=reads),
        Arrive(f"{what}{i}_done", after="tensor"),
    )


def _finish(pipeline: WarpgroupBackwardPipeline, i: int) -> Program:
    """The last dQ, and the next work tile's first S; then dV over dS, and dK over K."""
    cols, cols_v = pipeline.product_dims
    gradients = (("dV", cols_v), ("dK", cols))
    return (
        Arrive(f"v{i}_empty"),
        *_start_queries(pipeline, i),
        *_begin(pipeline, i),
        *(_rounded(f"{what}{i}", dim) for what, dim in gradients),
        Wait(f"dq{i}_done"),
        Arrive("left"),
        *_leave_queries(pipeline, i)[1:],
        Wait("left"),
        *(_into_memory(pipeline, i, what, dim) for what, dim in gradients),
        Work(f"show dV{i} and dK{i}", Sync(fenced=True)),
        Arrive(f"dv{i}_full"),
        Arrive(f"dk{i}_full"),
    )


def _place(pipeline: WarpgroupBackwardPipeline, i: int, what: str) -> str:
    """Where a gradient of warpgroup i's keys lies in shared memory: over dS, or over its K."""
    return f"ds{i}[0:{_tile_bytes(pipeline)['v']}]" if what == "dV" else f"k{i}"


def _rounded(what: str, dim: int) -> Work:
    """A gradient of a warpgroup's keys as it is stored."""
    return Work(f"scale {what}", unpacked(fma=dim / 2, alu=dim / 4))


def _into_memory(pipeline: WarpgroupBackwardPipeline, i: int, what: str, dim: int) -> Work:
    """The same into shared memory."""
    access = SmemAccess(num_bytes=WARPGROUP_ROWS * dim * pipeline.element_bytes)
    return Work(f"write {what}{i}", access, writes=(_place(pipeline, i, what),))


def _store(pipeline: WarpgroupBackwardPipeline, i: int, what: str, dim: int) -> Program:
    """The same to global memory, until its place may be given back."""
    copy = Copy(kind="store", num_bytes=WARPGROUP_ROWS * dim * pipeline.element_bytes)
    place = _place(pipeline, i, what)
    return (
        Work(f"store {what}{i}", copy, asynchronous=True, reads=(place,)),
        Arrive(f"stored{i}", after="tma"),
        Wait(f"stored{i}"),
    )
