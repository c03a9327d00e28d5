"""Work tiles against brute-force masks, launch orders, and the time of many tiles on many SMs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.config import (
    BackwardConfig,
    BackwardPipeline,
    ForwardConfig,
    ForwardPipeline,
    Problem,
    WarpgroupPipeline,
)
from fa4.designs.tiles import (
    L2_SECTION_BYTES,
    Lengths,
    WorkTiles,
    backward_order,
    backward_tiles,
    clusters,
    forward_tiles,
    lpt_order,
    split_trips,
    warpgroup_tiles,
)
from fa4.hardware import B200
from fa4.plan.backward import backward_plan
from fa4.plan.forward import forward_plan
from fa4.sim import chip, engine
from fa4.sim.chip import Execution, TileRunner, run_one_by_one, run_persistent
from fa4.sim.code import EventCode
from fa4.sim.costs import MachineCosts
from fa4.sim.lower import lower
from fa4.sim.machine import Machine, find_machine
from fa4.sim.turns import run_in_turn
from tests.sim.strategies import backward_pipelines, forward_pipelines, machines

EXAMPLES = settings(max_examples=200)
FEW = settings(max_examples=40)

LENGTHS = st.integers(1, 300)
SIDES = st.one_of(st.none(), st.integers(-60, 200))
WINDOWS = st.tuples(SIDES, SIDES).filter(
    lambda sides: None in sides or sides[0] + sides[1] >= 0  # type: ignore[operator]
)
TILE_SIZES = st.sampled_from((16, 32, 64, 96))


def visible(problem: Problem, count: int | None = None) -> np.ndarray:
    """(Sq, Sk) mask, element by element; or as many rows, whether there are queries or not."""
    left, right = problem.window_size
    rows, keys = np.indices((count or problem.seqlen_q, problem.seqlen_k))
    distance = keys - (rows + problem.seqlen_k - problem.seqlen_q)
    mask = np.ones(distance.shape, bool)
    if left is not None:
        mask &= distance >= -left
    if right is not None:
        mask &= distance <= right
    return mask


def count_tiles(mask: np.ndarray, tile: int) -> tuple[int, int]:
    """(tiles of columns with something visible, of these those that are whole and all visible)."""
    parts = [mask[:, start : start + tile] for start in range(0, mask.shape[1], tile)]
    return (
        sum(bool(part.any()) for part in parts),
        sum(bool(part.all()) and part.shape[1] == tile for part in parts),
    )


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Small shapes with any window and grouped heads."""
    heads_k, ratio = draw(st.integers(1, 2)), draw(st.sampled_from((1, 2, 3, 8)))
    window = draw(WINDOWS)
    return Problem(
        batch=draw(st.integers(1, 2)),
        seqlen_q=draw(LENGTHS),
        seqlen_k=draw(LENGTHS),
        heads_q=heads_k * ratio,
        heads_k=heads_k,
        head_dim=64,
        # -1 would say "unbounded" (FlashAttention 2 and 3)
        window_size=(window[0] if window[0] != -1 else 0, window[1] if window[1] != -1 else 1),
    )


def check_trips(trips: np.ndarray, mask: np.ndarray, tile: int) -> None:
    """One work tile's trips against its part of the mask; the first step is always masked."""
    seen, whole = count_tiles(mask, tile)
    total, masked, plain = (int(x) for x in trips)
    assert total == max(1, seen)
    assert plain == min(whole, total - 1)
    assert masked == total - plain


@EXAMPLES
@given(problems(), TILE_SIZES, TILE_SIZES, st.integers(1, 2))
def test_forward_trips_are_the_masks(
    problem: Problem, tile_m: int, tile_n: int, q_tiles: int
) -> None:
    """Each block of packed rows visits the KV tiles in which one of its rows sees a key."""
    numerics = ForwardConfig(tile_m=tile_m, tile_n=tile_n, q_tiles=q_tiles)
    pipeline = ForwardPipeline(head_dim=64, numerics=numerics)
    tiles, mask = forward_tiles(problem, pipeline), visible(problem)
    ratio, step = problem.heads_q // problem.heads_k, tile_m * q_tiles
    packed = np.repeat(mask, ratio, axis=0)  # the heads of a group side by side
    blocks = -(-len(packed) // step)
    assert len(tiles.trips) == problem.batch * problem.heads_k * blocks
    for trips, block in zip(tiles.trips, tiles.block, strict=True):
        check_trips(trips, packed[block * step : (block + 1) * step], tile_n)


@EXAMPLES
@given(
    problems(), st.sampled_from((16, 48, 80, 128)), st.integers(1, 3), st.booleans(), st.booleans()
)
def test_warpgroups_pass_over_tiles_of_which_they_see_no_key(
    problem: Problem, tile_n: int, consumers: int, causal: bool, packs: bool
) -> None:
    """The last tiles of the work tile's, up to the first of which one of their rows sees a key."""
    ratio = problem.heads_q // problem.heads_k if packs else 1
    pipeline = WarpgroupPipeline(head_dim=64, tile_n=tile_n, consumers=consumers, causal=causal,
                                 overlap=False, packed=ratio)  # fmt: skip
    tiles, step = warpgroup_tiles(problem, pipeline), 64 * consumers
    heads = problem.heads_q // ratio
    assert len(tiles.trips) == problem.batch * heads * -(-problem.seqlen_q * ratio // step)
    packed = np.repeat(visible(problem, problem.seqlen_q + step), ratio, axis=0)
    ahead = replace(problem, window_size=(None, problem.window_size[1]))
    until = np.repeat(visible(ahead, problem.seqlen_q + step), ratio, axis=0)  # the last key seen
    passes = causal and consumers > 1 and problem.window_size[1] is not None
    assert tiles.trips.shape[1] == (3 + 3 * consumers if passes else 3)
    for trips, block in zip(tiles.trips, tiles.block, strict=True):
        rows = packed[block * step : min((block + 1) * step, problem.seqlen_q * ratio)]
        seen = np.flatnonzero(rows.any(axis=0)) // tile_n
        first, count = (int(seen[0]) if len(seen) else None), int(trips[0])
        for i, (passed, masked, plain) in enumerate(trips[3:].reshape(-1, 3).tolist()):
            own = packed[block * step + 64 * i :][:64]
            assert passed + masked + plain == count and masked > 0
            if first is None:  # the one step of a block that sees nothing
                continue
            columns = slice(first * tile_n, (first + count) * tile_n)
            visited, last = own[:, columns], until[block * step + 64 * i :][:64, columns]
            sees = np.flatnonzero(last.any(axis=0)) // tile_n
            if block * step + 64 * i >= problem.seqlen_q * ratio:  # it has no row
                sees = sees[:0]
            assert passed == (count - 1 - sees[-1] if len(sees) else count - 1)
            _, whole = count_tiles(visited[:, : (count - passed) * tile_n], tile_n)
            assert plain == min(whole, count - passed - 1)


@given(st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=9))
def test_kinds_are_equal_where_all_trips_are(rows: list[list[int]]) -> None:
    """Of the CTA, and of each role that passes over tiles."""
    trips = np.array(rows)
    trips[:, 0] = trips[:, 1] + trips[:, 2]
    trips[:, 5] = trips[:, 0] - trips[:, 3] - trips[:, 4]
    kinds = chip.kinds_of(trips)
    same = (trips[:, None] == trips[None]).all(axis=2)
    assert np.array_equal(kinds[:, None] == kinds[None], same)


@EXAMPLES
@given(problems(), st.sampled_from((32, 64)), st.sampled_from((32, 64)), st.integers(1, 2))
def test_backward_trips_are_the_masks(
    problem: Problem, tile_m: int, tile_n: int, cta_group: int
) -> None:
    """Each block of keys visits the query tiles in which a row sees one of them."""
    numerics = BackwardConfig(tile_m=tile_m, tile_n=tile_n, cta_group=cta_group)
    tiles = backward_tiles(problem, BackwardPipeline(head_dim=64, numerics=numerics))
    mask, step = visible(problem).T, tile_n * cta_group
    assert len(tiles.trips) == problem.batch * problem.heads_k * -(-len(mask) // step)
    assert tiles.group == problem.heads_q // problem.heads_k
    for trips, block, first in zip(tiles.trips, tiles.block, tiles.first, strict=True):
        rows = mask[block * step : (block + 1) * step]
        check_trips(trips // tiles.group, rows, tile_m)
        seen = np.flatnonzero(rows.any(axis=0))
        assert (trips % tiles.group == 0).all()
        assert not len(seen) or first == seen[0] // tile_m


@FEW
@given(problems(), st.lists(st.tuples(LENGTHS, LENGTHS), max_size=4))
def test_varlen_is_each_sequence_alone(problem: Problem, pairs: list[tuple[int, int]]) -> None:
    """Packed sequences give the tiles of each one's own problem; empty queries give none."""
    lengths = [Lengths(*pair) for pair in [*pairs, (0, 5)]]
    pipeline = ForwardPipeline(head_dim=64)
    packed = forward_tiles(problem, pipeline, lengths)
    for batch, length in enumerate(lengths):
        own = replace(problem, batch=1, seqlen_q=length.q, seqlen_k=length.k)
        mine = packed.batch == batch
        assert np.array_equal(packed.trips[mine], forward_tiles(own, pipeline).trips)
    assert set(packed.batch) <= set(range(len(pairs)))


def tiles_of(cycles: list[int], heads: int = 1) -> WorkTiles:
    """Work tiles that are told apart by their trips, round robin over heads."""
    count = len(cycles)
    trips = np.array([[c, i, c] for i, c in enumerate(cycles)], np.int64).reshape(-1, 3)
    index = np.arange(count)
    head, block = index % heads, index // heads
    return WorkTiles(trips=trips, batch=0 * index, head=head, block=block, first=0 * index)


@dataclass
class Recorder:
    """A runner whose tiles take as many cycles as their first trip count; keeps what it ran."""

    ran: list[list[int]] = field(default_factory=list)
    code: EventCode = field(
        default_factory=lambda: make_code(ForwardPipeline(), find_machine("b200"))
    )

    def expect(self, sequences: object) -> None:
        """Whatever there is to do."""

    def run(self, trips: np.ndarray) -> Execution:
        """Note the tiles (their second column) and add up their cycles."""
        self.ran.append(trips[:, 1].tolist())
        units, shape = (
            len(self.code.unit_names),
            (
                len(self.code.role_names),
                len(self.code.signal_names),
            ),
        )
        return Execution(float(trips[:, 0].sum()), 0.0, np.zeros(units), np.zeros(shape), 1)


def make_code(pipeline: ForwardPipeline | BackwardPipeline, machine: Machine) -> EventCode:
    """Event code of either kind of pipeline."""
    costs = MachineCosts(machine.gpu, machine.costs)
    plan = (
        forward_plan(pipeline, B200)
        if isinstance(pipeline, ForwardPipeline)
        else backward_plan(pipeline, B200)
    )
    return lower(plan, costs.work, costs.signal, {"rescale_rate": 0.1})


CYCLES = st.lists(st.integers(1, 1000), min_size=1, max_size=40)
SLOTS = st.integers(1, 12)


@FEW
@given(CYCLES, SLOTS)
def test_persistent_machines_stride_through_the_tiles(cycles: list[int], slots: int) -> None:
    """Machine i takes i, i + machines, ...: every tile once, counts differ by one at most."""
    runner, tiles = Recorder(), tiles_of(cycles)
    result = run_persistent(runner, tiles, slots, 5.0)  # type: ignore[arg-type]
    assert runner.ran == [list(range(i, len(cycles), slots)) for i in range(len(runner.ran))]
    assert sorted(i for part in runner.ran for i in part) == list(range(len(cycles)))
    assert result.cycles == 5 + max(sum(cycles[i::slots]) for i in range(slots))
    assert 0.0 <= result.imbalance < 1.0


def test_a_cta_stays_until_its_stores_are_read() -> None:
    """After each tile where a CTA is launched for it, after the last one where it steals more."""
    runner = TileRunner(make_code(ForwardPipeline(), find_machine("b200")))
    tiles = tiles_of([2, 2, 2])
    trips = np.array([2, 0, 2])
    alone = runner.run(trips[None])
    assert alone.tail_cycles > 1000  # 32 KiB at 19.7 bytes a cycle
    same = WorkTiles(
        trips=np.tile(trips, (3, 1)), batch=tiles.batch, head=tiles.head, block=tiles.block,
        first=tiles.first,
    )  # fmt: skip
    launched, stolen = (
        run_one_by_one(runner, same, 1, 10.0, starts_once=once).cycles for once in (False, True)
    )
    assert launched == pytest.approx(3 * (10.0 + alone.cycles))
    assert stolen == pytest.approx(launched - 2 * (10.0 + alone.tail_cycles))


@FEW
@given(CYCLES, SLOTS)
def test_one_by_one_is_greedy(cycles: list[int], slots: int) -> None:
    """Every tile once; at most twice the ideal, by Graham's bound for list scheduling."""
    runner, tiles = Recorder(), tiles_of(cycles)
    result = run_one_by_one(runner, tiles, slots, 0.0)  # type: ignore[arg-type]
    assert runner.ran == [[i] for i in range(len(cycles))]
    total, longest = sum(cycles), max(cycles)
    ideal, rounding = max(total / slots, longest), 1 + 1e-12
    graham = total / slots + (1 - 1 / slots) * longest
    assert ideal <= result.cycles * rounding
    assert result.cycles <= graham * rounding and graham <= 2 * ideal


@FEW
@given(CYCLES, SLOTS, st.integers(1, 4), st.integers(0, 50))
def test_turns_only_delay(cycles: list[int], slots: int, heads: int, hop: int) -> None:
    """Every tile once, never faster than without turns, and a head's chain takes its hops."""
    tiles = tiles_of(cycles, heads)
    free = run_one_by_one(Recorder(), tiles, slots, 0.0)  # type: ignore[arg-type]
    runner = Recorder()
    result = run_in_turn(runner, tiles, slots, 0.0, float(hop))  # type: ignore[arg-type]
    assert runner.ran == [[i] for i in range(len(cycles))]
    assert result.cycles >= free.cycles * (1 - 1e-12)
    longest_chain = int(np.bincount(tiles.head).max())
    assert result.cycles >= hop * (longest_chain - 1)


def test_a_turn_waits_for_the_one_before() -> None:
    """Two CTAs of one head side by side: the second adds a hop after the first, tile by tile."""
    tiles = tiles_of([100, 100])
    result = run_in_turn(Recorder(), tiles, 2, 0.0, 7.0)  # type: ignore[arg-type]
    assert result.cycles == pytest.approx(100 + 7)
    other_heads = tiles_of([100, 100], heads=2)
    result = run_in_turn(Recorder(), other_heads, 2, 0.0, 7.0)  # type: ignore[arg-type]
    assert result.cycles == pytest.approx(100)


def test_no_tiles_take_no_time() -> None:
    """An empty problem is no error."""
    for run in (run_persistent, run_one_by_one):
        assert run(Recorder(), tiles_of([]), 4, 9.0).cycles == 0.0  # type: ignore[arg-type]
    assert run_in_turn(Recorder(), tiles_of([]), 4, 9.0, 1.0).cycles == 0.0  # type: ignore[arg-type]


@FEW
@given(problems(), st.integers(1, 1 << 27))
def test_lpt_order(problem: Problem, head_bytes: int) -> None:
    """A permutation; sections of heads in turn, as many as fit L2; in each, last blocks first."""
    problem = replace(problem, heads_q=16, heads_k=16)
    tiles = forward_tiles(problem, ForwardPipeline(head_dim=64, numerics=ForwardConfig(q_tiles=1)))
    order = lpt_order(tiles, head_bytes)
    assert sorted(order) == list(range(len(tiles.trips)))
    taken = tiles.take(order)
    head = taken.batch * 16 + taken.head
    width = next(w for w in (1 << n for n in range(40)) if 2 * w * head_bytes > L2_SECTION_BYTES)
    assert (np.diff(head // width) >= 0).all()
    for section in set(head // width):
        mine = head // width == section
        places = list(zip(-taken.block[mine], head[mine], strict=True))
        assert places == sorted(places)  # of equal blocks, head by head
        if problem.window_size[0] is None:  # without a left edge, later blocks see more
            assert (np.diff(taken.trips[mine, 0]) <= 0).all()


def test_nothing_to_do_has_the_shape_of_work() -> None:
    """No sequence: no work tile, of as many columns as any."""
    problem = Problem(batch=2, seqlen_q=256, seqlen_k=256, heads_q=1, heads_k=1, head_dim=64)
    some, none = (forward_tiles(problem, ForwardPipeline(head_dim=64), lengths)
                  for lengths in (None, []))  # fmt: skip
    assert none.trips.shape == (0, some.trips.shape[1]) and len(none.head) == 0 < len(some.head)


@pytest.mark.parametrize(("mib_per_head", "together"), [(8, 4), (16, 2), (26, 1), (60, 1)])
def test_heads_of_an_lpt_section(mib_per_head: int, together: int) -> None:
    """As many heads as 50 MiB of L2 hold (flash_attn.cute), rounded down to a power of two."""
    problem = Problem(seqlen_q=1024, seqlen_k=1024, heads_q=8, heads_k=8, head_dim=64, causal=True)
    tiles = forward_tiles(problem, ForwardPipeline(head_dim=64))
    heads = tiles.take(lpt_order(tiles, mib_per_head * 2.0**20)).head
    blocks = len(heads) // 8
    for start in range(0, len(heads), together * blocks):
        assert len(set(heads[start : start + together * blocks])) == together


@FEW
@given(problems(), st.sampled_from(("naive", "lpt", "spt")))
def test_backward_order(problem: Problem, scheduler: str) -> None:
    """A permutation, head by head, in the order that the scheduler's name says."""
    tiles = backward_tiles(problem, BackwardPipeline(head_dim=64))
    order = backward_order(tiles, scheduler)
    assert sorted(order) == list(range(len(tiles.trips)))
    taken = tiles.take(order)
    head = taken.batch * problem.heads_k + taken.head
    assert (np.diff(head) >= 0).all()
    for one in set(head):
        blocks, trips = taken.block[head == one], taken.trips[head == one, 0]
        keys = {"naive": np.diff(blocks), "lpt": -np.diff(trips), "spt": -np.diff(blocks)}
        assert (keys[scheduler] >= 0).all()


def test_lpt_helps_causal() -> None:
    """Under a causal mask, longest first ends sooner than in order of launch."""
    problem = Problem(seqlen_q=8192, seqlen_k=8192, heads_q=16, heads_k=16, head_dim=128,
                      causal=True)  # fmt: skip
    runner = TileRunner(make_code(ForwardPipeline(), find_machine("b200")))
    tiles = forward_tiles(problem, ForwardPipeline())
    longest_first = tiles.take(lpt_order(tiles, 8192 * 512.0))
    times = [run_one_by_one(runner, t, 148, 2000.0).cycles for t in (longest_first, tiles)]
    assert times[0] < times[1]
    assert clusters(B200, 1) == 148 and clusters(B200, 2) == 74


STEPS = st.tuples(st.integers(0, 200), st.integers(0, 4)).map(
    lambda pair: (max(1, sum(pair)), max(1, sum(pair)) - pair[0], pair[0])
)


def difference(code: EventCode, trips: list[tuple[int, int, int]]) -> float:
    """Relative difference of the periodic shortcut from simulating every step."""
    steps = np.array(trips)
    exact = TileRunner(code, exact=True).run(steps).cycles
    assert exact == engine.execute(code, steps).end
    return abs(TileRunner(code).run(steps).cycles / exact - 1)


@FEW
@given(forward_pipelines(), machines(), st.lists(STEPS, min_size=1, max_size=5), st.integers(1, 3))
def test_shortcut_of_different_tiles(
    pipeline: ForwardPipeline, machine: Machine, trips: list[tuple[int, int, int]], times: int
) -> None:
    """A persistent CTA over mixed work tiles: within 0.5% of all steps."""
    assert difference(make_code(pipeline, machine), trips * times) <= 0.005


@FEW
@given(forward_pipelines(), machines(), STEPS, st.integers(1, 30))
def test_shortcut_of_equal_tiles(
    pipeline: ForwardPipeline, machine: Machine, trips: tuple[int, int, int], times: int
) -> None:
    """Many equal work tiles: within 0.5% of all steps."""
    assert difference(make_code(pipeline, machine), [trips] * times) <= 0.005


@FEW
@given(backward_pipelines(), machines(), STEPS)
def test_shortcut_of_backward_tiles(
    pipeline: BackwardPipeline, machine: Machine, trips: tuple[int, int, int]
) -> None:
    """A backward CTA has one work tile: within 0.5% of all steps."""
    assert difference(make_code(pipeline, machine), [trips]) <= 0.005


def test_shortcut_gives_up_on_several_steady_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tiles of a sequence settle at different periods, every step is simulated."""
    code = make_code(ForwardPipeline(), find_machine("b200"))
    trips = np.array([[100, 1, 99], [150, 0, 150]])
    exact = TileRunner(code, exact=True).run(trips)
    assert TileRunner(code).run(trips).cycles != exact.cycles
    monkeypatch.setattr(chip, "SAME_PERIOD", -1.0)
    assert TileRunner(code).run(trips).cycles == exact.cycles


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), min_size=1, max_size=5),
    st.integers(1, 9),
)
def test_splits_cover_every_kv_tile_once(blocks, splits) -> None:
    """Parts are contiguous, at most ceil(n / splits) long, and each masks its first tile."""
    trips = np.array([(n, min(n, m + 1), n - min(n, m + 1)) for n, m in blocks])
    parts = split_trips(trips, splits)
    assert (parts[:, 0] == parts[:, 1] + parts[:, 2]).all() and (parts[:, 0] > 0).all()
    assert parts[:, 0].sum() == trips[:, 0].sum()
    assert (parts[:, 1] >= 1).all() or splits == 1
    assert parts[:, 0].max() <= max(-(-n // splits) for n, _ in blocks)
    assert parts[:, 1].sum() >= trips[:, 1].sum()
