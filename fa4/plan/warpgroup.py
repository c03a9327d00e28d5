"""Forward kernels before tensor memory (Hopper's FlashAttention-3, FlashAttention-2) as plans.

A producer warp loads; each consumer warpgroup owns 64 query rows and does all else: it issues
its products, waits for them, and keeps S, P and O in registers. FlashAttention-3 hides softmax in
two ways: consumers take turns at the tensor core (ping-pong), and a consumer issues the next S
before this tile's P V (overlap). Without both, products and softmax of a warpgroup alternate.
P enters P V from registers, or through shared memory, which takes less registers. This package's
kernel may begin the next work tile before it stores this one's output (ahead). With 8-bit operands
its V goes through a ring of its own to warps that transpose it (`warpgroup_transpose`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fa4.config import WarpgroupPipeline
from fa4.hardware import Gpu
from fa4.plan.memory import Layout, require_fit
from fa4.plan.memory_rules import MBARRIER_BYTES, TILE_ALIGN_BYTES
from fa4.plan.schema import Buffer, PipelinePlan, Signal
from fa4.plan.warpgroup_packing import query_bytes, query_parts, straddles
from fa4.plan.warpgroup_roles import consumer_role, producer_role
from fa4.plan.warpgroup_transpose import TRANSPOSING_WARPS, transposing_role
from fa4.plan.work import WARPGROUP
from fa4.plan.work_queue import add_numbers, queue_signals

BARRIER_BYTES = MBARRIER_BYTES * 32
# Consumer and producer after setmaxnreg, by warpgroups (FlashAttention-3, flash_attn.cute).
REGISTERS = {1: (240, 24), 2: (240, 24), 3: (160, 32)}
RELEASES = 4  # arrivals of a warpgroup that has used a slot: one lane of each warp


def warpgroup_plan(pipeline: WarpgroupPipeline, gpu: Gpu) -> PipelinePlan:
    """The plan of such a kernel. Raises ValueError if it does not fit the machine."""
    buffers = _lay_out(pipeline, gpu)
    consumer, producer = REGISTERS[pipeline.consumers]
    over = output_over_queries(pipeline, gpu)
    alone = "overlapped" if pipeline.overlap else "serial"
    kind = "ping-pong" if pipeline.takes_turns else alone
    consumers = (
        consumer_role(
            pipeline,
            i,
            registers=consumer,
            output_over_queries=over,
            ahead=begins_ahead(pipeline, gpu),
        )
        for i in range(pipeline.consumers)
    )
    load = producer_role(pipeline, registers=producer, early=fetches_early(pipeline, gpu))
    transposing = (transposing_role(pipeline, producer),) if pipeline.transposes else ()
    return PipelinePlan(
        name=f"{kind} forward d{pipeline.head_dim}, {pipeline.consumers} warpgroups",
        roles=(*consumers, load, *transposing),
        signals=tuple(_signals(pipeline, over, query_stages(pipeline, gpu))),
        buffers=tuple(buffers),
        trips=("kv_tiles", "masked_tiles", "plain_tiles"),
        shares=() if pipeline.published else ("rescale_rate",),
    )


def _lay_out(pipeline: WarpgroupPipeline, gpu: Gpu) -> list[Buffer]:
    layout, size = Layout(), pipeline.element_bytes
    rows, (d, dv) = pipeline.block_rows, pipeline.widths
    q = layout.add("q", "smem", query_bytes(pipeline)[0],
                   stages=query_stages(pipeline, gpu), align=TILE_ALIGN_BYTES)  # fmt: skip
    raw = (("raw", dv),) if pipeline.transposes else ()
    for name, width in (("k", d), *raw, ("v", dv)):
        layout.add(name, "smem", pipeline.tile_n * width * size,
                   stages=pipeline.kv_stages, align=TILE_ALIGN_BYTES)  # fmt: skip
    if pipeline.p_source == "smem":
        layout.add("p", "smem", rows * pipeline.tile_n * size, align=TILE_ALIGN_BYTES)
    if not pipeline.stages_output:
        pass
    elif output_over_queries(pipeline, gpu):
        safe = {"q": "a warpgroup's rows over its own; the next Q is loaded when O is stored"}
        layout.alias("o", "smem", q.start, q.size, safe)
    else:
        layout.add("o", "smem", rows * dv * pipeline.output_bytes, align=TILE_ALIGN_BYTES)
    layout.add("barriers", "smem", barrier_bytes(pipeline), align=8)
    if pipeline.scheduler == "queue":
        add_numbers(layout)
    require_fit(layout.buffers, "smem", gpu.smem_bytes_per_cta, gpu.name)
    return layout.buffers


def barrier_bytes(pipeline: WarpgroupPipeline) -> int:
    """Where V is transposed there is one ring more."""
    return BARRIER_BYTES + (2 * pipeline.kv_stages * MBARRIER_BYTES if pipeline.transposes else 0)


def output_over_queries(pipeline: WarpgroupPipeline, gpu: Gpu) -> bool:
    """Is there no room for O beside Q, K, V and P? It is no wider than Q then, row by row."""
    if not pipeline.stages_output or straddles(pipeline.packed):
        return False
    d, dv = pipeline.widths
    narrow = dv * pipeline.output_bytes <= d * pipeline.element_bytes
    return narrow and not has_room(pipeline, gpu)


def has_room(pipeline: WarpgroupPipeline, gpu: Gpu) -> bool:
    """Does shared memory hold Q, O, K, V and P beside one another?"""
    return _room_left(pipeline, gpu) >= 0


def begins_ahead(pipeline: WarpgroupPipeline, gpu: Gpu) -> bool:
    """Does the next work tile's first S start before this one's O is stored?"""
    return pipeline.ahead and pipeline.overlap and not output_over_queries(pipeline, gpu)


def query_stages(pipeline: WarpgroupPipeline, gpu: Gpu) -> int:
    """Places for Q: 2 where the next work tile's comes ahead and there is room for it, else 1."""
    q_bytes, _ = query_bytes(pipeline)
    return 2 if begins_ahead(pipeline, gpu) and _room_left(pipeline, gpu) >= q_bytes else 1


def fetches_early(pipeline: WarpgroupPipeline, gpu: Gpu) -> bool:
    """Does L2 fetch the next work tile's Q while the CTA still reads this one's?

    Where there is one place for Q. With another its load starts as soon; K and V have rings. Of
    them, too, and of each CTA's first Q, it took the copies that are waited for their turns: on an
    H200 up to a fifth of the time of calls of 20 to 100 us. Where O waits for its store before the
    next Q is loaded, it gains nothing.
    """
    strides = pipeline.scheduler in ("static", "queue") and not pipeline.published
    over = output_over_queries(pipeline, gpu)
    return strides and not over and query_stages(pipeline, gpu) == 1


def _room_left(pipeline: WarpgroupPipeline, gpu: Gpu) -> int:
    """Bytes beside one Q, O, K, V and P; negative where these do not fit."""
    rows, (d, dv) = pipeline.block_rows, pipeline.widths
    elements = pipeline.kv_stages * pipeline.tile_n * (d + dv)
    if pipeline.transposes:
        elements += pipeline.kv_stages * pipeline.tile_n * dv
    if pipeline.p_source == "smem":
        elements += rows * pipeline.tile_n
    output = rows * dv * pipeline.output_bytes if pipeline.stages_output else 0
    room = gpu.smem_bytes_per_cta - barrier_bytes(pipeline) - 4 * TILE_ALIGN_BYTES
    return room - query_bytes(pipeline)[0] - elements * pipeline.element_bytes - output


def _signals(pipeline: WarpgroupPipeline, over_queries: bool, query_places: int) -> list[Signal]:
    """Rings of Q, K and V; what each warpgroup waits for by itself; turns.

    A warpgroup's own products and stores have no barrier: it waits for their groups
    (wgmma.wait_group, cp.async.bulk.wait_group).
    """
    names = [f"consumer{i}" for i in range(pipeline.consumers)]
    size, stages = pipeline.element_bytes, pipeline.kv_stages
    d_bytes, dv_bytes = (width * size for width in pipeline.widths)
    readers = dict.fromkeys(names, RELEASES)
    transposers = {"transpose": TRANSPOSING_WARPS}
    loaded = _ring("v", {"load": 1}, readers, stages, pipeline.tile_n * dv_bytes)
    if pipeline.transposes:
        loaded = (*_ring("raw", {"load": 1}, transposers, stages, pipeline.tile_n * dv_bytes),
                  *_ring("v", transposers, readers, stages, 0))  # fmt: skip
    queued: tuple[Signal, ...] = ()
    if pipeline.scheduler == "queue":
        queued = queue_signals(readers | (transposers if pipeline.transposes else {}))
    signals = [
        *_queries(pipeline, readers, query_places),
        *_ring("k", {"load": 1}, readers, stages, pipeline.tile_n * d_bytes),
        *loaded,
        *queued,
    ]
    for i, name in enumerate(names):
        # Over the queries, a store is waited for at once, else before the next one.
        free = 0 if over_queries else 1
        own = {f"s{i}_done": ("products", 0), f"o{i}_done": ("products", 0)}
        if pipeline.stages_output:
            own[f"stored{i}"] = ("group", free)
        signals += [
            Signal(name=one, arrivals={name: 1}, waiters=(name,), kind=kind, free=free)
            for one, (kind, free) in own.items()
        ]
        if pipeline.takes_turns:
            signals.append(
                Signal(name=f"turn{i}", arrivals={names[i - 1]: WARPGROUP}, waiters=(name,),
                       kind="named")
            )  # fmt: skip
    return signals


def _queries(pipeline: WarpgroupPipeline, readers: dict[str, int], stages: int) -> Iterator[Signal]:
    """A signal for each part of the rows of Q, so that the first warpgroup begins when its own are
    there; one for all of them when they have been read."""
    parts, num_bytes = query_parts(pipeline), query_bytes(pipeline)[1]
    full, empty = _ring("q", {"load": 1}, readers, stages, num_bytes // len(parts))
    waiters = [tuple(readers)] if len(parts) == 1 else [(name,) for name in readers]
    for part, waiting in zip(parts, waiters, strict=True):
        yield replace(full, name=f"{part}_full", waiters=waiting)
    yield empty


def _ring(
    ring: str, writers: dict[str, int], readers: dict[str, int], stages: int, num_bytes: int
) -> tuple[Signal, ...]:
    """`<ring>_full` and `<ring>_empty` of slots that some roles fill and others read, with the
    arrivals of each."""
    full = Signal(
        name=f"{ring}_full", arrivals=writers, waiters=tuple(readers), stages=stages,
        tx_bytes=num_bytes,
    )  # fmt: skip
    empty = Signal(
        name=f"{ring}_empty", arrivals=readers, waiters=tuple(writers), stages=stages, free=stages,
    )  # fmt: skip
    return full, empty
