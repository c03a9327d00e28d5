"""What the emulator and the simulator say of the launches whose hardware counters are on record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass")

from fa4.compiled.artifact import CompiledKernel, compile_artifact
from fa4.compiled.forward import compile_warpgroup
from fa4.hardware import H200
from fa4.plan import schema
from fa4.plan.warpgroup import warpgroup_plan
from lab.hardware.hopper_counters import emulate, simulate
from lab.hardware.hopper_counters.compare import VALUES_SHARE
from lab.hardware.hopper_counters.expected import Work
from lab.hardware.warpgroup_forward.measure import make_spec
from lab.records import read_record

CONFIGURATIONS = json.loads((Path(emulate.__file__).parent / "own.json").read_text())
RESULT = read_record("hopper_counters")
# By number: causal; three consumers, whose tiles leave a rest; 80 keys a tile.
SMALL = {4: 384, 6: 448, 9: 256}


def small(number: int) -> tuple[dict[str, Any], CompiledKernel]:
    """A configuration with a short sequence, and its kernel."""
    given = CONFIGURATIONS[number] | {"seqlen": SMALL[number], "batch": 2, "heads": 3}
    return given, compile_artifact(make_spec(dict(given["spec"])), "sm_90a", compile_warpgroup)


@pytest.mark.parametrize("number", SMALL)
def test_the_emulator_counts_what_the_tiles_need(number: int) -> None:
    """Products and bytes; parts of the launch come to as much as all of it. A tile more is seen."""
    given, kernel = small(number)
    work, found = Work.of(given), emulate.counts(given, kernel)
    assert (found["wgmma"], found["copied_bytes"]) == (work.wgmma, work.copied_bytes)
    whole = emulate.as_counters(emulate.emulate(kernel, given["seqlen"], given["seqlen"]))
    assert (work.wgmma, work.copied_bytes) == (6 * whole["wgmma"], 6 * whole["copied_bytes"])
    longer = Work.of(given | {"seqlen": given["seqlen"] + work.tile_m})
    assert found["wgmma"] != longer.wgmma and found["copied_bytes"] != longer.copied_bytes
    per_step = work.tile_n * 64 // 4 // 32  # a warp's values of a step, in instructions
    steps = work.tile_steps * work.warps
    assert per_step * steps <= found["exponentials"] <= (per_step + 2) * steps


@pytest.mark.parametrize(("queries", "fewer"), [(384, 0), (320, 1), (256, 2)])
def test_warpgroups_without_a_row_need_one_tile(queries: int, fewer: int) -> None:
    """Under a mask: those of the second work tile, of up to 192 of its 192 rows, but for one KV
    tile that they do compute."""
    fields = {"head_dim": 64, "head_dim_v": 64, "consumers": 3, "tile_n": 64, "causal": True}
    kernel = compile_artifact(make_spec(fields), "sm_90a", compile_warpgroup)
    found = emulate.as_counters(emulate.emulate(kernel, queries, queries))["wgmma"]
    tiles = sum(range(1, queries // 64 + 1)) + fewer
    assert found == tiles * 4 * (64 // 16 + 64 // 16)


def test_ncu_counted_what_the_emulator_did() -> None:
    """In every kernel on record: products, exponentials, bytes."""
    for kernel in RESULT["kernels"]:
        checks = {item["check"]: item for item in kernel["checks"]}
        for name in ("wgmma", "exponentials", "copied_bytes"):
            item = checks[f"emulator: {name}"]
            by_value = name == "exponentials" and kernel["configuration"]["spec"].get("causal")
            allowed = item["counted"] * VALUES_SHARE if by_value else 0
            assert abs(item["counted"] - item["expected"]) <= allowed and item["expected"] > 0


def test_shares_far_apart_are_seen() -> None:
    """Five points, of the tensor core and of both roles."""
    kernel = RESULT["kernels"][0]
    there = simulate.measured(kernel)
    waits = kernel["roles"]["consumer"]["waits_percent"]
    assert there["consumer_waits_percent"] == waits["barrier"] + waits["long_sb"]
    assert simulate.apart(there, there) == []
    for name, share in there.items():
        assert simulate.apart(there, there | {name: share + 5.1}) == [name]


def test_the_simulator_gives_the_same_shares() -> None:
    """Of each: percent, for every configuration."""
    for number in (0, 9):
        found = simulate.simulated(CONFIGURATIONS[number])
        assert set(found) == set(simulate.measured(RESULT["kernels"][number]))
        assert all(0 < share < 100 for share in found.values())


def test_most_of_the_simulators_shares_are_near() -> None:
    """All of the tensor core's within five points, 13 of the 20 of waiting."""
    far = []
    for kernel in RESULT["kernels"]:
        there, here = simulate.measured(kernel), simulate.simulated(kernel["configuration"])
        far += simulate.apart(there, here)
    assert len(far) <= 7 and "tensor_percent" not in far


def test_a_copy_is_an_instruction_per_box() -> None:
    """Of 128 bytes a row; and what the compiled loop computes for it."""
    plan = warpgroup_plan(make_spec({"head_dim": 192, "head_dim_v": 128}).pipeline, H200)
    loop = [step for step in plan.role("load").program if isinstance(step, schema.Loop)][-1]
    copies = [step.amount for step in loop.body if isinstance(step, schema.Work)]
    found = [(x.boxes, x.address_cycles) for x in copies if isinstance(x, schema.Copy)]
    assert found == [(3, 125.0), (2, 100.0)]


def test_the_simulator_moves_what_was_counted() -> None:
    """Wavefronts of shared memory within 8 %, device memory within 5 % where all of K and V is read
    once, 17 % under a causal mask; L2 sees at most a fifth more than the SMs ask for."""
    for kernel in RESULT["kernels"]:
        given = kernel["configuration"]
        found = simulate.traffic(kernel, simulate.prediction(given))
        ratios = {name: here / there for name, (there, here) in found.items()}
        assert 0.92 < ratios["shared_wavefronts"] < 1.01, given
        margin = 0.17 if given["spec"].get("causal") else 0.05
        assert abs(ratios["dram_bytes"] - 1.0) < margin, given
        assert ratios["l2_bytes"] > 0.83, given
