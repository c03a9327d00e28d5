"""What the producer warp and a consumer warpgroup do, per work tile (see `warpgroup`)."""

from __future__ import annotations

from collections.abc import Callable

from fa4.config import WARPGROUP_ROWS, WarpgroupPipeline
from fa4.plan.schema import (
    FOLLOWING,
    THREAD_REGISTERS,
    Arrive,
    Copy,
    GlobalStore,
    Loop,
    Program,
    Role,
    SmemAccess,
    Spill,
    Sync,
    Wait,
    Work,
)
from fa4.plan.warpgroup_code import (
    OWN_ROWS,
    cleared_sums,
    powers,
    probabilities,
    products,
    promoted,
    release,
    rescale,
    row_max,
    rows_of,
    softmax,
    unpacked,
)
from fa4.plan.warpgroup_packing import query_bytes, query_parts, straddles
from fa4.plan.work import mma
from fa4.plan.work_queue import draw_number, read_number

# What begins a work tile, what else comes before the loops, a step of them, what comes after.
Parts = tuple[Program, Program, Callable[[bool], Program], Program]

WIDE_O_COLS = 128  # beyond it, O is rescaled while S's product runs, before P V is issued

# Where not even S and O fit: how often a step moves O out and in, and for how many of it the stack
# has room: (published, overlap). Counted, like the other registers that cross to local memory, in
# the loops of 25 compiled kernels.
OUTPUT_MOVES = {
    (False, True): (3.0, 2.0),
    (False, False): (2.0, 1.0),
    (True, True): (2.1, 2.1),
    (True, False): (3.7, 3.2),
}

SECTOR_BYTES, QUAD_RUN_BYTES = 32, 64  # of L2; that a quad's threads store side by side
FLOAT_BYTES = 4  # of O's elements where it is a part of divided keys

BOX_ROW_BYTES = 128  # of a row, that one copy moves into memory swizzled by as much
# By the control codes of compiled loops: two tiles of one box take 142 to 156 cycles, of two 200.
ADDRESS_CYCLES, BOX_ADDRESS_CYCLES = 50.0, 25.0

# How often a step waits for registers that come back through L2. In the compiled loops whose stack
# exceeds the first cache, what lies between a load and its use is short of L2's latency by 1.1,
# 1.4, 1.9 and 4.3 times that.
SPILL_WAITS = 2

# Registers of a consumer thread beyond S, P and O: row maxima, sums and scales; addresses,
# descriptors, loop and barrier state.
STATISTICS_REGISTERS = 3 * OWN_ROWS
ADDRESS_REGISTERS = {False: 20, True: 18}  # published: True


def live_registers(pipeline: WarpgroupPipeline) -> dict[str, int]:
    """Registers of a consumer thread that hold values at once where most do, by what they hold.

    S is float32 and becomes P of 16 (8) bits in place. With overlap S of the next tile is under
    way while this tile's P is still an operand, unless P is in shared memory.
    """
    live = {"S": pipeline.tile_n // 2, "O": pipeline.head_dim_v // 2}
    if pipeline.overlap and pipeline.p_source == "registers":
        live["P"] = pipeline.tile_n * pipeline.element_bytes // 8
    return live | {
        "statistics": STATISTICS_REGISTERS,
        "addresses": ADDRESS_REGISTERS[pipeline.published],
    }


def spilled(pipeline: WarpgroupPipeline, registers: int) -> Program:
    """What of a step goes to local memory, if anything, for a budget of registers per thread.

    Before P V, which the turn at the tensor core is kept for.
    """
    over, live = _over(pipeline, registers), live_registers(pipeline)
    if over <= 0:
        return ()
    moved = held = min(4 + 2 * over, 28 + over)
    if over > live.get("P", 0):
        moves = OUTPUT_MOVES[pipeline.published, pipeline.overlap]
        moved, held = (round(share * live["O"]) for share in moves)
    return (Work("spill", Spill(registers=moved, held=held, waits=SPILL_WAITS)),)


def _over(pipeline: WarpgroupPipeline, registers: int) -> int:
    """Registers that are live at once beyond a thread's."""
    return sum(live_registers(pipeline).values()) - min(registers, THREAD_REGISTERS)


def producer_role(pipeline: WarpgroupPipeline, *, registers: int, early: bool) -> Role:
    """K and Q, then K of the next and V of this tile in turn, as far ahead as the rings allow.

    early: L2 fetches the next work tile's Q before there is a place for it.
    """
    size, tile_n = pipeline.element_bytes, pipeline.tile_n

    def load(what: str, num_bytes: int, boxes: int, cold: bool, place: str) -> Program:
        cycles = ADDRESS_CYCLES + BOX_ADDRESS_CYCLES * boxes
        cycles = 0.0 if pipeline.published else cycles
        copy = Copy(kind="load", num_bytes=num_bytes, cold=cold, boxes=boxes,
                    address_cycles=cycles)  # fmt: skip
        return (
            Work(f"load {what}", copy, asynchronous=True, writes=(place,)),
            Arrive(f"{what}_full", after="tma"),
        )

    def fetch(what: str, num_bytes: int, cols: int, cold: bool = False) -> Program:
        boxes = -(-cols * size // BOX_ROW_BYTES)
        return Wait(f"{what}_empty"), *load(what, num_bytes, boxes, cold, what)

    d, dv = pipeline.widths
    key_bytes, value_bytes = tile_n * d * size, tile_n * dv * size
    parts = query_parts(pipeline)
    boxes = -(-d * size // BOX_ROW_BYTES)
    if not straddles(pipeline.packed):
        boxes *= pipeline.consumers
    q: Program = (Wait("q_empty"),)
    for i, part in enumerate(parts):
        place = "q" if len(parts) == 1 else rows_of("q@", i, d * size)
        num_bytes = query_bytes(pipeline)[1] // len(parts)
        q += load(part, num_bytes, boxes // len(parts), not early, place)
    k, v = fetch("k", key_bytes, d), fetch(loaded_values(pipeline), value_bytes, dv)
    program = (
        *fetch("k", key_bytes, d, cold=True),
        *q,
        Loop("kv_tiles", (*k, *v), offset=-1),
        *v,
        *(draw_number() if pipeline.scheduler == "queue" else ()),
    )
    warp = 4 * pipeline.consumers
    return Role(name="load", warps=(warp,), registers=registers, program=program)


def loaded_values(pipeline: WarpgroupPipeline) -> str:
    """The ring that V is loaded into."""
    return "raw" if pipeline.transposes else "v"


def consumer_role(
    pipeline: WarpgroupPipeline, i: int, *, registers: int, output_over_queries: bool, ahead: bool
) -> Role:
    """Warpgroup i's program; ahead: the next work tile begins before this one's output."""
    spills = spilled(pipeline, registers)
    begin, first, step, end = (_overlapped if pipeline.overlap else _serial)(pipeline, i, spills)
    parts = query_parts(pipeline)
    begin = (Wait(f"{parts[i % len(parts)]}_full"), *begin)
    if pipeline.scheduler == "queue":  # read beside the last product
        awaited = len(_await_values(i)) if pipeline.overlap else 0
        end = (*end[: len(end) - awaited], *read_number(), *end[len(end) - awaited :])
    following = (Loop(FOLLOWING, begin),) if ahead else ()
    turn = (Arrive("turn0"),) if pipeline.takes_turns and i == pipeline.consumers - 1 else ()
    loops = (
        Loop("masked_tiles", step(True), offset=-1 if pipeline.overlap else 0),
        Loop("plain_tiles", step(False)),
    )
    return Role(
        name=f"consumer{i}",
        warps=tuple(range(4 * i, 4 * i + 4)),
        registers=registers,
        live=live_registers(pipeline),
        passing=_passing(pipeline, i) if passes_tiles(pipeline) else (),
        prologue=(*turn, *begin) if ahead else turn,  # the first turn is the first one's
        closing=(Wait(f"stored{i}"),) if pipeline.stages_output and not output_over_queries else (),
        program=(
            *(() if ahead else begin),
            *first,
            *(cleared_sums(pipeline, i) if pipeline.promote else ()),
            *loops,
            *(() if output_over_queries else (Arrive("q_empty"),)),
            *end,
            *following,
            *(
                _epilogue(pipeline, i, output_over_queries)
                if pipeline.stages_output
                else _from_registers(pipeline, i)
            ),
        ),
    )


def passes_tiles(pipeline: WarpgroupPipeline) -> bool:
    """Does a warpgroup pass over tiles of which only rows of others see keys?

    Under a mask, also where its own rows lie beyond the sequence. Without one that slows it down.
    """
    return not pipeline.published and pipeline.causal and pipeline.consumers > 1


def _passing(pipeline: WarpgroupPipeline, i: int) -> Program:
    take, give = _turns(pipeline, i)
    tiles = (Wait("k_full"), Arrive("k_empty"), Wait("v_full"), Arrive("v_empty"))
    return (*tiles, *take, *give)


def _serial(pipeline: WarpgroupPipeline, i: int, spills: Program) -> Parts:
    """S, softmax, rescale, P V, one after the other.

    A turn begins with P V and ends when the next S is issued: its product runs on in the other's.
    """
    take, give = _turns(pipeline, i)
    scores, values = (of(pipeline, i, bool(spills)) for of in (_scores, _values))

    def step(masked: bool) -> Program:
        return (
            *scores,
            *give,
            *_await_scores(i),
            *softmax(pipeline, i, masked),
            *(() if pipeline.published else rescale(pipeline, i)),
            *probabilities(pipeline, i),
            Wait("v_full"),
            *take,
            *spills,
            *values,
            *_await_values(i),
            *release(pipeline, i),
        )

    return take, (), step, give


def _overlapped(pipeline: WarpgroupPipeline, i: int, spills: Program) -> Parts:
    """S of this tile, then P V of the last one in the same turn, while this softmax runs.

    The first tile, always masked, has no earlier P V to run beside it, the last P V no next S.
    """
    take, give = _turns(pipeline, i)
    early = pipeline.head_dim_v > WIDE_O_COLS and pipeline.published
    before, after = (rescale(pipeline, i), ()) if early else ((), rescale(pipeline, i))
    # Within a turn, nothing is waited for; without turns, S's product does not wait for V.
    late: Program = () if pipeline.published or take else (Wait("v_full"),)
    at_once: Program = () if late else (Wait("v_full"),)
    scores, values = (of(pipeline, i, bool(spills)) for of in (_scores, _values))
    done, freed = _await_values(i)
    soon: Program = ()
    if spills:  # each instruction of P V is waited for; the row maximum is among them
        values, soon, give = _values(pipeline, i, True, beside=True), (done, *give), ()

    def step(masked: bool) -> Program:
        return (
            Wait("k_full"),
            *at_once,
            *take,
            *scores[1:],
            *late,
            *before,
            *spills,
            *values,
            *give,
            *_await_scores(i),
            *row_max(pipeline, i, masked),
            *soon,
            *powers(pipeline, i),
            *(() if soon else (done,)),
            freed,
            *release(pipeline, i),
            *probabilities(pipeline, i),
            *after,
            *(promoted(pipeline, i, pipeline.promote) if pipeline.promote else ()),
        )

    first: Program = (
        *_await_scores(i),
        *softmax(pipeline, i, True),
        *probabilities(pipeline, i),
    )
    end: Program = (*before, Wait("v_full"), *values, *_await_values(i))
    return scores, first, step, end


def _scores(pipeline: WarpgroupPipeline, i: int, waited: bool) -> Program:
    """S's product; waited: as the compiler issues it where registers do not suffice."""
    size, d = pipeline.element_bytes, pipeline.head_dim
    product = mma(WARPGROUP_ROWS, pipeline.tile_n, d, element_bytes=size, in_registers=True)
    product = products(pipeline, product, waited)
    own = rows_of("q@", i, pipeline.widths[0] * size)
    reads = ("q@" if straddles(pipeline.packed) else own, "k")
    return (
        Wait("k_full"),
        Work(f"QK{i}", product, asynchronous=not waited, reads=reads),
        Arrive(f"s{i}_done", after="tensor"),
    )


def _values(pipeline: WarpgroupPipeline, i: int, waited: bool, *, beside: bool = False) -> Program:
    """P V; waited: as for `_scores`, beside: with other work between its instructions."""
    size, dv, tile_n = pipeline.element_bytes, pipeline.head_dim_v, pipeline.tile_n
    shared = pipeline.p_source == "smem"
    product = mma(WARPGROUP_ROWS, dv, tile_n, element_bytes=size, a_in_tmem=not shared,
                  in_registers=True)  # fmt: skip
    product = products(pipeline, product, waited)
    reads = (rows_of("p", i, tile_n * size), "v") if shared else ("v",)
    return (
        Work(f"PV{i}", product, asynchronous=beside or not waited, reads=reads),
        Arrive(f"o{i}_done", after="tensor"),
    )


def _await_scores(i: int) -> Program:
    return Wait(f"s{i}_done"), Arrive("k_empty")


def _await_values(i: int) -> Program:
    return Wait(f"o{i}_done"), Arrive("v_empty")


def _turns(pipeline: WarpgroupPipeline, i: int) -> tuple[Program, Program]:
    """Wait for this warpgroup's turn at the tensor core, and hand it on."""
    if not pipeline.takes_turns:
        return (), ()
    return (Wait(f"turn{i}"),), (Arrive(f"turn{(i + 1) % pipeline.consumers}"),)


def stored_bytes(row_bytes: int) -> int:
    """Bytes of sectors that a row's stores touch, of a quad at a time, each thread 16 bytes.

    A row of odd 16 bytes begins in the middle of a sector as often as not, and so do all its runs.
    """
    runs = [min(QUAD_RUN_BYTES, row_bytes - at) for at in range(0, row_bytes, QUAD_RUN_BYTES)]
    whole, shifted = (
        sum(-(-(start + run) // SECTOR_BYTES) for run in runs) * SECTOR_BYTES
        for start in (0, SECTOR_BYTES // 2)
    )
    return (whole + shifted) // 2 if row_bytes % SECTOR_BYTES else whole


def _from_registers(pipeline: WarpgroupPipeline, i: int) -> Program:
    """O divided by its row sums, to global memory: in float32 two columns by two; or eight by
    eight, for which the threads of a quad exchange theirs (an exchange and three choices for each
    two columns); of 8-bit products four by four, which are a thread's own."""
    dv = pipeline.head_dim_v
    scale = unpacked(fma=dv / 2, alu=dv / 4)
    exchange, num_bytes = unpacked(other=dv / 4), WARPGROUP_ROWS * dv * FLOAT_BYTES
    held: Program = ()
    if pipeline.direct and pipeline.transposes:
        exchange, num_bytes = unpacked(other=dv / 8), WARPGROUP_ROWS * dv * pipeline.output_bytes
        held = promoted(pipeline, i, 1) if pipeline.promote else ()
    elif pipeline.direct:
        exchange = unpacked(alu=3 * dv / 4, other=dv / 4 + dv / 16)
        num_bytes = WARPGROUP_ROWS * stored_bytes(dv * pipeline.output_bytes)
    return (
        *held,
        Work(f"scale O{i}", scale),
        Work(f"order O{i}", exchange),
        Work(f"store O{i}", GlobalStore(num_bytes=num_bytes)),
    )


def _epilogue(pipeline: WarpgroupPipeline, i: int, over_queries: bool) -> Program:
    """O divided by the row sums and stored by one thread, once the last store has been read."""
    size, dv = pipeline.output_bytes, pipeline.head_dim_v
    d_width, dv_width = pipeline.widths
    output = rows_of("o", i, max(dv_width, d_width if over_queries else 0) * size)
    num_bytes = WARPGROUP_ROWS * dv * size
    # One thread waits for the last store.
    free: Program = (Wait(f"stored{i}"), Work(f"meet {i}", Sync()))
    if pipeline.promote:  # it was waited for before the sums
        free = (*promoted(pipeline, i, 1), Work(f"meet {i}", Sync()))
    return (
        Work(f"scale O{i}", unpacked(fma=dv / 2, alu=dv / 4)),
        *(() if over_queries else free),
        Work(f"write O{i}", SmemAccess(num_bytes=num_bytes), writes=(output,)),
        Work(f"show O{i}", Sync(fenced=True)),
        Work(f"store O{i}", Copy(kind="store", num_bytes=num_bytes), asynchronous=True,
             reads=(output,)),
        Arrive(f"stored{i}", after="tma"),
        *((Wait(f"stored{i}"), Work(f"meet {i}", Sync()), Arrive("q_empty"))
          if over_queries else ()),
    )  # fmt: skip
