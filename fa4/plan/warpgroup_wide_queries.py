"""The kernel of dQ for wide heads (see `warpgroup_wide`): 128 queries stay, KV tiles pass.

Each of two warpgroups has 64 queries and works as in a forward pass: scores are not transposed, dS
is an operand of dQ as it comes out of the registers, and the warpgroups wait for nothing but K and
V. Q comes with the first K, dO with the first V.

dQ of a tile is computed beside S and dP of the next one, so that the tensor core has work while a
warpgroup computes P and dS: behind them where K has three places, as the last of these is then
loaded meanwhile; before them where it has two, of which one is so given back soon.
"""

from __future__ import annotations

from fa4.config import WARPGROUP_ROWS
from fa4.hardware import Gpu
from fa4.plan.memory import Layout, require_fit
from fa4.plan.memory_rules import TILE_ALIGN_BYTES, whole_runs
from fa4.plan.schema import (
    Arrive,
    Buffer,
    Copy,
    Loop,
    PipelinePlan,
    Program,
    Role,
    Signal,
    Wait,
    Work,
)
from fa4.plan.warpgroup_code import unpacked
from fa4.plan.warpgroup_wide import (
    ADDRESS_REGISTERS,
    BARRIER_BYTES,
    CONSUMER_REGISTERS,
    CONSUMERS,
    LOAD_WARP,
    MOST_LIVE,
    PRODUCER_REGISTERS,
    RELEASES,
    WideBackwardPipeline,
    product,
    start,
    store,
)

STATISTICS_REGISTERS = 4  # two numbers of each of a thread's two rows
TILES_N = (64, 48, 32, 16)  # keys of a tile, the first that fits
RINGS = ((3, 2), (3, 1), (2, 2), (2, 1))  # places for K and V, the first that fit


def widest_tile(cols: int, cols_v: int, gpu: Gpu) -> WideBackwardPipeline:
    """The pipeline with the most keys in a tile for which registers and shared memory suffice.

    And the most places for K: more keys, with two places, were slower (docs/hopper.md). cols,
    cols_v: of a head.
    """
    for tile_n in TILES_N:
        for k_stages, v_stages in RINGS:
            found = WideBackwardPipeline(
                head_dim=whole_runs(cols),
                head_dim_v=whole_runs(cols_v),
                cols=cols,
                cols_v=cols_v,
                tile_n=tile_n,
                k_stages=k_stages,
                v_stages=v_stages,
            )
            used = max(buffer.stop for buffer in _lay_out(found))
            live = sum(live_registers(found).values())
            if used <= gpu.smem_bytes_per_cta and live <= MOST_LIVE:
                return found
    raise AssertionError("16 keys fit")


def wide_queries_plan(pipeline: WideBackwardPipeline, gpu: Gpu) -> PipelinePlan:
    """The plan. Raises ValueError, with the sum of what exceeds, if it does not fit the machine."""
    buffers = _lay_out(pipeline)
    require_fit(buffers, "smem", gpu.smem_bytes_per_cta, gpu.name)
    return PipelinePlan(
        name=f"backward d{pipeline.head_dim}, dQ",
        roles=(*(_consumer(pipeline, i) for i in range(CONSUMERS)), _load(pipeline)),
        signals=tuple(_signals(pipeline)),
        buffers=tuple(buffers),
        trips=("kv_tiles",),
        persistent=False,
    )


def live_registers(pipeline: WideBackwardPipeline) -> dict[str, int]:
    """Registers of a thread that hold values at once where most do, by what they hold."""
    tile = pipeline.tile_n // 2
    return {
        "dQ": pipeline.sum_dims[0] // 2, "P": tile, "dP": tile, "words of dS": tile // 2,
        "statistics": STATISTICS_REGISTERS, "addresses": ADDRESS_REGISTERS,
    }  # fmt: skip


def stages_of(pipeline: WideBackwardPipeline) -> dict[str, tuple[int, int]]:
    """(rows, places) of each tile; places of Q and dO are the warpgroups'."""
    return {
        "q": (WARPGROUP_ROWS, CONSUMERS),
        "do": (WARPGROUP_ROWS, CONSUMERS),
        "k": (pipeline.tile_n, pipeline.k_stages),
        "v": (pipeline.tile_n, pipeline.v_stages),
    }


def _tile_bytes(pipeline: WideBackwardPipeline, name: str) -> int:
    return stages_of(pipeline)[name][0] * pipeline.row_bytes(name in ("v", "do"))


def _lay_out(pipeline: WideBackwardPipeline) -> list[Buffer]:
    layout = Layout()
    for name, (_, stages) in stages_of(pipeline).items():
        size = _tile_bytes(pipeline, name)
        layout.add(name, "smem", size, stages=stages, align=TILE_ALIGN_BYTES)
    layout.add("barriers", "smem", BARRIER_BYTES, align=8)
    return layout.buffers


def _signals(pipeline: WideBackwardPipeline) -> list[Signal]:
    names = tuple(f"queries{i}" for i in range(CONSUMERS))
    signals = []
    for ring, first in (("k", "q"), ("v", "do")):
        stages = stages_of(pipeline)[ring][1]
        signals += [
            Signal(name=f"{ring}_full", arrivals={"load_keys": 1}, waiters=names, stages=stages,
                   tx_bytes=_tile_bytes(pipeline, ring),
                   first_tx_bytes=CONSUMERS * _tile_bytes(pipeline, first)),
            Signal(name=f"{ring}_empty", arrivals=dict.fromkeys(names, RELEASES),
                   waiters=("load_keys",), stages=stages, free=stages),
        ]  # fmt: skip
    for i, name in enumerate(names):
        own = {f"{what}{i}_done": "products" for what in ("s", "dp", "dq")}
        signals += [
            Signal(name=one, arrivals={name: 1}, waiters=(name,), kind=kind)
            for one, kind in (own | {f"stored{i}": "group"}).items()
        ]
    return signals


def _load(pipeline: WideBackwardPipeline) -> Role:
    """K with Q, V with dO, then K and V of the later tiles."""

    def fetch(what: str, first: str = "") -> Program:
        writes = (what, *(f"{first}{i}" for i in range(CONSUMERS) if first))
        num_bytes = _tile_bytes(pipeline, what)
        num_bytes += CONSUMERS * _tile_bytes(pipeline, first) if first else 0
        return (
            Wait(f"{what}_empty"),
            Work(f"load {what}", Copy(kind="load", num_bytes=num_bytes, cold=bool(first)),
                 asynchronous=True, writes=writes),
            Arrive(f"{what}_full", after="tma"),
        )  # fmt: skip

    return Role(
        name="load_keys",
        warps=(LOAD_WARP,),
        registers=PRODUCER_REGISTERS,
        program=(
            *fetch("k", "q"),
            *fetch("v", "do"),
            Loop("kv_tiles", (*fetch("k"), *fetch("v")), offset=-1),
        ),
    )


def sums_first(pipeline: WideBackwardPipeline) -> bool:
    """Is dQ of a tile started before S and dP of the next one? Where K has but two places."""
    return pipeline.k_stages == 2


def _consumer(pipeline: WideBackwardPipeline, i: int) -> Role:
    """Warpgroup i's program."""
    stored = f"stored{i}"
    return Role(
        name=f"queries{i}",
        warps=tuple(range(4 * i, 4 * i + 4)),
        registers=CONSUMER_REGISTERS,
        live=live_registers(pipeline),
        program=(
            *_step(pipeline, i, first=True),
            Loop("kv_tiles", _step(pipeline, i), offset=-1),
            *_start_sum(pipeline, i),
            *_sum_done(i),
            *store(pipeline, f"dQ{i}", pipeline.sum_dims[0], f"q{i}", stored),
            Wait(stored),
        ),
    )


def _step(pipeline: WideBackwardPipeline, i: int, *, first: bool = False) -> Program:
    """S, P, dP and dS of a KV tile, and dQ of the one before, if there is one."""
    (d, dv), n, before = pipeline.depths, pipeline.tile_n, sums_first(pipeline)
    tile = n // 2
    start_sum, done = (() if first else x for x in (_start_sum(pipeline, i), _sum_done(i)))
    return (
        *(start_sum if before else ()),
        Wait("k_full"),
        *start(f"s{i}", product(pipeline, n, d), (f"q{i}", "k")),
        Wait("v_full"),
        *start(f"dp{i}", product(pipeline, n, dv), (f"do{i}", "v")),
        *(done if before else start_sum),
        Wait(f"s{i}_done"),
        Work(f"exp S{i}", unpacked(mufu=tile, fma=tile)),
        Wait(f"dp{i}_done"),
        Arrive("v_empty"),
        Work(f"dS{i}", unpacked(fma=2 * tile)),
        *(() if before else done),
        Work(f"round dS{i}", unpacked(alu=tile / 2)),
    )


def _start_sum(pipeline: WideBackwardPipeline, i: int) -> Program:
    amount = product(pipeline, pipeline.sum_dims[0], pipeline.tile_n, from_registers=True)
    return start(f"dq{i}", amount, ("k",))


def _sum_done(i: int) -> Program:
    return Wait(f"dq{i}_done"), Arrive("k_empty")
