"""The kernel of dK and dV for wide heads (see `warpgroup_wide`): 64 keys stay, queries pass.

Warpgroup `values` computes P and dV, warpgroup `keys` dS and dK; each has one product of d and one
of dv columns, so that both have as much to do. P, in float32, has as many places in shared memory
as Q, in the order in which threads hold it: thread t of one warpgroup hands it to thread t of the
other, which reads a part of it at a time, as its registers hold V up to 192 columns. Of modified
scores it is the raw ones, of which the other computes P again. Its places need no barrier to be
given back: who writes P of a tile has its Q, in the place of the Q that the other gave back when it
had read the P that was there.
"""

from __future__ import annotations

from dataclasses import replace

from fa4.config import WARPGROUP_ROWS
from fa4.hardware import Gpu
from fa4.plan.memory import Layout, require_fit
from fa4.plan.memory_rules import TILE_ALIGN_BYTES
from fa4.plan.schema import (
    Arrive,
    Buffer,
    Copy,
    Loop,
    PipelinePlan,
    Program,
    Role,
    Signal,
    SmemAccess,
    Wait,
    Work,
)
from fa4.plan.warpgroup_code import unpacked
from fa4.plan.warpgroup_wide import (
    ADDRESS_REGISTERS,
    BARRIER_BYTES,
    CONSUMER_REGISTERS,
    FLOAT_BYTES,
    LOAD_WARP,
    PRODUCER_REGISTERS,
    RELEASES,
    TILE_ROWS,
    WideBackwardPipeline,
    product,
    start,
    store,
)
from fa4.plan.work import WARPGROUP

NAMES = ("values", "keys")
RINGS = ((3, 3), (3, 2), (2, 2))  # places for Q and dO, the first that fit
STATS_BYTES = TILE_ROWS * FLOAT_BYTES  # one of the two numbers of each query of a tile
P_BYTES = WARPGROUP_ROWS * TILE_ROWS * FLOAT_BYTES
ELEMENTS = TILE_ROWS // 2  # of a tile of P that a thread has
MOST_WITH_HELD = 224  # registers; with 227 ptxas spills some in the loop (216 columns)
PART = 16  # of them, that a thread of the other warpgroup reads at a time


def deepest_rings(pipeline: WideBackwardPipeline, gpu: Gpu) -> WideBackwardPipeline:
    """The pipeline with as many places for Q and dO as there is shared memory for, up to three.

    Q is in its place from S of its tile to dK: three places hide what it takes to load the next.
    """
    for q_stages, do_stages in RINGS:
        found = replace(pipeline, q_stages=q_stages, do_stages=do_stages)
        if max(buffer.stop for buffer in _lay_out(found)) <= gpu.smem_bytes_per_cta:
            break
    return found


def wide_keys_plan(pipeline: WideBackwardPipeline, gpu: Gpu) -> PipelinePlan:
    """The plan. Raises ValueError, with the sum of what exceeds, if it does not fit the machine."""
    buffers = _lay_out(pipeline)
    require_fit(buffers, "smem", gpu.smem_bytes_per_cta, gpu.name)
    return PipelinePlan(
        name=f"backward d{pipeline.head_dim}, dK and dV",
        roles=(_values(pipeline), _keys(pipeline), _load(pipeline)),
        signals=tuple(_signals(pipeline)),
        buffers=tuple(buffers),
        trips=("q_tiles",),
        persistent=False,
    )


def held_registers(pipeline: WideBackwardPipeline, name: str) -> int:
    """Registers of a thread of a warpgroup that hold its keys' K, or V, all the time; all or 0."""
    width = pipeline.depths[name == "keys"]
    needed, live = width // 4, sum(_live(pipeline)[name].values())
    return needed if needed + live <= MOST_WITH_HELD else 0


def _live(pipeline: WideBackwardPipeline) -> dict[str, dict[str, int]]:
    """Of each warpgroup, registers of a thread beside these where most hold values at once."""
    words, (cols, cols_v) = ELEMENTS // 2, pipeline.sum_dims
    return {
        "values": {"dV": cols_v // 2, "S": ELEMENTS, "words of P": words,
                   "addresses": ADDRESS_REGISTERS},
        "keys": {"dK": cols // 2, "dP": ELEMENTS, "P": PART,
                 "words of dS": words, "addresses": ADDRESS_REGISTERS},
    }  # fmt: skip


def _tile_bytes(pipeline: WideBackwardPipeline, name: str) -> int:
    rows = TILE_ROWS if name in ("q", "do") else WARPGROUP_ROWS
    return rows * pipeline.row_bytes(name in ("v", "do"))


def _lay_out(pipeline: WideBackwardPipeline) -> list[Buffer]:
    layout = Layout()
    for name, stages in (("q", pipeline.q_stages), ("do", pipeline.do_stages), ("k", 1), ("v", 1)):
        size = _tile_bytes(pipeline, name)
        layout.add(name, "smem", size, stages=stages, align=TILE_ALIGN_BYTES)
    layout.add("p", "smem", P_BYTES, stages=pipeline.q_stages, align=TILE_ALIGN_BYTES)
    for name, stages in (("lse", pipeline.q_stages), ("d", pipeline.do_stages)):
        layout.add(name, "smem", STATS_BYTES, stages=stages, align=128)
    layout.add("barriers", "smem", BARRIER_BYTES, align=8)
    return layout.buffers


def _signals(pipeline: WideBackwardPipeline) -> list[Signal]:
    """Rings of Q and dO with their statistics, and of P; products, stores, and the last meeting.

    The first Q brings K along, the first dO brings V.
    """
    signals = []
    for ring, first in (("q", "k"), ("do", "v")):
        stages = pipeline.q_stages if ring == "q" else pipeline.do_stages
        signals += [
            Signal(name=f"{ring}_full", arrivals={"load_queries": 1}, waiters=NAMES, stages=stages,
                   tx_bytes=_tile_bytes(pipeline, ring) + STATS_BYTES,
                   first_tx_bytes=_tile_bytes(pipeline, first)),
            Signal(name=f"{ring}_empty", arrivals=dict.fromkeys(NAMES, RELEASES),
                   waiters=("load_queries",), stages=stages, free=stages),
        ]  # fmt: skip
    signals.append(
        Signal(
            name="p_full",
            arrivals={"values": RELEASES},
            waiters=("keys",),
            stages=pipeline.q_stages,
        )
    )
    for i, (name, *products) in enumerate((("values", "s", "dv"), ("keys", "dp", "dk"))):
        other = NAMES[1 - i]
        signals += [
            *(Signal(name=f"{what}_done", arrivals={name: 1}, waiters=(name,), kind="products")
              for what in products),
            Signal(name=f"{name}_stored", arrivals={name: 1}, waiters=(name,), kind="group"),
            Signal(name=f"{other}_read", arrivals={other: WARPGROUP}, waiters=(name,),
                   kind="named"),
        ]  # fmt: skip
    return signals


def _load(pipeline: WideBackwardPipeline) -> Role:
    """Q with K, dO with V, then Q and dO of the later tiles, each with a number of every row."""

    def fetch(what: str, stats: str, first: str = "") -> Program:
        writes = (what, stats, first) if first else (what, stats)
        num_bytes = STATS_BYTES + sum(_tile_bytes(pipeline, n) for n in (what, first) if n)
        return (
            Wait(f"{what}_empty"),
            Work(f"load {what}", Copy(kind="load", num_bytes=num_bytes, cold=bool(first)),
                 asynchronous=True, writes=writes),
            Arrive(f"{what}_full", after="tma"),
        )  # fmt: skip

    return Role(
        name="load_queries",
        warps=(LOAD_WARP,),
        registers=PRODUCER_REGISTERS,
        program=(
            *fetch("q", "lse", "k"),
            *fetch("do", "d", "v"),
            Loop("q_tiles", (*fetch("q", "lse"), *fetch("do", "d")), offset=-1),
        ),
    )


def _values(pipeline: WideBackwardPipeline) -> Role:
    """S and P, which is handed on, then dV."""
    depth, cols = pipeline.depths[0], pipeline.sum_dims[1]
    held = held_registers(pipeline, "values")
    powers = unpacked(mufu=ELEMENTS, fma=ELEMENTS, alu=ELEMENTS / 2)
    # In machine code stores stand among exponentials, as loads of P do among what makes dS.
    handed = Work("exp S, write P", SmemAccess(num_bytes=P_BYTES, among=powers),
                  reads=("lse",), writes=("p",))  # fmt: skip
    begin: Program = (
        Wait("q_full"),
        *start("s", product(pipeline, TILE_ROWS, depth, from_registers=held > 0), ("k", "q")),
    )
    step: Program = (
        Wait("s_done"),
        handed,
        Arrive("q_empty"),
        Arrive("p_full"),
        Wait("do_full"),
        *start("dv", product(pipeline, cols, TILE_ROWS, from_registers=True), ("do",)),
    )
    done: Program = (Wait("dv_done"), Arrive("do_empty"))
    return Role(
        name="values",
        warps=tuple(range(4)),
        registers=CONSUMER_REGISTERS,
        live=_live(pipeline)["values"] | {"K": held},
        program=(
            *_steps(begin, step, done),
            *_end(pipeline, "values", "dV", cols, "v"),
        ),
    )  # fmt: skip


def _keys(pipeline: WideBackwardPipeline) -> Role:
    """dP and, with the other's P, dS, then dK."""
    depth, cols = pipeline.depths[1], pipeline.sum_dims[0]
    held = held_registers(pipeline, "keys")
    gradients = unpacked(fma=2 * ELEMENTS, alu=ELEMENTS / 2)
    begin: Program = (
        Wait("do_full"),
        *start("dp", product(pipeline, TILE_ROWS, depth, from_registers=held > 0), ("v", "do")),
    )
    step: Program = (
        Wait("p_full"),
        Wait("q_full"),
        Wait("dp_done"),
        Work("read P, dS", SmemAccess(num_bytes=P_BYTES, among=gradients), reads=("p", "d")),
        Arrive("do_empty"),
        *start("dk", product(pipeline, cols, TILE_ROWS, from_registers=True), ("q",)),
    )
    done: Program = (Wait("dk_done"), Arrive("q_empty"))
    return Role(
        name="keys",
        warps=tuple(range(4, 8)),
        registers=CONSUMER_REGISTERS,
        live=_live(pipeline)["keys"] | {"V": held},
        program=(
            *_steps(begin, step, done),
            *_end(pipeline, "keys", "dK", cols, "k"),
        ),
    )  # fmt: skip


def _steps(begin: Program, step: Program, done: Program) -> Program:
    """All query tiles: each begins before the last product of the one before is waited for."""
    return (*begin, Loop("q_tiles", (*step, *begin, *done), offset=-1), *step, *done)


def _end(pipeline: WideBackwardPipeline, name: str, what: str, dim: int, place: str) -> Program:
    """Over V, or K, when the other warpgroup has read it for the last time."""
    other = NAMES[1 - NAMES.index(name)]
    stored = f"{name}_stored"
    return (
        Arrive(f"{name}_read"),
        Wait(f"{other}_read"),
        *store(pipeline, what, dim, place, stored),
        Wait(stored),
    )
