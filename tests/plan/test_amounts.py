"""What a plan moves, multiplies and stores, against what the tile it computes is made of.

Every amount is added up over one work tile from the shapes of attention: products of
2 (d + dv) multiply-adds per pair forward and 3 d + 2 dv backward, every operand's bytes where it is
copied, where it lies and where a barrier expects it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

import pytest

from fa4.config import WARPGROUP_ROWS, BackwardConfig, BackwardPipeline, WarpgroupPipeline
from fa4.hardware import H100
from fa4.plan import PipelinePlan
from fa4.plan.backward import TILE
from fa4.plan.schema import (
    Arrive,
    Copy,
    Loop,
    Math,
    Mma,
    Program,
    SmemAccess,
    Spill,
    Wait,
    Work,
)
from fa4.plan.warpgroup import warpgroup_plan
from fa4.plan.warpgroup_code import probabilities, softmax
from fa4.plan.warpgroup_packing import query_parts
from fa4.plan.work_stealing import RESPONSE_BYTES
from tests.plan.plans import BACKWARD, FORWARD, PUBLISHED, forward, published

TILES, MASKED = 5, 3  # KV tiles of the work tile, or query tiles of a backward one
ALIGNMENT = 1024  # of what TMA writes with its widest swizzle
Step = Wait | Arrive | Work


def warpgroups(**choices: object) -> PipelinePlan:
    """A plan of a kernel without tensor memory on an H100."""
    return warpgroup_plan(WarpgroupPipeline(**choices), H100)


HOPPER = {
    "FA3": WarpgroupPipeline(),
    "FA3, head dim 64": WarpgroupPipeline(head_dim=64),
    "FA3, three warpgroups": WarpgroupPipeline(consumers=3, head_dim=64),
    "no overlap": WarpgroupPipeline(overlap=False),
    "serial": WarpgroupPipeline(overlap=False, ping_pong=False),
    "one warpgroup": WarpgroupPipeline(consumers=1),
    "three without turns": WarpgroupPipeline(consumers=3, overlap=False, kv_stages=1),
    "P in shared memory": WarpgroupPipeline(p_source="smem", tile_n=112),
    "P in shared memory, serial": WarpgroupPipeline(p_source="smem", overlap=False),
    "wide values": WarpgroupPipeline(head_dim=256, tile_n=80),
    "O over Q": WarpgroupPipeline(head_dim=192, head_dim_v=128),
    "narrow values": WarpgroupPipeline(head_dim=128, head_dim_v=64, tile_n=96),
}


def steps(program: Program, trips: Mapping[str, int]) -> Iterator[Step]:
    """The steps of a program one after the other, loops unrolled."""
    for step in program:
        if isinstance(step, Loop):
            for _ in range(max(0, trips[step.trip] + step.offset)):
                yield from steps(step.body, trips)
        else:
            yield step


def works(plan: PipelinePlan, role: str = "") -> list[Work]:
    """All work of one work tile: TILES tiles, of which the first MASKED are masked."""
    counts = dict.fromkeys(plan.trips, TILES)
    counts |= {"masked_tiles": MASKED, "plain_tiles": TILES - MASKED}
    found = [step for some in plan.roles if role in ("", some.name)
             for step in steps(some.program, counts)]  # fmt: skip
    return [step for step in found if isinstance(step, Work)]


def multiply_adds(plan: PipelinePlan) -> int:
    amounts = [work.amount for work in works(plan)]
    return sum(a.rows * a.cols * a.depth for a in amounts if isinstance(a, Mma))


def copied(plan: PipelinePlan, kind: str) -> int:
    amounts = [work.amount for work in works(plan)]
    return sum(a.num_bytes for a in amounts if isinstance(a, Copy) and a.kind == kind)


@pytest.mark.parametrize("name", HOPPER)
def test_hopper_products_and_copies(name: str) -> None:
    """Q once, K and V once per tile, all for every warpgroup; O out, in 16 bits."""
    pipeline = HOPPER[name]
    plan = warpgroup_plan(pipeline, H100)
    d, dv, rows = pipeline.head_dim, pipeline.head_dim_v, 64 * pipeline.consumers
    assert multiply_adds(plan) == rows * TILES * pipeline.tile_n * (d + dv)
    assert copied(plan, "load") == 2 * (rows * d + TILES * pipeline.tile_n * (d + dv))
    assert copied(plan, "store") == 2 * rows * dv
    written = sum(w.amount.num_bytes for w in works(plan) if isinstance(w.amount, SmemAccess))
    probabilities = rows * TILES * pipeline.tile_n if pipeline.p_source == "smem" else 0
    assert written == 2 * (rows * dv + probabilities)


@pytest.mark.parametrize("name", HOPPER)
def test_hopper_operands_in_shared_memory(name: str) -> None:
    """Q K^T reads both operands, P V only V, unless P is in shared memory too."""
    pipeline = HOPPER[name]
    plan = warpgroup_plan(pipeline, H100)
    read = {
        work.what[:2]: (work.amount.a_bytes, work.amount.b_bytes)
        for work in works(plan)
        if isinstance(work.amount, Mma)
    }
    d, dv, tile_n = pipeline.head_dim, pipeline.head_dim_v, pipeline.tile_n
    p_bytes = 2 * WARPGROUP_ROWS * tile_n if pipeline.p_source == "smem" else 0
    q_bytes = 2 * WARPGROUP_ROWS * d
    assert read == {"QK": (q_bytes, 2 * tile_n * d), "PV": (p_bytes, 2 * tile_n * dv)}


@pytest.mark.parametrize("name", HOPPER)
def test_hopper_memory_and_barriers(name: str) -> None:
    """A buffer holds its tile and a barrier expects it; O takes Q's place where it has to."""
    pipeline = HOPPER[name]
    plan = warpgroup_plan(pipeline, H100)
    d, dv, rows = pipeline.head_dim, pipeline.head_dim_v, 64 * pipeline.consumers
    tiles = {"q": rows * d, "k": pipeline.tile_n * d, "v": pipeline.tile_n * dv}
    for what, elements in tiles.items():
        parts = query_parts(pipeline) if what == "q" else (what,)
        buffer, full = plan.buffer(what), plan.signal(f"{parts[0]}_full")
        assert buffer.size == 2 * elements
        assert [plan.signal(f"{part}_full").tx_bytes for part in parts] == (
            [2 * elements // len(parts)] * len(parts)
        )
        stages = 1 if what == "q" else pipeline.kv_stages
        empty = plan.signal(f"{what}_empty")
        assert buffer.stages == full.stages == empty.stages == empty.free == stages
        # One lane of each warp releases a slot when it has waited for the products.
        assert set(empty.arrivals.values()) == {4}
    q, o = plan.buffer("q"), plan.buffer("o")
    elements = (rows + pipeline.kv_stages * pipeline.tile_n) * (d + dv)
    if pipeline.p_source == "smem":
        assert plan.buffer("p").size == 2 * rows * pipeline.tile_n
        elements += rows * pipeline.tile_n
    if 2 * elements > 2**10 * 222:
        assert (o.start, o.size) == (q.start, q.size)
    else:
        assert o.size == 2 * rows * dv and not o.overlaps
    for i in range(pipeline.consumers):  # a warpgroup has one place for its rows of O
        # Over Q, the store is waited for at once.
        assert plan.signal(f"stored{i}").free == (0 if o.overlaps else o.stages)
    assert plan.bytes_used("smem") <= H100.smem_bytes_per_cta
    assert plan.buffer("barriers").size >= 8 * sum(
        signal.stages for signal in plan.signals if signal.kind == "mbarrier"
    )


@pytest.mark.parametrize(("overlap", "consumers", "head_dim", "turns"), [
    (True, 1, 128, False), (True, 2, 128, True), (True, 3, 128, True), (True, 2, 136, False),
    (False, 1, 128, False), (False, 2, 256, True), (False, 3, 64, False),
])  # fmt: skip
def test_who_takes_turns(overlap: bool, consumers: int, head_dim: int, turns: bool) -> None:
    """As the published kernels choose, unless the caller does; a turn is handed to the next."""
    pipeline = WarpgroupPipeline(overlap=overlap, consumers=consumers, head_dim=head_dim,
                                 tile_n=64, kv_stages=1)  # fmt: skip
    assert pipeline.takes_turns is turns
    if consumers > 1:
        assert replace(pipeline, ping_pong=not turns).takes_turns is not turns
    plan = warpgroup_plan(pipeline, H100)
    names = [f"turn{i}" for i in range(consumers)] if turns else []
    assert [s.name for s in plan.signals if s.name.startswith("turn")] == names
    alone = "overlapped" if pipeline.overlap else "serial"
    assert plan.name.split()[0] == ("ping-pong" if pipeline.takes_turns else alone)
    for i, name in enumerate(names):
        assert plan.signal(name).arrivals == {f"consumer{(i - 1) % consumers}": 128}


@pytest.mark.parametrize(("choices", "live"), [
    ({}, 64 + 32 + 64), ({"p_source": "smem"}, 64 + 64), ({"overlap": False}, 64 + 64),
    ({"head_dim": 256, "tile_n": 80}, 40 + 20 + 128),
])  # fmt: skip
def test_registers_of_a_consumer(choices: dict, live: int) -> None:
    """S and O in float32, and P of 16 bits where the next S is computed beside it."""
    role = warpgroups(**choices).role("consumer0")
    assert role.live["S"] + role.live["O"] + role.live.get("P", 0) == live
    assert role.spilled_registers == 0
    tight = replace(role, registers=sum(role.live.values()) - 8)
    assert tight.spilled_registers == 8
    wide = replace(role, registers=512, live={"S": 256, "O": 8})
    assert wide.spilled_registers == 264 - 255  # an instruction names no more, whatever there is


def test_three_warpgroups_with_all_of_it_in_registers_spill() -> None:
    """160 registers each: 128 keys with P as an operand do not fit, without overlap they do."""

    def spilled(**choices: object) -> int:
        return warpgroups(consumers=3, **choices).role("consumer1").spilled_registers

    assert spilled(tile_n=128) > 0 and spilled(tile_n=112) > 0
    assert spilled(tile_n=80) == spilled(overlap=False) == spilled(p_source="smem") == 0


# Head dims, warpgroups, tile_n, overlap, published -> registers of a thread that the compiled loop
# of plain steps stores to local memory (and loads again), from its disassembly.
STORED = {
    (128, 128, 3, 96, True, False): 8,
    (64, 64, 3, 144, True, False): 16,
    (128, 128, 1, 208, True, False): 16,
    (96, 96, 3, 128, True, False): 24,
    (128, 128, 3, 112, True, False): 32,
    (192, 128, 3, 112, True, False): 32,
    (64, 64, 3, 160, True, False): 40,
    (96, 96, 3, 144, True, False): 49,
    (128, 128, 3, 128, True, False): 54,
    (64, 64, 3, 192, True, False): 70,
    (96, 96, 3, 176, True, False): 145,
    (128, 128, 3, 144, True, False): 192,
    (128, 128, 3, 160, False, False): 132,
    (128, 128, 3, 112, True, True): 28,
    (128, 128, 3, 128, True, True): 56,
    (128, 128, 3, 176, True, True): 138,
    (128, 128, 3, 176, False, True): 235,
}


@pytest.mark.parametrize(("choice", "stored"), STORED.items(), ids=str)
def test_spilled_registers_are_those_of_compiled_loops(
    choice: tuple[int, int, int, int, bool, bool], stored: int
) -> None:
    """To 8; and every instruction of the products is waited for, as in all of these loops."""
    d, dv, consumers, tile_n, overlap, published = choice
    plan = warpgroups(head_dim=d, head_dim_v=dv, consumers=consumers, tile_n=tile_n,
                      overlap=overlap, published=published)  # fmt: skip
    own = works(plan, "consumer0")
    (spill,) = {w.amount for w in own if isinstance(w.amount, Spill)}
    assert spill.registers == pytest.approx(stored, abs=8)
    waits = {w.what: w.amount.waits for w in own if isinstance(w.amount, Mma)}
    assert waits == {"QK0": d / 16, "PV0": tile_n / 16}
    # Beside P V, if S does not wait in local memory too, the row maximum is taken.
    beside = {w.what for w in own if isinstance(w.amount, Mma) and w.asynchronous}
    assert beside == ({"PV0"} if overlap else set())


def test_what_fits_is_not_waited_for() -> None:
    """One wait for each product where nothing spills."""
    own = works(warpgroups(consumers=3, tile_n=80), "consumer0")
    assert {w.amount.waits for w in own if isinstance(w.amount, Mma)} == {1}
    assert not any(isinstance(w.amount, Spill) for w in own)


def test_hopper_arithmetic_of_a_step() -> None:
    """Of a score: an exponential, a fused scale-subtract, an addition to the row sum, a maximum and
    half a conversion; of an element of O: a product per step. A thread holds half of a row's
    columns, of two rows, each with its maximum and its scale."""
    pipeline = WarpgroupPipeline(overlap=False)
    plan = warpgroups(overlap=False, published=True)
    own = [w for w in works(plan, "consumer0") if hasattr(w.amount, "mufu")]
    count, dv = TILES * pipeline.tile_n / 2, pipeline.head_dim_v

    def total(unit: str, *names: str) -> float:
        return sum(getattr(w.amount, unit) for w in own if w.what.startswith(names))

    assert total("mufu", "exp") == count == total("alu", "row max")
    assert total("fma", "exp") == 2 * count + TILES * dv / 2  # O is rescaled between them
    assert total("alu", "exp") == count / 2  # two numbers per conversion
    assert total("mufu", "exchange") == 2 * TILES
    assert [w for w in own if w.what.startswith(("rescale", "convert"))] == []
    assert total("fma", "scale") == dv / 2 and total("alu", "scale") == dv / 4
    assert total("mufu", "row", "mask", "rescale", "scale") == 0
    masked = total("alu", "mask")
    tiles = MASKED / TILES  # a select per score of a masked tile, and some predicates
    assert tiles * count <= masked <= 2 * tiles * count


# tile_n, p_source, overlap -> exponentials, FMA and ALU pipe of a plain step of the compiled kernel
# (head dims 128, two warpgroups), disassembled; of a masked one, more on the ALU pipe.
COMPILED_STEPS = {
    (64, "registers", True): (32, 77, 57, 53),
    (112, "registers", True): (56, 126, 92, 85),
    (128, "registers", True): (64, 142, 104, 100),
    (128, "registers", False): (64, 140, 104, 101),
    (176, "registers", True): (88, 193, 138, 138),
}


@pytest.mark.parametrize(("choice", "counts"), COMPILED_STEPS.items(), ids=str)
def test_own_hopper_step_is_the_compiled_one(
    choice: tuple[int, str, bool], counts: tuple[int, int, int, int]
) -> None:
    """Of each pipe within 6 instructions, none of them of what a step does only now and then."""
    tile_n, source, overlap = choice
    pipeline = WarpgroupPipeline(tile_n=tile_n, p_source=source, overlap=overlap)
    steps = [
        [w for w in (*softmax(pipeline, 0, masked), *probabilities(pipeline, 0))
         if isinstance(w, Work) and isinstance(w.amount, Math) and w.share is None]
        for masked in (False, True)
    ]  # fmt: skip
    plain, masked = (
        [sum(getattr(w.amount, unit) for w in step) for unit in ("mufu", "fma", "alu")]
        for step in steps
    )
    assert plain == pytest.approx(counts[:3], abs=6)
    assert masked[2] - plain[2] == pytest.approx(counts[3], abs=6)


def test_emulated_exponentials_leave_the_unit_for_the_fma_pipe() -> None:
    """24 of 64 as in the disassembled kernel: 40 exponentials, 282 on the FMA pipe, 157 on ALU."""
    pipeline = WarpgroupPipeline(emulated=0.375)
    step = [*softmax(pipeline, 0, False), *probabilities(pipeline, 0)]
    own = [w.amount for w in step if isinstance(w, Work) and isinstance(w.amount, Math)
           and w.share is None]  # fmt: skip
    assert sum(x.mufu for x in own) == 40
    assert sum(x.fma for x in own) == pytest.approx(282, abs=6)
    assert sum(x.alu for x in own) == pytest.approx(157, abs=25)


@pytest.mark.parametrize("name", FORWARD)
def test_forward_products_and_copies(name: str) -> None:
    """S and O of every Q tile; Q once, K and V once per tile and CTA pair; O out."""
    plan = FORWARD[name]
    q = plan.buffer("q")
    size = 1 if "FP8" in name else 2
    tile_n, tiles = plan.buffer("s0").size, q.stages
    d, dv = q.size // 128 // size, plan.buffer("o0").size
    assert multiply_adds(plan) == tiles * 128 * TILES * tile_n * (d + dv)
    keys = TILES * tile_n * (d + dv) * size // plan.cta_group
    answer = RESPONSE_BYTES if any(role.name == "scheduler" for role in plan.roles) else 0
    assert copied(plan, "load") == tiles * 128 * d * size + keys + answer
    assert copied(plan, "store") == tiles * 128 * dv * 2


@pytest.mark.parametrize("name", FORWARD)
def test_forward_memory(name: str) -> None:
    """Row statistics are two floats per row; nothing that TMA fills is crooked or wastes room."""
    plan = FORWARD[name]
    smem = [buffer for buffer in plan.buffers if buffer.space == "smem"]
    for buffer in smem:
        if buffer.name in ("q", "o", "p", "kv"):
            assert buffer.start % ALIGNMENT == 0 and buffer.size % ALIGNMENT == 0
        if buffer.name == "row_stats":
            assert buffer.size == 2 * 128 * 4 * plan.buffer("q").stages
    apart = sorted(b.start for b in smem if not b.overlaps)
    ends = {b.start: b.stop for b in smem if not b.overlaps}
    gaps = [later - ends[start] for start, later in pairwise(apart)]
    assert apart[0] == 0 and all(0 <= gap < ALIGNMENT for gap in gaps)


@pytest.mark.parametrize("name", FORWARD)
def test_softmax_tells_the_correction_a_float_per_row(name: str) -> None:
    """alpha in every step, the row's sum and maximum at its end; none where there is no message."""
    plan = FORWARD[name]
    told = [w for w in works(plan, "softmax0") if w.writes == ("row_stats",)]
    alphas = [work.amount.num_bytes for work in told if "alpha" in work.what]
    assert alphas == [] if "inline" in name else [4 * 128] * TILES


def test_everybody_has_read_the_next_work_tile() -> None:
    """The answer is overwritten when each warp of each role has it; all of them read it."""
    plan = forward(scheduler="clc")
    empty, full = plan.signal("work_empty"), plan.signal("work_full")
    assert dict(empty.arrivals) == {role.name: len(role.warps) for role in plan.roles}
    assert set(full.waiters) == set(empty.arrivals)
    assert full.tx_bytes == plan.buffer("work").size == 16


@pytest.mark.parametrize("plan", [*BACKWARD.values(), *PUBLISHED.values()])
def test_backward_products_and_copies(plan: PipelinePlan) -> None:
    """Five products per pair of tiles; Q, dO, LSE and D per query tile; K and V once."""
    pair = plan.cta_group == 2
    d, dv = plan.buffer("dk").size, plan.buffer("dv").size
    assert multiply_adds(plan) == TILES * TILE * TILE * (3 * d + 2 * dv)
    # A pair also loads Q and dO transposed, and K transposed, half in each CTA.
    rows = TILES * TILE * (d + dv) * 2 * (2 if pair else 1) // plan.cta_group
    keys = TILE * (d + dv) * 2 + (TILE * d * 2 if pair else 0)
    assert copied(plan, "load") == rows + keys + TILES * 2 * TILE * 4
    # In a pair each CTA has dQ of both for half of its rows.
    assert copied(plan, "reduce") == TILES * TILE * d * 4 // plan.cta_group
    assert copied(plan, "store") == TILE * (d + dv) * 2


def test_published_memory_of_a_pair() -> None:
    """Tiles of 128 x d and 128 x dv, those of the pair by halves; two floats per query row."""
    d, dv = 128, 64
    numerics = BackwardConfig(cta_group=2)
    pipeline = BackwardPipeline(numerics=numerics, head_dim=d, head_dim_v=dv)
    plan = published(cta_group=2, head_dim=d, head_dim_v=dv)
    assert pipeline.element_bytes == 2
    sizes = {"q": TILE * d, "k": 2 * TILE * d, "v": 2 * TILE * dv, "do": TILE * dv,
             "q_t": TILE * d, "do_t": TILE * dv, "k_t": 2 * TILE * d,
             "ds": 2 * TILE * TILE, "ds_exchange": TILE * TILE, "row_stats": 8 * TILE}  # fmt: skip
    assert {name: plan.buffer(name).size for name in sizes} == sizes
    for buffer in plan.buffers:
        if buffer.space == "smem" and buffer.name not in ("row_stats", "barriers"):
            assert buffer.start % ALIGNMENT == 0
    assert plan.signal("q_t_full").tx_bytes == 2 * TILE * d
    assert plan.signal("do_t_full").tx_bytes == 2 * TILE * dv
    assert plan.signal("ds_peer").tx_bytes == plan.buffer("ds_exchange").size
    slots = sum(signal.stages for signal in plan.signals if signal.kind != "named")
    assert plan.buffer("barriers").size >= 8 * slots


def test_a_masked_step_costs_more() -> None:
    """Masking is instructions beside those of a plain step, and touches nothing else."""
    for plan in (forward(), forward(tile_n=64)):
        columns = plan.buffer("s0").size
        mask = [w.amount for w in works(plan, "softmax0") if w.what.startswith("mask")]
        assert len(mask) >= 1
        assert MASKED * columns < sum(m.alu for m in mask) < 1.5 * MASKED * columns
        assert sum(m.mufu + m.fma for m in mask) == 0
