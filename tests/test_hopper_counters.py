"""Hardware counters beside the code: ncu's pages read, loops and roles found, faults seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lab.hardware.hopper_counters import measure
from lab.hardware.hopper_counters.compare import VALUES_SHARE, check, compare, counters, per_kernel
from lab.hardware.hopper_counters.expected import Work, by_loops
from lab.hardware.hopper_counters.metrics import METRICS
from lab.hardware.hopper_counters.sass import PIPES, Code, kernels, pipe_of
from lab.records import read_record

FOLDER = Path(measure.__file__).parent
RECORDED = ("hopper_counters", "hopper_counters_foreign")
WORK = Work(head_dim=32, head_dim_v=32, seqlen=128, sequences=2, tile_m=64, tile_n=16, causal=False)
TILES, WARPS, STEPS = 4, 4, 8
TRIPS = TILES * WARPS * (STEPS - 1)
PRODUCT = "HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8]"

# A kernel in small: prologue; a producer with a loop; a consumer whose first step is outside its
# loop; a wait behind the end, reached from the consumer.
LINES = [
    (0x00, "S2R R0, SR_TID.X", TILES * 2 * WARPS, {"wait": 3}),
    (0x10, "@P0 BRA 0x70", TILES * 2 * WARPS, {}),
    (0x20, "USETMAXREG.DEALLOC.CTAPOOL 0x18", TILES, {}),
    (0x30, "IADD3 R1, R1, 0x1, RZ", TILES * (STEPS - 1), {"long_sb": 9}),
    (0x40, "UTMALDG.4D [UR8], [UR4]", TILES * (STEPS - 1), {}),
    (0x50, "@P1 BRA 0x30", TILES * (STEPS - 1), {}),
    (0x60, "EXIT", TILES, {}),
    (0x70, "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0", TILES * WARPS, {}),
    *((0x80 + 16 * i, PRODUCT, TILES * WARPS, {}) for i in range(3)),
    *((0xB0 + 16 * i, PRODUCT, TRIPS, {}) for i in range(3)),
    (0xE0, "MUFU.EX2 R8, R8", TRIPS, {"short_sb": 5}),
    (0xF0, "FFMA R9, R8, R2, R3", TRIPS, {"barrier": 4}),
    (0x100, "@!P2 BRA 0x130", TRIPS, {}),
    (0x110, "@P3 BRA 0xb0", TRIPS, {}),
    (0x120, "EXIT", TILES * WARPS, {}),
    (0x130, "SYNCS.PHASECHK.TRANS64.TRYWAIT P2, [R3], R2", 77, {"long_sb": 2}),
    (0x140, "@!P2 BRA 0x130", 77, {}),
    (0x150, "BRA 0x110", 7, {}),
]  # fmt: skip
STALLS = ("barrier", "long_sb", "short_sb", "wait")


def source_page(lines: list[Any]) -> str:
    """As ncu prints it."""
    titles = ["Address", "Source", "# Samples", "Instructions Executed"]
    rows = ['"Kernel Name","small",']
    rows.append(",".join(f'"{x}"' for x in [*titles, *(f"stall_{x}" for x in STALLS)]))
    for address, text, executed, stalls in lines:
        row = [hex(address), text, sum(stalls.values()), executed]
        rows.append(",".join(f'"{x}"' for x in [*row, *(stalls.get(x, 0) for x in STALLS)]))
    return "\n".join(rows) + "\n"


def raw_page(**changes: float) -> str:
    """The small kernel's counters."""
    found = dict.fromkeys(METRICS, 1.0)
    found.update(
        grid=TILES, pipe_tensor_op_gmma=WORK.wgmma, pipe_xu=TRIPS, pipe_fma=TRIPS,
        pipe_alu=TILES * (STEPS - 1), tma_read_bytes=WORK.copied_bytes,
        tma_write_bytes=WORK.stored_bytes,
    )  # fmt: skip
    found.update(changes)
    rows = (METRICS.values(), ["unit"] * len(METRICS), (f"{found[key]:,.0f}" for key in METRICS))
    return "\n".join(",".join(f'"{x}"' for x in row) for row in rows) + "\n"


def small() -> Code:
    """The kernel in small."""
    return Code(next(kernels(source_page(LINES))))


CONFIGURATION = {
    "kernel": "small", "head_dim": 32, "batch": 1, "heads": 2, "seqlen": 128, "tile_m": 64,
    "tile_n": 16, "causal": False,
}  # fmt: skip


def failed(changes: dict[str, float], lines: list[Any] = LINES, **others: Any) -> list[str]:
    """Names of the comparisons that fail."""
    counted = next(counters(raw_page(**changes)))
    found = compare(CONFIGURATION, counted, next(kernels(source_page(lines))), **others)
    assert found["passed"] == all(item["passed"] for item in found["checks"])
    return [item["check"] for item in found["checks"] if not item["passed"]]


def test_roles_and_loops() -> None:
    """A wait behind the end is the consumer's; neither it nor the way back is a loop."""
    code = small()
    assert code.roles() == ["prologue"] * 2 + ["producer"] * 5 + ["consumer"] * 15
    loops = [[code.instructions[i].address for i in loop] for loop in code.loops()]
    assert [(loop[0], loop[-1]) for loop in loops] == [(0x30, 0x50), (0xB0, 0x110)]


def test_loops_times_trips() -> None:
    """What is outside, and what a branch may pass over, counts as it was executed."""
    assert WORK.tile_steps == TILES * STEPS and WORK.warps == WARPS
    found, share = by_loops(small())
    assert found["tensor_op_gmma"] == WORK.wgmma == TILES * STEPS * WARPS * 3
    assert found["xu"] == found["fma"] == TRIPS and found["alu"] == TILES * (STEPS - 1)
    assert share == 5 * TRIPS / (found.total())
    skipped = (0xE8, "@P4 BRA 0x100", TRIPS, {}), (0xF0, "FFMA R9, R8, R2, R3", 5, {})
    code = Code(next(kernels(source_page([*LINES[:15], *skipped, *LINES[16:]]))))
    assert by_loops(code)[0]["fma"] == 5


def test_a_kernel_as_expected() -> None:
    """Also against the emulator and the simulator."""
    emulated = {"wgmma": WORK.wgmma, "exponentials": TRIPS, "copied_bytes": WORK.copied_bytes}
    assert failed({}) == []
    assert failed({"tensor_percent": 70}, emulated=emulated, simulated={"tensor_percent": 74}) == []


@pytest.mark.parametrize(
    ("changes", "others", "names"),
    [
        ({"tma_read_bytes": WORK.copied_bytes + 32}, {}, ["bytes of the tiles"]),
        ({"tma_write_bytes": 0}, {}, ["bytes of O"]),
        ({"pipe_fma": TRIPS * 1.05}, {}, ["fma: executed opcodes", "fma: loops times trips"]),
        ({}, {"emulated": {"exponentials": TRIPS - 1}}, ["emulator: exponentials"]),
        ({"issue_percent": 70}, {"simulated": {"issue_percent": 76}}, ["simulator: issue_percent"]),
    ],
)  # fmt: skip
def test_a_planted_difference_is_seen(
    changes: dict[str, float], others: dict[str, Any], names: list[str]
) -> None:
    """In a counter, the emulator's counts or the simulator's shares."""
    assert failed(changes, **others) == names


def test_a_product_too_few_is_seen() -> None:
    """A step left out of the loop: the counter is not what the tiles need."""
    less = [
        (at, text, count - WARPS if "HGMMA" in text and count == TRIPS else count, stalls)
        for at, text, count, stalls in LINES
    ]
    names = failed({"pipe_tensor_op_gmma": WORK.wgmma - 3 * WARPS}, less)
    assert "products of the tiles" in names


def test_unreadable_pages_are_refused() -> None:
    """No kernel, no columns, no counter, another number of entries."""
    with pytest.raises(ValueError, match="no kernel in the source page"):
        list(kernels("==WARNING== nothing was profiled"))
    with pytest.raises(ValueError, match="lacks columns"):
        list(kernels('"Kernel Name","x",\n"Address","Other"\n'))
    page = raw_page().replace(METRICS["dram_bytes"], "other")
    with pytest.raises(ValueError, match=r"ncu gave no dram__bytes\.sum"):
        list(counters(page))
    with pytest.raises(ValueError, match="10 entries are needed"):
        per_kernel(FOLDER / "foreign.json", 10)


def test_without_ncu_one_line_says_so(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """And exit status 2."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("sys.argv", ["measure", "none.json", "nowhere"])
    assert measure.main() == 2
    assert capsys.readouterr().err == "no hardware counters: ncu is not on the path\n"


def test_ncu_without_the_right_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own error is passed on."""
    program = tmp_path / "ncu"
    program.write_text("#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM'\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(measure.NoCounters, match=r"ERR_NVGPUCTRPERM.*the driver must let"):
        measure.require_counters()


def test_causal_tiles_visit_what_they_see() -> None:
    """Key tiles up to the diagonal, for tiles that divide each other and that do not."""
    seen = [
        Work(head_dim=64, head_dim_v=64, seqlen=512, sequences=3, tile_m=m, tile_n=n, causal=True)
        for m, n in ((128, 128), (192, 128), (64, 80))
    ]
    for work in seen:
        tiles = range(0, work.seqlen, work.tile_m)
        visible = [
            len({key // work.tile_n for key in range(min(start + work.tile_m, work.seqlen))})
            for start in tiles
        ]
        assert work.tile_steps == 3 * sum(visible)


def test_pipes_do_not_share_opcodes() -> None:
    """Each opcode has one pipe."""
    names = [name for group in PIPES.values() for name in group]
    assert len(names) == len(set(names))
    assert pipe_of("MUFU") == "xu" and pipe_of("BAR") is None


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_kernels_passed(name: str) -> None:
    """All comparisons of a result file, recomputed from its numbers."""
    result = read_record(name)
    assert result["machine"]["name"] == "NVIDIA H200" and result["machine"]["commit"]
    assert len(result["kernels"]) >= 6
    for kernel in result["kernels"]:
        assert set(METRICS) <= set(kernel["counters"])
        assert {"producer", "consumer"} <= set(kernel["roles"])
        assert sum(role["samples_percent"] for role in kernel["roles"].values()) == pytest.approx(
            100, abs=0.1
        )
        work = Work.of(kernel["configuration"])
        assert kernel["counters"]["pipe_tensor_op_gmma"] == work.wgmma
        assert kernel["counters"]["tma_read_bytes"] == work.copied_bytes
        for item in kernel["checks"]:
            share = 0.02 if "opcodes" in item["check"] or "trips" in item["check"] else 0.0
            if item["check"] == "emulator: exponentials" and work.causal:
                share = VALUES_SHARE
            assert check(item["check"], item["counted"], item["expected"], share) == item
        assert kernel["passed"] and all(item["passed"] for item in kernel["checks"])
