"""Turns at dQ tiles: launch orders that never end are found; the kernel's own order ends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4 import cli
from fa4.config import BackwardConfig, BackwardPipeline, Problem
from fa4.designs.tiles import WorkTiles, backward_order, backward_tiles
from fa4.masks import Band
from fa4.sim.limits import modelled
from fa4.sim.options import build
from fa4.sim.turns import TurnDeadlock, run_in_turn, turn_before
from tests.sim.test_worktiles import Recorder

TILE = 128
MASKS = {"full": (None, None), "causal": (None, 0), "left window": (300, None),
         "right window": (None, 200), "window": (500, 100)}  # fmt: skip
Adds = list[tuple[object, int]]  # of a CTA: dQ tiles in the order of its visits, and its turn there


def ends(launches: Sequence[Adds], resident: int) -> bool:
    """Do all CTAs end? Counters are polled, nobody leaves before it has added; no times."""
    counters: dict[object, int] = {}
    started = min(resident, len(launches))
    places, running = [0] * len(launches), set(range(started))
    progress = True
    while progress:
        progress = False
        for cta in sorted(running):
            adds = launches[cta]
            while (
                places[cta] < len(adds)
                and counters.get(adds[places[cta]][0], 0) == (adds[places[cta]][1])
            ):
                counters[adds[places[cta]][0]] = adds[places[cta]][1] + 1
                places[cta] += 1
                progress = True
            if places[cta] == len(adds):
                running.remove(cta)
                progress = True
                if started < len(launches):
                    running.add(started)
                    started += 1
    return not running


def launches_of(tiles: WorkTiles, *, last_first: bool) -> list[Adds]:
    """Each work tile's additions, turns counted tile by tile."""
    rank = -tiles.block if last_first else tiles.block
    visits: list[list[object]] = []
    adders: dict[object, list[int]] = {}
    for i in range(len(tiles.trips)):
        count = int(tiles.trips[i, 0]) // tiles.group
        mine: list[object] = [
            (int(tiles.batch[i]), int(tiles.head[i]), member, int(tiles.first[i]) + m)
            for member in range(tiles.group)
            for m in range(count)
        ]
        visits.append(mine)
        for dq in mine:
            adders.setdefault(dq, []).append(int(rank[i]))
    return [[(dq, sorted(adders[dq]).index(int(rank[i]))) for dq in mine]
            for i, mine in enumerate(visits)]  # fmt: skip


def problem(rows: int, keys: int, window: tuple[int | None, int | None], heads: int = 2) -> Problem:
    """One sequence."""
    return Problem(seqlen_q=rows, seqlen_k=keys, heads_q=heads, heads_k=1, head_dim=64,
                   window_size=window)  # fmt: skip


@settings(max_examples=150)
@given(
    st.integers(1, 1500),
    st.integers(1, 1500),
    st.sampled_from(list(MASKS.values())),
    st.integers(1, 8),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_deadlocks_are_those_of_polled_counters(
    rows: int,
    keys: int,
    window: tuple[int | None, int | None],
    resident: int,
    shuffle: bool,
    random,  # type: ignore[no-untyped-def]
) -> None:
    """For drawn masks, lengths and launch orders the simulator never ends where counters do not."""
    call = problem(rows, keys, window)
    tiles = backward_tiles(call, BackwardPipeline(head_dim=64))
    order = list(range(len(tiles.trips)))
    if shuffle:
        random.shuffle(order)
    tiles, last_first = tiles.take(np.array(order, np.int64)), random.random() < 0.5
    expected = ends(launches_of(tiles, last_first=last_first), resident)
    if expected:
        run_in_turn(Recorder(), tiles, resident, 0.0, 5.0, last_first=last_first)  # type: ignore[arg-type]
    else:
        with pytest.raises(TurnDeadlock, match="must launches"):
            run_in_turn(Recorder(), tiles, resident, 0.0, 5.0, last_first=last_first)  # type: ignore[arg-type]


@pytest.mark.parametrize("window", MASKS.values(), ids=MASKS)
def test_each_mask_has_its_order(window: tuple[int | None, int | None]) -> None:
    """The order of `default_backward` ends with one CTA resident; the other needs all of a head."""
    pipeline = build({"pass": "bwd", "deterministic": True, "head_dim": 64, "causal": False,
                      "window": window}).pipeline  # fmt: skip
    assert isinstance(pipeline, BackwardPipeline)
    call = problem(1280, 1280, window, heads=1)
    tiles, last_first = (
        backward_tiles(call, pipeline),
        modelled(pipeline).last_first(call, pipeline),
    )
    assert last_first is (window[1] is not None)
    good = tiles.take(backward_order(tiles, pipeline.scheduler))
    bad = tiles.take(backward_order(tiles, {"spt": "naive", "naive": "spt"}[pipeline.scheduler]))
    run_in_turn(Recorder(), good, 1, 0.0, 5.0, last_first=last_first)  # type: ignore[arg-type]
    run_in_turn(Recorder(), bad, len(tiles.trips), 0.0, 5.0, last_first=last_first)  # type: ignore[arg-type]
    with pytest.raises(TurnDeadlock):
        run_in_turn(Recorder(), bad, 1, 0.0, 5.0, last_first=last_first)  # type: ignore[arg-type]


def test_an_order_that_never_ends_is_named() -> None:
    """Who waits for whom, how many are resident, and how launches must go."""
    tiles = backward_tiles(problem(1024, 1024, (None, 0), heads=1), BackwardPipeline(head_dim=64))
    with pytest.raises(ValueError) as raised:
        run_in_turn(Recorder(), tiles, 3, 0.0, 5.0, last_first=True)  # type: ignore[arg-type]
    assert str(raised.value) == (
        "this launch order never ends in a fixed order of sums: all 3 that are resident wait, such "
        "as block 2 of head 0 for block 3, which has not started; turns go from the last keys on, "
        "and so must launches"
    )


def test_predictions_find_it(capsys: pytest.CaptureFixture[str]) -> None:
    """256 blocks of a head, 148 SMs: launched from the first keys on, a causal call hangs."""
    call = ("predict", "--pass", "bwd", "--deterministic", "--causal", "--heads", "1",
            "--seqlen", "32k", "--cta-group", "1")  # fmt: skip
    for scheduler, expected in (("spt", 0), ("naive", 2)):
        with pytest.raises(SystemExit) as stop:
            cli.main([*call, "--scheduler", scheduler, "--json"])
        captured = capsys.readouterr()
        assert stop.value.code == expected
        if expected:
            assert "all 148 that are resident wait" in captured.err
            assert captured.err.count("\n") == 1
        else:
            assert json.loads(captured.out)["tflops"] > 0


@dataclass(frozen=True)
class Shape:
    """A call of the kernel, of which `tiles.locate` finds the work tiles."""

    rows: int
    keys: int
    heads_k: int
    group: int
    cta_group: int
    window: tuple[int | None, int | None]

    @property
    def blocks(self) -> int:
        """CTAs or pairs of a head."""
        return -(-self.keys // (TILE * self.cta_group))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that places the backward kernel's work tiles, on Python's integers."""
    pytest.importorskip("cutlass")
    from fa4.sm100.backward import tiles

    words = SimpleNamespace(min=min, max=max, select_=lambda chosen, a, b: a if chosen else b)
    monkeypatch.setattr(tiles, "cutlass", words)
    monkeypatch.setattr(tiles, "Int32", int)
    monkeypatch.setattr(tiles, "pair_rank", lambda _: 0)
    monkeypatch.setattr(tiles, "sequence", lambda offsets, used, batch, length: (0, length))
    monkeypatch.setattr(tiles, "first_tile", lambda *_, **__: 0)
    return tiles


def kernel_tiles(kernel: ModuleType, shape: Shape, monkeypatch: pytest.MonkeyPatch) -> list:
    """The leaders' work tiles in launch order."""
    left, right = shape.window
    spec = SimpleNamespace(
        deterministic=True, cta_group=shape.cta_group, causal=False, mask=None, packed_q=False,
        tile_rows=TILE, block_rows=TILE, hides_first_rows=right is not None,
        hides_last_rows=left is not None,
    )  # fmt: skip
    call = SimpleNamespace(
        spec=spec, blocks=shape.blocks, heads_k=shape.heads_k, group=shape.group,
        seqlen_q=shape.rows, seqlen_k=shape.keys, q_blocks=-(-shape.rows // TILE),
        window_left=left, window_right=right, cu_seqlens_q=None, cu_seqlens_k=None,
        seqused_q=None, seqused_k=None,
    )  # fmt: skip
    found = []
    for index in range(shape.blocks * shape.heads_k):
        place = SimpleNamespace(block_idx=lambda index=index: (index * shape.cta_group, 0, 0))
        monkeypatch.setattr(kernel, "cute", SimpleNamespace(arch=place))
        found.append(kernel.locate(call))
    return found


@pytest.mark.parametrize("window", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("cta_group", [1, 2])
@pytest.mark.parametrize("sizes", [(1280, 1280), (1000, 700), (300, 1500), (1500, 129)])
def test_the_kernels_launch_order_ends(
    window: tuple[int | None, int | None],
    cta_group: int,
    sizes: tuple[int, int],
    kernel: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its turns at a dQ tile are 0, 1, 2, ... by launch; backwards they need more room.

    The simulator has the same work tiles, in the same order.
    """
    shape = Shape(*sizes, 2, 2, cta_group, window)
    work = kernel_tiles(kernel, shape, monkeypatch)
    launches: list[Adds] = [
        [((tile.head_k, member, m), tile.keys_before(m))
         for member in range(shape.group) for m in range(tile.q_start, tile.q_stop)]
        for tile in work
    ]  # fmt: skip
    assert isinstance(work[0].mask, Band)
    assert ends(launches, 1)
    shared = {turn for adds in launches for _, turn in adds}
    if len(shared) > 1:
        assert not ends(launches[::-1], 1)
    call = Problem(seqlen_q=shape.rows, seqlen_k=shape.keys, heads_q=4, heads_k=2, head_dim=64,
                   window_size=window)  # fmt: skip
    pipeline = BackwardPipeline(head_dim=64, deterministic=True,
                                numerics=BackwardConfig(cta_group=cta_group))  # fmt: skip
    tiles = backward_tiles(call, pipeline)
    last_first = modelled(pipeline).last_first(call, pipeline)
    tiles = tiles.take(backward_order(tiles, "spt" if last_first else "naive"))
    assert list(tiles.head) == [tile.head_k for tile in work]
    assert list(tiles.block) == [tile.block // cta_group for tile in work]
    for tile, first, trips in zip(work, tiles.first, tiles.trips, strict=True):
        if tile.q_stop > tile.q_start:  # the model has one step even of nothing
            assert (tile.q_start, tile.q_stop) == (first, first + trips[0] // 2)
    assert (turn_before(tiles, last_first=last_first) < np.arange(len(work))).all()
