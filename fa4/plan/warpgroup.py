"""Forward kernels before tensor memory (Hopper's FlashAttention-3, FlashAttention-2) as plans.

A producer warp loads; each consumer warpgroup owns 64 query rows and does all else: it issues
its products, waits for them, and keeps S, P and O in registers. FlashAttention-3 hides softmax in
two ways: consumers take turns at the tensor core (ping-pong), and a consumer issues the next S
before this tile's P V (overlap). Without both, products and softmax of a warpgroup alternate.
"""

from __future__ import annotations

from fa4.config import WarpgroupPipeline
from fa4.hardware import Gpu
from fa4.plan.memory import Layout, require_fit
from fa4.plan.memory_rules import TILE_ALIGN_BYTES
from fa4.plan.schema import (
    GROUP_WARPS,
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
    Sync,
    Wait,
    Work,
)
from fa4.plan.work import WARPGROUP, mma

ROWS = 64  # of a warpgroup: wgmma's M
BARRIER_BYTES = 8 * 32
REGISTERS = {1: (240, 24), 2: (240, 24), 3: (160, 32)}  # consumer, producer (FlashAttention-3)


def warpgroup_plan(pipeline: WarpgroupPipeline, gpu: Gpu) -> PipelinePlan:
    """The plan of such a kernel. Raises ValueError if it does not fit the machine."""
    buffers = _lay_out(pipeline, gpu)
    consumers = range(pipeline.consumers)
    kind = "FA3" if pipeline.ping_pong else "serial"
    return PipelinePlan(
        name=f"{kind} forward d{pipeline.head_dim}, {pipeline.consumers} warpgroups",
        roles=(*(_consumer(pipeline, gpu, i) for i in consumers), _producer(pipeline)),
        signals=tuple(_signals(pipeline, output_over_queries(pipeline, gpu))),
        buffers=tuple(buffers),
        trips=("kv_tiles", "masked_tiles", "plain_tiles"),
    )


def _lay_out(pipeline: WarpgroupPipeline, gpu: Gpu) -> list[Buffer]:
    layout, size = Layout(), pipeline.element_bytes
    rows, dv = pipeline.block_rows, pipeline.head_dim_v
    q = layout.add("q", "smem", rows * pipeline.head_dim * size, align=1024)
    layout.add("k", "smem", pipeline.tile_n * pipeline.head_dim * size,
               stages=pipeline.kv_stages, align=1024)  # fmt: skip
    layout.add("v", "smem", pipeline.tile_n * dv * size, stages=pipeline.kv_stages, align=1024)
    if output_over_queries(pipeline, gpu):
        safe = {"q": "a warpgroup's rows over its own; the next Q is loaded when O is stored"}
        layout.alias("o", "smem", q.start, q.size, safe)
    else:
        layout.add("o", "smem", rows * dv * size, align=1024)
    layout.add("barriers", "smem", BARRIER_BYTES, align=8)
    require_fit(layout.buffers, "smem", gpu.smem_bytes_per_cta, gpu.name)
    return layout.buffers


def output_over_queries(pipeline: WarpgroupPipeline, gpu: Gpu) -> bool:
    """Is there no room for O beside Q, K and V? It is no wider than Q then."""
    d, dv, stages = pipeline.head_dim, pipeline.head_dim_v, pipeline.kv_stages
    elements = pipeline.block_rows * (d + dv) + stages * pipeline.tile_n * (d + dv)
    room = gpu.smem_bytes_per_cta - BARRIER_BYTES - 3 * TILE_ALIGN_BYTES
    return dv <= d and elements * pipeline.element_bytes > room


def _names(pipeline: WarpgroupPipeline) -> list[str]:
    return [f"consumer{i}" for i in range(pipeline.consumers)]


def _signals(pipeline: WarpgroupPipeline, over: bool) -> list[Signal]:
    names, size = _names(pipeline), pipeline.element_bytes
    stages, tile_n, dv = pipeline.kv_stages, pipeline.tile_n, pipeline.head_dim_v
    # (slots, bytes of a fill, arrivals of a consumer when it has read the slot)
    rings = {
        "q": (1, pipeline.block_rows * pipeline.head_dim * size, GROUP_WARPS),
        "k": (stages, tile_n * pipeline.head_dim * size, GROUP_WARPS),
        "v": (stages, tile_n * dv * size, GROUP_WARPS),
    }
    signals = []
    for ring_name, (slots, num_bytes, releases) in rings.items():
        signals += [
            Signal(
                name=f"{ring_name}_full",
                arrivals={"load": 1},
                waiters=tuple(names),
                stages=slots,
                tx_bytes=num_bytes,
            ),
            Signal(
                name=f"{ring_name}_empty",
                arrivals=dict.fromkeys(names, releases),
                waiters=("load",),
                stages=slots,
                free=slots,
            ),
        ]
    for i, name in enumerate(names):
        before = names[i - 1]
        for product in ("s", "o"):
            signals.append(
                Signal(name=f"{product}{i}_done", arrivals={name: 1}, waiters=(name,),
                       kind="products")
            )  # fmt: skip
        if pipeline.ping_pong:
            signals.append(
                Signal(name=f"turn{i}", arrivals={before: WARPGROUP}, waiters=(name,), kind="named")
            )  # fmt: skip
        signals.append(
            Signal(name=f"stored{i}", arrivals={name: 1}, waiters=(name,), kind="group",
                   free=0 if over else 1)
        )  # fmt: skip
    return signals


def _producer(pipeline: WarpgroupPipeline) -> Role:
    size, dv = pipeline.element_bytes, pipeline.head_dim_v

    def fetch(what: str, num_bytes: int, cold: bool = False) -> Program:
        copy = Copy(kind="load", num_bytes=num_bytes, cold=cold)
        return (
            Wait(f"{what}_empty"),
            Work(f"load {what}", copy, asynchronous=True, writes=(what,)),
            Arrive(f"{what}_full", after="tma"),
        )

    k_bytes = pipeline.tile_n * pipeline.head_dim * size
    q = fetch("q", pipeline.block_rows * pipeline.head_dim * size, cold=True)
    k, v = fetch("k", k_bytes), fetch("v", pipeline.tile_n * dv * size)
    program = (*fetch("k", k_bytes, cold=True), *q, Loop("kv_tiles", (*k, *v), offset=-1), *v)
    registers = REGISTERS[pipeline.consumers][1]
    return Role(name="load", warps=(GROUP_WARPS * pipeline.consumers,), registers=registers, program=program)


def _rows(name: str, i: int, row_bytes: int) -> str:
    """A warpgroup's rows of Q or O."""
    return f"{name}[{i * ROWS * row_bytes}:{(i + 1) * ROWS * row_bytes}]"


def _consumer(pipeline: WarpgroupPipeline, gpu: Gpu, i: int) -> Role:
    """One warpgroup's program."""
    size, dv = pipeline.element_bytes, pipeline.head_dim_v
    qk = mma(ROWS, pipeline.tile_n, pipeline.head_dim, element_bytes=size)
    pv = mma(ROWS, dv, pipeline.tile_n, element_bytes=size, a_in_tmem=True)  # A in registers
    scores: Program = (
        Wait("k_full"),
        Work(f"QK{i}", qk, asynchronous=True, reads=(_rows("q", i, pipeline.head_dim * size), "k")),
        Arrive(f"s{i}_done", after="tensor"),
    )
    values: Program = (
        Wait("v_full"),
        Work(f"PV{i}", pv, asynchronous=True, reads=("v",)),
        Arrive(f"o{i}_done", after="tensor"),
    )
    fix = (Work(f"rescale O{i}", _unpacked(fma=dv / 2)),)
    step = _overlapped if pipeline.overlap else _serial
    parts = (scores, values, fix)
    begin: Program = (Wait("q_full"),)
    if pipeline.overlap:  # the first tile, always masked, has no earlier P V to run beside it
        begin += _overlapped(pipeline, i, (scores, (), ()), masked=True)
    loops = (
        Loop("masked_tiles", step(pipeline, i, parts, True), offset=-1 if pipeline.overlap else 0),
        Loop("plain_tiles", step(pipeline, i, parts, False)),
    )
    over = output_over_queries(pipeline, gpu)
    output = _rows("o", i, max(dv, pipeline.head_dim if over else 0) * size)
    end: Program = (
        *(() if over else (Arrive("q_empty"),)),
        Work(f"scale O{i}", _unpacked(fma=dv / 2, alu=dv / 4)),
        *(() if over else (Wait(f"stored{i}"), Work(f"sync {i}", Sync()))),
        Work(
            f"write O{i}",
            SmemAccess(num_bytes=ROWS * dv * size),
            writes=(output,),
        ),
        Work(f"sync {i}", Sync(fenced=True)),
        Work(
            f"store O{i}",
            Copy(kind="store", num_bytes=ROWS * dv * size),
            asynchronous=True,
            reads=(output,),
        ),
        Arrive(f"stored{i}", after="tma"),
        *((Wait(f"stored{i}"), Work(f"sync {i}", Sync()), Arrive("q_empty")) if over else ()),
    )
    if pipeline.overlap:
        # The last tile's P V has no next S to hide behind.
        end = (*values, Wait(f"o{i}_done"), Arrive("v_empty"), *end)
    last = i == pipeline.consumers - 1
    return Role(
        name=f"consumer{i}",
        warps=tuple(range(GROUP_WARPS * i, GROUP_WARPS * (i + 1))),
        registers=REGISTERS[pipeline.consumers][0],
        prologue=(Arrive("turn0"),) if pipeline.ping_pong and last else (),
        program=(*begin, *loops, *end),
        closing=() if over else (Wait(f"stored{i}"),),
    )


def _turns(pipeline: WarpgroupPipeline, i: int) -> tuple[Program, Program]:
    """Wait for this warpgroup's turn at the tensor core, and hand it on."""
    if not pipeline.ping_pong:
        return (), ()
    return (Wait(f"turn{i}"),), (Arrive(f"turn{(i + 1) % pipeline.consumers}"),)


def _serial(
    pipeline: WarpgroupPipeline, i: int, parts: tuple[Program, Program, Program], masked: bool
) -> Program:
    """S, softmax, rescale, P V, one after the other."""
    scores, values, fix = parts
    take, give = _turns(pipeline, i)
    softmax = _softmax(pipeline, i, masked)
    scored = (Wait(f"s{i}_done"), Arrive("k_empty"))
    summed = (Wait(f"o{i}_done"), Arrive("v_empty"))
    return (*take, *scores, *give, *scored, *softmax, *fix, *values, *summed)


def _overlapped(
    pipeline: WarpgroupPipeline, i: int, parts: tuple[Program, Program, Program], masked: bool
) -> Program:
    """S of this tile, then P V of the last one, if any, while this tile's softmax runs."""
    scores, values, fix = parts
    take, give = _turns(pipeline, i)
    softmax = _softmax(pipeline, i, masked)
    scored = (Wait(f"s{i}_done"), Arrive("k_empty"))
    done = (Wait(f"o{i}_done"), Arrive("v_empty"), *fix) if values else ()
    return (*take, *scores, *values, *give, *scored, *softmax, *done)


def _unpacked(mufu: float = 0.0, fma: float = 0.0, alu: float = 0.0) -> Math:
    """Instructions one by one: Hopper has no packed float32, so each FMA takes an issue slot."""
    return Math(mufu=mufu, fma=fma, alu=alu, other=fma / 2)


def _softmax(pipeline: WarpgroupPipeline, i: int, masked: bool) -> Program:
    """Maximum, exponentials, conversion, sum; a thread holds tile_n / 2 elements of S."""
    count = pipeline.tile_n / 2
    steps: Program = ()
    if masked:
        steps += (Work(f"mask S{i}", _unpacked(alu=1.25 * count)),)
    half = count / 2
    return (
        *steps,
        Work(f"row max {i}", _unpacked(alu=count)),
        Work(f"exp S{i} 0", _unpacked(mufu=half, fma=half, alu=half / 2)),
        Work(f"exp S{i} 1", _unpacked(mufu=half, fma=half, alu=half / 2)),
        Work(f"row sum {i}", _unpacked(fma=count)),
    )
