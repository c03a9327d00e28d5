"""The suite that compares the Hopper forward kernel's bits: what it would see, and what it runs."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass")

from fa4.emulator import run_ptx
from lab.hardware.launches import emulate, stored
from lab.hardware.suite import Outcome
from lab.hardware.warpgroup_bits import compare, suite
from lab.hardware.warpgroup_bits.cases import cases
from lab.hardware.warpgroup_bits.exact_ptx import without_approximations
from lab.records import read_record
from tests.sm100.forward_kernel import features

FUNCTIONS = {
    "ex2.approx.ftz": (np.exp2, np.linspace(-20, 0, 128), 2e-3),
    "lg2.approx.ftz": (np.log2, np.linspace(0.1, 500, 128), 2e-2),
    "rcp.approx.ftz": (np.reciprocal, np.linspace(0.5, 500, 128), 1e-7),
    "tanh.approx": (np.tanh, np.linspace(-4, 4, 128), 3e-2),
}
TEXT = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 x) {{
  .reg .b32 %t, %a; .reg .b64 %p, %q; .reg .pred %pred;
  ld.param.u64 %p, [x];
  mov.u32 %t, %tid.x;
  mul.wide.u32 %q, %t, 4;
  add.s64 %p, %p, %q;
  ld.global.b32 %a, [%p];
  setp.lt.u32 %pred, %t, 64;
  @%pred {name}.f32 %a, %a;
  @!%pred {name}.f32 %a, %a;
  st.global.b32 [%p], %a;
  ret;
}}
"""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_exact_sequences_are_near_the_functions(name: str) -> None:
    """So that a kernel with them is still a softmax; under a predicate too."""
    function, values, error = FUNCTIONS[name]
    x = values.astype(np.float32)
    text = without_approximations(TEXT.format(name=name))
    assert "approx" not in text
    got = x.copy()
    run_ptx(text, {"x": got}, block=(128, 1, 1))
    np.testing.assert_allclose(got, function(x), rtol=error, atol=error / 4)


def test_what_may_be_fused_is_rounded_twice() -> None:
    """A product and a sum without rounding modes are one instruction in ptxas, two in PTX."""
    text = "mul.f32 %a, %b, %c; sub.ftz.f32 %d, %a, %e; add.f32 %d, %d, %e; mul.rn.f32 %a, %b, %c;"
    found = without_approximations(text)
    assert found.split("; ")[0] == "mul.rn.f32 %a, %b, %c"
    assert [word for word in found.split() if "." in word] == [
        "mul.rn.f32", "sub.rn.ftz.f32", "add.rn.f32", "mul.rn.f32"
    ]  # fmt: skip


def test_other_approximations_are_refused() -> None:
    """One for which there is no sequence."""
    with pytest.raises(ValueError, match=r"no exact sequence for: sqrt\.approx\.f32"):
        without_approximations("sqrt.approx.f32 %a, %b;")


def test_the_suite_has_every_feature() -> None:
    """And every choice of the pipeline."""
    specs = [case.spec for case in cases().values()]
    met = set().union(*map(features, specs))
    wanted = "causal window_left window_right packed_q packed_k used_k sink softcap score_mod"
    assert {*wanted.split(), "mask_mod", "group", "fp16", "no lse", "d != dv"} <= met
    assert {spec.consumers for spec in specs} == {1, 2, 3}
    assert {spec.scheduler for spec in specs} == {"static", "snake", "naive", "lpt"}
    assert {spec.p_source for spec in specs} == {"registers", "smem"}
    assert {64, 96, 128, 192, 256} <= {spec.head_dim for spec in specs}


def test_what_a_hopper_gpu_gave() -> None:
    """Every bit with exact sequences; the same bits in every launch; nothing wrong."""
    recorded = read_record("warpgroup_bits")
    assert re.search("H[12]00", recorded["device"])
    assert recorded["launches"] == 20 and not recorded["wrong"]
    assert set(recorded["calls"]) == set(cases())
    for kernels in recorded["calls"].values():
        assert not any(kernel["different_launches"] for kernel in kernels.values())
        assert not any(kernels["exact"][name]["other_bits"] for name in ("o", "lse")
                       if name in kernels["exact"])  # fmt: skip
    assert recorded["equal_share"]["exact o"] == recorded["equal_share"]["exact lse"] == 1.0
    assert recorded["equal_share"]["compiled o"] > 0.998


def other_last_bit(ptx: str) -> str:
    """MUFU's results with their last bit turned round."""
    return re.sub(
        r"((@!?%\w+ )?(?:ex2|lg2|rcp)\.approx\.ftz\.f32\s+(\S+), \S+;)",
        lambda found: f"{found[1]} {found[2] or ''}xor.b32 {found[3]}, {found[3]}, 1;",
        ptx,
    )


def emulated(name: str) -> Outcome:
    """A call of the suite, and the emulator's outputs as if a GPU with another MUFU gave them."""
    launch, memory, arena, _ = suite.captured(cases()[name])
    exact = replace(launch, ptx=without_approximations(launch.ptx))
    places = arena.outputs("o", "lse")
    case = stored("case", [launch], arena.memory, places=places)
    given, got = {"memory": arena.memory}, {}
    for kind, form in (("compiled", launch), ("exact", exact)):
        there = replace(form, ptx=other_last_bit(form.ptx))
        here, changed = (
            emulate([x], arena.memory, places, memory, checks=False)[0] for x in (form, there)
        )
        given |= {f"emulated/{kind}/{output}": array for output, array in here.items()}
        got |= {f"case/{kind}/{output}": array ^ case.part(arena.memory, output)
                for output, array in changed.items()}  # fmt: skip
        got[f"case/{kind}/different"] = np.zeros(len(places), np.int64)
    return Outcome(case, given, got)


def test_a_bit_is_seen() -> None:
    """In the exact kernel any; in the compiled one what MUFU does not explain."""
    outcome = emulated("d64 one consumer")
    rows = compare.judged(outcome)
    assert not compare.is_wrong(rows)
    assert rows["exact"]["o"]["elements"] > 10_000 and rows["exact"]["o"]["other_bits"] == 0
    assert rows["compiled"]["lse"]["other_bits"] > 0

    def changed(**arrays: Any) -> dict[str, Any]:
        got = {f"case/{name.replace('_', '/')}": array for name, array in arrays.items()}
        return compare.judged(replace(outcome, got=dict(outcome.got) | got))

    near = changed(exact_o=outcome.got["case/compiled/o"])
    assert near["exact"]["o"]["other_bits"] > 0 and near["exact"]["o"]["largest_difference"] < 0.05
    for kind, output, step in (("exact", "o", 1), ("exact", "lse", 1), ("compiled", "o", 64)):
        array = outcome.got[f"case/{kind}/{output}"].copy()
        array[0] ^= step
        assert compare.is_wrong(changed(**{f"{kind}_{output}": array}))
    assert compare.is_wrong(changed(compiled_different=np.array([1, 0])))


@pytest.mark.parametrize("name", ["d64 three consumers", "tests: packed"])
def test_bits_do_not_depend_on_the_schedule(name: str) -> None:
    """As they must not on a GPU from launch to launch; all checks on, nothing found."""
    launch, memory, arena, _ = suite.captured(cases()[name])
    places = arena.outputs("o", "lse")
    usual, _ = emulate([launch], arena.memory, places, memory)
    other, _ = emulate([launch], arena.memory, places, memory, schedule="adversarial", seed=7)
    assert {name: array.tobytes() for name, array in usual.items()} == {
        name: array.tobytes() for name, array in other.items()
    }
