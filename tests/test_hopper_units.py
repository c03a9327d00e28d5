"""What was measured of a Hopper SM: the result file is whole, the page's tables are its figures."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import numpy as np
import pytest

from fa4.config import WarpgroupPipeline
from fa4.designs import plan_of
from fa4.hardware import H100, H200
from fa4.sim import engine
from fa4.sim.cost_table import CostTable, HopperCosts
from fa4.sim.costs import LEAST_LEFT
from fa4.sim.machine import find_machine
from fa4.sim.power import H200_POWER
from fa4.sim.predict import Simulation, make_runner
from lab.hardware.hopper_units import power
from lab.hardware.hopper_units.figures import PORTS, STARTS, STEPS, figures, parse, report
from lab.hardware.hopper_units.measure import PROGRAMS, STATE, summary, text_of
from lab.hardware.hopper_units.products import ACROSS, WIDTHS, header
from lab.pages.hopper_tables import LISTS, LOAD, PAGE, SECTIONS, TABLES, WIDE, of_program
from lab.records import read_record, record_path

# As it is read: without the markers of numbers.
DOCUMENT = re.sub(r"<!--=.*?-->", "", PAGE.read_text(encoding="utf-8"))
KEPT = TABLES.kept()  # what the tests ask for, made once
REPORT = report()


def changed(change: Any) -> dict[str, Any]:
    """The report after `change`."""
    other = copy.deepcopy(dict(REPORT))
    change(other)
    return other


def test_the_report_names_machine_and_state() -> None:
    """Machine, driver, date, commit; clock and power before and after each program."""
    assert {"name", "driver_version", "power.limit", "nvcc"} <= set(REPORT["machine"])
    assert re.fullmatch(r"[0-9a-f]{7,40}", REPORT["commit"])
    assert re.match(r"\d{4}-\d\d-\d\dT", REPORT["date"])
    assert [state["program"] for state in REPORT["states"]] == list(PROGRAMS)
    for state in REPORT["states"]:
        assert set(state["before"]) == set(state["after"]) == set(STATE)
    assert record_path("hopper_units").read_text(encoding="utf-8") == text_of(dict(REPORT))


def test_every_figure_is_whole() -> None:
    """Value in its interval, unit, method; each program gave some; none is zero."""
    found = parse(REPORT)
    assert {figure.program for figure in found.values()} == set(PROGRAMS) == {*LISTS, *WIDE}
    assert all(figure.value > 0 and figure.repeats in (1, 9) for figure in found.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x["figures"][3].update(value=1e6), "is not within"),
        (lambda x: x["figures"][3].update(unit=""), "must be given"),
        (lambda x: x["figures"].append(x["figures"][0]), "twice"),
        (lambda x: x["states"][0].update(failed="1: a CUDA error"), "failed: barriers"),
        (lambda x: x.update(schema_version=2), "schema_version must be 1"),
    ],
)
def test_a_planted_fault_is_seen(change: Any, message: str) -> None:
    """In a figure, among them, in a program, in the file's form."""
    with pytest.raises(ValueError, match=message):
        parse(changed(change))


def test_tables_are_up_to_date() -> None:
    """If not: python -m lab.pages.hopper_tables."""
    assert list(KEPT.stale(DOCUMENT)) == []
    assert KEPT.fill(DOCUMENT) == DOCUMENT


@pytest.mark.parametrize("name", SECTIONS)
def test_a_changed_digit_is_seen_and_mended(name: str) -> None:
    """Planted in each table."""
    table = SECTIONS[name]()
    at = max(match.start() for match in re.finditer(r"\d", table))
    other = table[:at] + ("1" if table[at] != "1" else "2") + table[at + 1 :]
    stale = DOCUMENT.replace(table, other)
    assert list(KEPT.stale(stale)) == [name] and KEPT.fill(stale) == DOCUMENT


def test_every_figure_is_in_a_table() -> None:
    """Lists have a row for each; wide tables a cell for each."""
    for program in LISTS:
        rows = SECTIONS[program]().count("\n") - 1
        assert rows == len(of_program(program))
    for program in WIDE:
        cells = [line.split(" | ")[1:] for line in SECTIONS[program]().splitlines()]
        filled = sum(bool(re.match(r"\d", cell)) for row in cells for cell in row)
        assert filled == len(of_program(program))


def test_products_run_at_the_full_rate() -> None:
    """N/2 cycles for two warpgroups from 64 columns on; below, the reads of A and B set it."""
    for width in WIDTHS:
        name = f"interval/m64n{width}k16, A from shared memory, warpgroups 2"
        reads = (64 * 16 * 2 + width * 16 * 2) / 128
        assert figures()[name].value == pytest.approx(max(width / 2, reads), rel=0.09)


def test_what_the_page_says_is_what_was_measured() -> None:
    """The figures in its first paragraphs."""

    def value(name: str) -> float:
        return figures()[name].value

    behind = [
        value(f"latency/m64n128k16, A from {source}, chain of {chain}") - 64 * chain
        for source, chains in (("shared memory", (1, 8)), ("registers", (1, 8)))
        for chain in chains
    ]
    assert (round(min(behind)), round(max(behind))) == (66, 86) and "66 to 86 cycles" in DOCUMENT
    assert round(value("bar.arrive to bar.sync/2 groups of 128")) == 35 and "35 cycles" in DOCUMENT
    assert round(value("mbarrier/one way, two warpgroups")) == 51 and "51 by mbarriers" in DOCUMENT
    assert round(value("curve L2/132 SMs, 192 KiB in flight, rate")) == 37
    assert round(value("curve HBM/132 SMs, 192 KiB in flight, rate")) == 19
    loads = {load["load"]: load for load in REPORT["loads"]}
    zeros = loads["products of zeros"]
    full = loads["products of random numbers, softmax arithmetic, boxes from L2"]
    assert round(zeros["burst_mhz"], -1) == 1800 and round(full["burst_mhz"], -1) == 1660
    assert round(full["steady_mhz"], -1) == 1470
    mixes = {
        (int(f), int(a)): figure.value
        for name, figure in figures().items()
        for f, a in re.findall(r"^mix/(\d) ffma \+ (\d) fmnmx \+ 1 ex2, 16 warps", name)
    }
    for (f, a), cycles in mixes.items():
        assert cycles == pytest.approx(max(8, f + a + 4.5), abs=0.3)


def test_loads_hold_their_series() -> None:
    """The summaries follow from the series; a load that is cut short has none."""
    for load in REPORT["loads"]:
        assert len(load["ms"]) == len(load["mhz"]) == len(load["tflops"]) > 80
        assert power.summary(load) == {key: load[key] for key in LOAD}
    short = {**REPORT["loads"][0], "ms": [0.1], "mhz": [1980.0], "tflops": [0.0]}
    with pytest.raises(ValueError):
        power.summary(short)


def test_gpu_figures_are_the_measured_ones() -> None:
    """Of the H200; the H100's say that they were not measured."""
    found = figures()
    clock = 1.98e9
    l2 = found["curve L2/132 SMs, 192 KiB in flight, rate"].value * 132 * clock
    assert H200.l2_bytes_per_s == pytest.approx(l2, rel=0.01)
    assert H200.exp_per_clk == found["rate/ex2"].value
    assert H200.smem_bytes_per_clk == found["shared/ld 16 bytes, 16 warps, rate"].value
    assert round(found["stream/read of device memory"].value, 2) == 4.64
    assert "4.64e12" in H200.sources["hbm_bytes_per_s"].text
    for name in ("clock_hz", "l2_bytes_per_s", "hbm_bytes_per_s"):
        assert "not measured" in H100.sources[name].text
    assert not any("hopper_units" in source.text for source in H100.sources.values())


def test_a_cta_starts_as_measured() -> None:
    """Replaced, barriers, registers; a kernel of 512 threads and 30 barriers, one of 384 and 10."""
    found = figures(STARTS)

    def value(threads: int, what: str) -> float:
        return found[f"start/{threads} threads, 96 KiB from L2, 64 KiB stored, {what}"].value

    replaced, barriers, registers = (
        [value(threads, what) for threads in (384, 512)]
        for what in ("replaced", "barriers, later rounds", "registers, later rounds")
    )
    few = figures()["CTA/8 barriers, fence, __syncthreads"].value
    ten = few + 2 * (barriers[0] - few) / 22
    assert CostTable().cta_start_cycles == pytest.approx(
        replaced[1] + barriers[1] + registers[1], abs=1
    )
    hopper = replaced[0] + ten + registers[0]
    assert HopperCosts().cta_start_cycles == pytest.approx(hopper, abs=1)
    assert CostTable.intervals()["cta_start_cycles"] == (
        pytest.approx(replaced[1] + few, abs=1),
        pytest.approx(CostTable().cta_start_cycles + 253),
    )
    assert HopperCosts.intervals()["cta_start_cycles"] == (
        pytest.approx(replaced[0] + few, abs=1),
        pytest.approx(replaced[0] + barriers[0] + registers[0], abs=1),
    )


def test_what_the_page_says_of_starts_and_energy() -> None:
    """Figures in its first paragraphs; the others are claims (`lab/pages/recorded_claims.py`)."""
    assert "begins 417 cycles after" in DOCUMENT and "from device memory 88;" in " ".join(
        DOCUMENT.split()
    )
    assert round(H200_POWER.l2_byte_pj + H200_POWER.hbm_byte_pj) == 88


def test_a_cta_stays_until_its_stores_are_read() -> None:
    """What follows it starts as late after that as after a CTA without stores."""
    found = figures(STARTS)
    for threads in (384, 512):
        names = [f"start/{threads} threads, {load}" for load in
                 ("16 KiB from L2", "96 KiB from L2, 64 KiB stored")]  # fmt: skip
        none, stored = (found[f"{name}, replaced"].value for name in names)
        assert stored == pytest.approx(none, abs=2)
        assert found[f"{names[1]}, stores, later rounds"].value > 64 * 1024 / 32


@pytest.mark.parametrize(
    ("hold", "used", "end"), [("12000 to 24000", 0.36, 0), ("4000 to 8000", 0.64, 1)]
)
def test_loads_from_device_memory_wait_as_measured(hold: str, used: float, end: int) -> None:
    """The last of 96 KiB, beyond what it takes from L2 and HBM's own latency."""
    units, found = figures(), figures(STARTS)
    name = f"start/96 KiB from device memory, 64 KiB stored, holds of {hold}"
    late = found[f"{name}, last box, later rounds"].value
    from_l2 = "start/384 threads, 96 KiB from L2, 64 KiB stored, last box, later rounds"
    alone = [units[f"load {where}/16 KiB, 1 SM, one in flight, latency"].value
             for where in ("HBM", "L2")]  # fmt: skip
    rate = units["load HBM/16 KiB, 132 SMs, 192 KiB in flight, rate"].value
    share = (late - found[from_l2].value - (alone[0] - alone[1])) / (32 * 1024 / rate)
    assert share == pytest.approx(CostTable.intervals()["hbm_queue_share"][end], abs=0.01)
    parts = ("barriers, later rounds", "registers, later rounds", "stores, later rounds")
    cycles = late + sum(found[f"{name}, {part}"].value for part in parts)
    cycles += found[f"{name}, replaced"].value + sum(map(int, hold.split(" to "))) / 2
    assert (96 + 64) * 1024 / cycles / rate == pytest.approx(used, abs=0.01)


def test_all_that_begin_at_once_have_less_of_device_memory() -> None:
    """The share of its rate by a line through what 16 to 128 KiB of an SM take in the first round,
    and its interval by the steps from 32 to 96 and from 16 to 128 KiB."""
    seen: dict[int, list[float]] = {}
    for name, figure in figures(STARTS).items():
        size = re.match(r"start/(\d+) KiB from device memory.*, last box, first round", name)
        if size:
            seen.setdefault(1024 * int(size.group(1)), []).append(figure.value)
    sizes = [size for size, values in seen.items() for _ in values]
    slope, start = np.polyfit(sizes, [x for values in seen.values() for x in values], 1)
    rate = figures()["load HBM/16 KiB, 132 SMs, 192 KiB in flight, rate"].value
    assert 1 / slope / rate == pytest.approx(HopperCosts.first_round_share, abs=0.005)
    assert start == pytest.approx(HopperCosts.hbm_latency_cycles, abs=40)
    ends = [
        (more - less) / (np.mean(seen[more]) - np.mean(seen[less])) / rate
        for less, more in ((32 << 10, 96 << 10), (16 << 10, 128 << 10))
    ]
    assert ends == pytest.approx(HopperCosts.intervals()["first_round_share"], abs=0.01)


def test_copies_have_less_of_device_memory_than_reads() -> None:
    """The share by the two copies that were timed beside the kernels around a backward pass."""
    timed = read_record("backward_hopper")["timed"].values()
    shares = sorted(one["copy_gb_per_s"] * 1e9 / H200.hbm_bytes_per_s for one in timed)
    assert shares == pytest.approx(HopperCosts.intervals()["hbm_copy_efficiency"], abs=0.001)
    assert shares[0] < HopperCosts().hbm_copy_efficiency < shares[-1]
    assert shares[-1] < HopperCosts().hbm_efficiency


def test_sums_into_l2() -> None:
    """All SMs at once have the rate, in pieces of any size; one alone the latency."""
    found = {name: x for name, x in figures().items() if re.match("sum .*in L2", name)}
    ends = [x.interval for name, x in found.items() if name.endswith("132 SMs, rate")]
    least, most = HopperCosts.intervals()["reduce_bytes_per_clk"]
    assert ends and all(least <= low <= high <= most for low, high in ends)
    assert least < HopperCosts().reduce_bytes_per_clk < most
    for size in (4, 16, 32):
        case = f"sum of ones in L2/{size} KiB, 1 SM"
        waited = found[f"{case}, until written"].value - size * 1024 / 25.6
        assert waited == pytest.approx(HopperCosts().reduce_latency_cycles, abs=2)


def test_a_line_of_a_program_becomes_a_figure() -> None:
    """Median, least and most; five digits."""
    line = '{"name": "a/b", "unit": "cycles", "method": "m", "values": [3.0, 1.0000049, 2.0]}'
    found = summary("pipes", line)
    assert (found["value"], found["interval"], found["repeats"]) == (2.0, [1.0, 3.0], 3)
    assert json.loads(text_of({"figures": [found], "date": "x"}))["figures"] == [found]


def test_products_are_made_for_each_width() -> None:
    """As many accumulators as the width needs, with A from registers and from shared memory."""
    text = "\n".join(header())
    for width in WIDTHS:
        kinds = 4 if width in ACROSS else 2
        assert text.count(f"m64n{width}k16.f32.bf16.bf16") == kinds
        assert f"float (&d)[{width // 2}]" in text


def test_products_waited_for_one_by_one() -> None:
    """Beyond N / 2 cycles: constants of the simulator, for widths of 64 to 176."""
    found = figures(STEPS)
    costs = HopperCosts()
    for source, constant in (("shared memory", costs.mma_waited_cycles),
                             ("registers", costs.mma_tmem_waited_cycles)):  # fmt: skip
        beyond = {
            int(width): figure.value - int(width) / 2
            for name, figure in found.items()
            if (match := re.match(rf"one by one/m64n(\d+)k16, A from {source}, warpgroups 1", name))
            for width in match.groups()
        }
        assert set(beyond) >= {64, 96, 128}
        assert all(constant <= value + 0.5 and value < constant + 3.5 for value in beyond.values())


def test_the_simulator_takes_as_long_as_steps_without_loads() -> None:
    """Of 28 variants: 4 % on average; where products and softmax overlap, 6 % at most."""
    machine = find_machine("h200")
    off = {}
    for name, figure in figures(STEPS).items():
        match = re.match(r"step/d (\d+), (\d+) x (\d+), (overlap|serial)(, turns)?", name)
        if match is None:
            continue
        dim, rows, tile_n = (int(text) for text in match.groups()[:3])
        pipeline = WarpgroupPipeline(
            head_dim=dim, consumers=rows // 64, tile_n=tile_n, overlap=match[4] == "overlap",
            ping_pong=match[5] is not None,
        )  # fmt: skip
        code = make_runner(plan_of(pipeline, machine.gpu), machine, Simulation()).code
        ends = [engine.execute(code, np.array([[n, 1, n - 1]])).end for n in (48, 96)]
        off[name] = abs((ends[1] - ends[0]) / 48 / figure.value - 1)
    assert len(off) == 28
    assert np.mean(list(off.values())) < 0.04
    assert all(error < 0.06 for name, error in off.items() if "overlap" in name)


def test_softmax_is_slower_beside_products() -> None:
    """By less than `register_contention` says, which stands for more than that."""
    found = figures(STEPS)
    ratios = [
        figure.value / found[name.split(", products")[0] + ", nothing"].value - 1
        for name, figure in found.items()
        if name.startswith("beside/softmax") and "products" in name
    ]
    assert len(ratios) == 16
    assert min(ratios) > 0.29 and max(ratios) < 0.69 < HopperCosts().register_contention


FULL = "m64n64k16, A from shared memory, warpgroups {}"
PORT_BYTES = 128


def port(access: str, products: str) -> float:
    """Cycles of an access beside products."""
    return figures(PORTS)[f"ports/{access}, beside {products}, time"].value


def test_what_products_leave_of_shared_memory_is_the_simulators() -> None:
    """Its figures follow from those measured: shares of the port, waits, bytes of bulk copies."""
    costs = find_machine("h200").costs
    cycles = 16 * 1024 / PORT_BYTES  # of the port, for eight stores of a warpgroup
    share = cycles / port("16-byte stores, warps 4", FULL.format(2))
    assert share == pytest.approx(costs.port_least_share, rel=0.05)
    less = {"m64n128k16, A from shared memory, warpgroups 2": 0.25,
            "m64n64k16, A from registers, across rows, warpgroups 2": 0.5}  # fmt: skip
    for products, left in less.items():
        assert left - 0.06 < cycles / port("16-byte stores, warps 4", products) < left + 0.03
        found = 16 * 1024 / port("bulk sums of all SMs, warps 1", products)
        assert found == pytest.approx(costs.bulk_read_bytes * left, rel=0.05)
    rate = 16 * 1024 / port("bulk sums of all SMs, warps 1", FULL.format(2))
    assert rate == pytest.approx(costs.bulk_read_bytes * LEAST_LEFT, rel=0.1)
    stored = 4 * 512 / PORT_BYTES  # by the four warps that show a store
    for others in (1, 2):
        load = port("a load's latency, warps 1", FULL.format(others))
        latency = (load - port("a load's latency, warps 1", "nothing")) / others
        busy = port("16-byte stores, warps 4", FULL.format(others)) / cycles
        shown = port("a store shown, warps 4", FULL.format(others))
        fence = (shown - port("a store shown, warps 4", "nothing") - stored * (busy - 1)) / others
        for found, name in ((latency, "latency"), (fence, "fence")):
            least, most = HopperCosts.intervals()[f"full_port_{name}_cycles"]
            assert 0.85 * least < found < 1.15 * most


def test_rows_within_sectors_are_the_simulators() -> None:
    """Of heads of which every other one begins in the middle of a sector, against whole ones."""
    found = figures(PORTS)

    def cycles(columns: int, which: str) -> float:
        return found[f"rows/{columns} columns, of two heads the {which}, all SMs"].value

    shares = []
    for columns in (168, 184, 200, 216, 232, 248):
        first, second = cycles(columns, "first"), cycles(columns, "second")
        assert first < 0.75 * second
        earlier = cycles(columns, "second, 8 columns earlier")
        assert earlier == pytest.approx(first, rel=0.05)
        if columns > 192:  # narrower tiles wait for L2 longer than they take of its rate
            shares.append(2 * cycles(256, "first") / (first + second))
    costs = find_machine("h200").costs
    assert np.mean(shares) == pytest.approx(costs.half_sector_share, abs=0.01)
    assert HopperCosts.intervals()["half_sector_share"] == pytest.approx(
        (min(shares), max(shares)), abs=0.005
    )
