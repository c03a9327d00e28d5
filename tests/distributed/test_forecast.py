"""The simulator of plans: against measurements, against sums by hand, and against itself."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from fa4.distributed import simulate
from fa4.distributed.chosen import (
    GroupPlace,
    candidates,
    choose,
    hosts_of,
    known_machine,
    rank_methods,
)
from fa4.distributed.forecast import (
    SCHEMES,
    CallShape,
    follow_chain,
    forecast,
    make_call_spec,
    make_model,
    own_fabric,
    say_chain,
)
from fa4.distributed.kernel_times import MemoryTimes, RatedBlocks, SimulatedBlocks, rounded
from fa4.distributed.methods import make_plan
from fa4.distributed.plan import Await, Post, Sizes
from fa4.distributed.simulate import TimingModel, time_plan, time_spec
from fa4.sim.links import LINKS, TRANSPORTS, make_fabric
from lab.hardware.distributed import compare

SIZES = Sizes(8, 8)
RATE = {"whole": 1e15, "banded": 5e14}


def model(ranks: int, transport: str = "peers", nodes: int = 1, **memory: float) -> TimingModel:
    """A made-up GPU of round figures."""
    given = {"bytes_per_s": 1e12, "launch_s": 0.0, **memory}
    blocks = RatedBlocks(SIZES, RATE, RATE)
    fabric = make_fabric(ranks, "nvlink5", nodes, transport=transport)
    return TimingModel(blocks, MemoryTimes(**given), fabric, 100)


def test_earlier_rings_within_five_percent() -> None:
    """Nine calls of two H200s, of which none was fitted to."""
    rows = list(compare.earlier_rings())
    assert len(rows) == 9
    assert all(abs(row.predicted / row.value - 1) < 0.05 for row in rows), rows


def test_rings_tell_whether_messages_are_hidden() -> None:
    """Measured by NCCL, a ring whose hops copies would hide is predicted too fast every time."""
    errors = [
        [
            ring.by_transport[way].predicted / ring.by_transport["group"].value - 1
            for way in ("group", "peers")
        ]
        for ring in compare.measured_rings()
    ]
    assert len(errors) == 7 and all(wrong < 0 for _, wrong in errors)
    assert min(wrong for _, wrong in errors) < -0.1
    assert sum(abs(right) for right, _ in errors) < sum(abs(wrong) for _, wrong in errors)


def test_rings_measured_after_the_model_are_predicted() -> None:
    """Both transports; the words of the command and of the support page are of these."""
    errors = [
        abs(row.predicted / row.value - 1)
        for ring in compare.measured_rings()
        for row in ring.by_transport.values()
    ]
    assert len(errors) == 14 and 0.025 < fmean(errors) < 0.035
    assert 0.125 < max(errors) < 0.135


def test_published_rings_within_five_points() -> None:
    """ring-flash-attention on 8 H800, forward and with gradients."""
    rows = list(compare.eight_gpus())
    assert len(rows) == 6
    assert all(abs(row.predicted - row.value) < 0.05 for row in rows), rows


def test_a_ring_by_hand() -> None:
    """Two ranks, no mask: two blocks, one hop beside the first, one merge."""
    rows = 1 << 14
    spec = make_call_spec(CallShape(2 * rows, SIZES), "contiguous", 2)
    block = 4 * 128 * 8 * rows**2 / 1e15
    merge = 6 * 8 * 128 * rows / 1e12
    hop = LINKS["nvlink5"].seconds(2 * 2 * 8 * 128 * rows)
    for transport, exposed in (("peers", 0.0), ("group", hop)):
        found = time_spec(spec, model(2, transport))
        seconds = exposed + 2 * block + merge
        assert [x.seconds for x in found] == pytest.approx([seconds] * 2)
        assert [len(x.sends) for x in found] == [1, 1]


def test_messages_longer_than_blocks_are_waited_for() -> None:
    """What is left of a hidden hop is on the chain, and said."""
    spec = make_call_spec(CallShape(1 << 15, SIZES, causal=True), "zigzag", 16)
    used = model(16, "margin", nodes=8)
    found = forecast(spec, used)
    assert found.times[0].spent(simulate.WAIT) > 0
    assert "messages" in say_chain(found, "because") and "because" in say_chain(found, "because")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("backward", [False, True])
def test_the_chain_is_the_time(scheme: str, backward: bool) -> None:
    """Nothing on it overlaps, nothing is left out; waits are messages."""
    shape = CallShape(1 << 14, SIZES, causal=True, window=(700, None) if scheme == "halo" else
                      (None, None))  # fmt: skip
    spec = replace(make_call_spec(shape, scheme, 8, degree=2), backward=backward)
    for transport in TRANSPORTS:
        times = time_spec(spec, model(8, transport))
        parts, _ = follow_chain(times)
        assert sum(part.seconds for part in parts) == pytest.approx(max(x.seconds for x in times))
        for one in times:
            assert one.spans[0].start_s == 0
            edges = zip(one.spans, one.spans[1:], strict=False)
            assert all(a.end_s == pytest.approx(b.start_s) for a, b in edges)


@pytest.mark.parametrize("scheme", [x for x in SCHEMES if x != "pass_q"])
def test_few_ranks_stand_for_many(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of the sampled ranks is as late as the last of all, but for who waits for whom."""
    window = (700, None) if scheme == "halo" else (None, None)
    shape = CallShape(1 << 15, Sizes(32, 8), causal=True, window=window)
    spec = make_call_spec(shape, scheme, 32, degree=8)
    for transport, nodes in (("group", 4), ("margin", 4), ("group", 1)):
        used = replace(model(32, transport, nodes), blocks=RatedBlocks(spec.sizes, RATE))
        monkeypatch.setattr(simulate, "MOST_RANKS", 16)
        sampled = max(x.seconds for x in time_spec(spec, used))
        monkeypatch.setattr(simulate, "MOST_RANKS", 32)
        assert len(simulate.find_sample(spec, used.fabric)) == 32
        assert sampled == pytest.approx(max(x.seconds for x in time_spec(spec, used)), rel=0.03)


def test_it_is_the_plan_that_is_timed() -> None:
    """A message less has no time; a post that nobody meets ends nothing."""
    plan = make_plan(make_call_spec(CallShape(64, SIZES, causal=True), "all_gather", 3))
    steps = [x for x in plan.programs[1].steps if not isinstance(x, (Post, Await))]
    silent = plan.programs[1]._replace(steps=tuple(steps))
    used = model(3)
    assert len(time_plan(plan, used)) == 3
    with pytest.raises(ValueError, match="rank 0 sends 1 messages to 1, which has 0"):
        time_plan(replace(plan, programs=(plan.programs[0], silent, plan.programs[2])), used)


def test_1024_gpus_and_ten_million_tokens() -> None:
    """A two-level plan beats a ring between nodes; memory and bytes of a rank are said."""
    sizes = Sizes(32, 8)
    shape = CallShape(10 << 20, sizes, causal=True)
    fabric = own_fabric(1024, "b200", None, 128, "infiniband50", "group")
    used = replace(make_model(sizes, "b200", fabric), blocks=RatedBlocks(sizes, RATE))
    ring = forecast(make_call_spec(shape, "zigzag", 1024), used)
    both = forecast(make_call_spec(shape, "ring+ulysses", 1024, degree=8), used)
    assert len(ring.times) < 10
    assert both.efficiency > 1.3 * ring.efficiency
    assert ring.sent_bytes == 1023 * 10240 * 2 * 2 * 8 * 128
    assert both.peak_bytes < 1 << 30


def test_links() -> None:
    """Through the measured points; slower links take longer, faster ones less; steady in size."""
    found = LINKS["nvlink4"].seconds(64 << 20)
    assert (64 << 20) / found == pytest.approx(199e9)
    assert (256 << 20) / LINKS["nvlink4"].seconds(256 << 20, "peers") == pytest.approx(374e9)
    sizes = [1 << n for n in range(10, 34)]
    for link in LINKS.values():
        times = [link.seconds(size) for size in sizes]
        assert times == sorted(times) and link.seconds(0) == 0
        assert sizes[-1] / times[-1] < link.bytes_per_s
    big = [LINKS[name].seconds(1 << 30) for name in ("nvlink5", "nvlink4", "nvlink4-h800")]
    assert big == sorted(big)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpus": 16}, "nvlink4 connects at most 8 GPUs of a node; got 16"),
        ({"gpus": 9, "nodes": 2}, "nodes must divide 9 GPUs; got 2"),
        ({"inside": "nvlink9"}, "link must be one of nvlink3, "),
        ({"inside": "infiniband50"}, "link must be one of nvlink3, "),
        ({"transport": "pigeons"}, "transport must be one of group, peers, margin; got 'pigeons'"),
        ({"transport": "peers", "nodes": 2}, "transport peers is of one node; got 2"),
    ],
)
def test_fabrics_that_there_are_not(changes: dict[str, object], words: str) -> None:
    """One line."""
    given = {"gpus": 8, "inside": "nvlink4", **changes}
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        make_fabric(**given)  # type: ignore[arg-type]


def test_shapes_stand_for_others() -> None:
    """Few shapes are simulated; halving long sides changes the time of a pair by little."""
    sizes = Sizes(8, 8)
    blocks = SimulatedBlocks(sizes, "h200")
    spec = make_call_spec(CallShape(100_003, sizes, causal=True), "zigzag", 8)
    used = TimingModel(blocks, MemoryTimes(4e12), make_fabric(8, "nvlink4"), 132)
    assert forecast(spec, used).efficiency > 0.5
    assert len(blocks.known) <= 5
    plan = make_plan(spec)
    shapes = {rounded(block).shape for program in plan.programs for step in program.steps
              for block in getattr(step, "blocks", ())}  # fmt: skip
    assert max(max(shape) for shape in shapes) <= 1 << 16


def test_auto_asks_the_simulator() -> None:
    """The fastest forecast, the rule where nothing is known; never what does not fit."""
    sizes = Sizes(16, 8)
    spec = make_call_spec(CallShape(1 << 15, sizes, causal=True), "zigzag", 4)
    place = GroupPlace("h200", 1, "group")
    ranked = rank_methods(spec, place)
    assert choose(spec, place) == ranked[0].spec
    assert ranked[0].seconds == min(x.seconds for x in ranked)
    assert {x.spec.method for x in ranked} == {"ring", "all_gather", "ulysses", "ring+ulysses"}
    assert choose(spec, GroupPlace("", 1, "group")).method == "ring"
    assert choose(replace(spec, tile=256), GroupPlace("", 1, "group")).method == "all_gather"
    narrow = make_call_spec(CallShape(1 << 15, sizes, window=(512, 0)), "contiguous", 4)
    assert choose(narrow, place).method == "halo"
    assert all(x.method != "all_gather" for x in candidates(spec, hbm_bytes=1e6))
    odd = replace(spec, sizes=Sizes(15, 5))
    assert "ulysses" not in {x.method for x in candidates(odd)}


def test_where_a_group_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the GPU's name and torchrun's variables."""
    assert known_machine("NVIDIA H200") == "h200"
    assert known_machine("NVIDIA B200-SXM") == "b200"
    assert known_machine("Tesla T4") == known_machine("") == ""
    for local, nodes in (("8", 4), ("5", 1), ("64", 1), ("x", 1), ("0", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        assert hosts_of(32) == nodes
