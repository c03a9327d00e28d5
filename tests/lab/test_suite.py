"""Stored launches, run on the emulator in a GPU's place: at other addresses, judged as a GPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from lab.hardware import suite
from lab.hardware.suite import StoredLaunch, moved, read_outcomes, run_folder, store
from tests.lab.emulated_gpu import EmulatedGpu

pytest.importorskip("torch")
ADD = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry add(.param .u64 x, .param .u32 step) {
  .reg .b32 %t, %a, %s; .reg .b64 %p, %q;
  ld.param.u64 %p, [x];
  ld.param.u32 %s, [step];
  mov.u32 %t, %tid.x;
  mul.wide.u32 %q, %t, 4;
  add.s64 %p, %p, %q;
  ld.global.b32 %a, [%p];
  add.u32 %a, %a, %s;
  st.global.b32 [%p], %a;
  ret;
}
"""
BASE = 0x7F00_0000_0000  # where the memory was when the launch was captured


def case_of(name: str = "Add, twice!", **fields: Any) -> StoredLaunch:
    """Two launches of `add` on 64 words that begin 256 bytes behind the memory."""
    parameters = [[(BASE + 256).to_bytes(8, "little").hex(), step.to_bytes(4, "little").hex()]
                  for step in (1, 16)]  # fmt: skip
    known: dict[str, Any] = {
        "kernel": "add", "grid": [1, 1, 1], "block": [64, 1, 1], "smem_bytes": 0, "base": BASE,
        "size": 1024, "parameters": parameters,
        "places": {"sums": {"start": 256, "bytes": 256}, "behind": {"start": 512, "bytes": 512}},
        "repeats": 3,
    }  # fmt: skip
    return StoredLaunch(name=name, **(known | fields))


def test_launches_are_repeated_on_the_same_memory(tmp_path: Path) -> None:
    """Each adds 17 to what was stored; nothing else changes; files keep everything."""
    memory = np.random.default_rng(1).integers(0, 256, 1024, np.uint8)
    image = ADD.encode() + b"\0"
    path = store(tmp_path / "in", case_of(), {"one": image, "other": image}, memory=memory)
    assert path.name == "add__twice_.npz"
    gpu = EmulatedGpu()
    run_folder(gpu, tmp_path / "in", tmp_path / "out" / "results.npz")
    assert gpu.launches == 2 * 3 * 2
    device, outcomes = read_outcomes(tmp_path / "in", tmp_path / "out" / "results.npz")
    (outcome,) = outcomes
    assert device == "the emulator" and outcome.case == case_of()
    for one in ("one", "other"):
        sums = outcome.after(one, "sums").view(np.uint32)
        np.testing.assert_array_equal(sums, memory[256:512].view(np.uint32) + np.uint32(17))
        np.testing.assert_array_equal(outcome.after(one, "behind"), memory[512:])
        assert outcome.different(one) == {"sums": 0, "behind": 0}


class FlippingGpu(EmulatedGpu):
    """Now and then one bit more is turned round."""

    def wait(self, limit_s: float) -> None:
        """After the third launch and the fifth."""
        if self.launches in (4, 6):
            (work,) = list(self._memory)[1:2]
            self._memory[work][600] ^= 1


def test_launches_that_differ_are_counted(tmp_path: Path) -> None:
    """By output; the first launch is what is kept."""
    memory = np.zeros(1024, np.uint8)
    store(tmp_path, case_of(), {"one": ADD.encode()}, memory=memory)
    run_folder(FlippingGpu(), tmp_path, tmp_path / "out" / "results.npz")
    (outcome,) = read_outcomes(tmp_path, tmp_path / "out" / "results.npz")[1]
    assert outcome.different("one") == {"sums": 0, "behind": 2}
    assert not outcome.after("one", "behind").any()


def test_a_case_that_does_not_end_loses_no_other(tmp_path: Path) -> None:
    """What was done before is written, and the error is the driver's."""

    class HangingGpu(EmulatedGpu):
        def wait(self, limit_s: float) -> None:
            if self.launches > 6:
                raise TimeoutError(f"not done after {limit_s} s")

    for name in ("a", "b"):
        store(tmp_path, case_of(name), {"one": ADD.encode()}, memory=np.zeros(1024, np.uint8))
    with pytest.raises(TimeoutError, match=r"not done after 20\.0 s"):
        run_folder(HangingGpu(), tmp_path, tmp_path / "out" / "results.npz")
    with np.load(tmp_path / "out" / "results.npz") as kept:
        assert {name.partition("/")[0] for name in kept.files} == {"device", "a"}


def test_a_timed_case(tmp_path: Path) -> None:
    """Two launches, and a copy; its memory is not stored."""
    store(tmp_path, case_of(timed_bytes=1000, places={}), {"one": ADD.encode()})
    gpu = EmulatedGpu()
    run_folder(gpu, tmp_path, tmp_path / "out" / "results.npz")
    assert gpu.copied == [1024] + [500] * suite.ROUNDS  # half of what is moved is read
    (outcome,) = read_outcomes(tmp_path, tmp_path / "out" / "results.npz")[1]
    assert outcome.got["Add, twice!/one/seconds"].tolist() == [[3.0, 1.0]] * suite.ROUNDS


def test_addresses_move_with_the_memory() -> None:
    """Those inside; not what lies behind, nor a number that is no address."""
    words = np.array([BASE, BASE + 1023, BASE + 1024, 7], np.uint64)
    found = np.frombuffer(moved(words.tobytes(), BASE, 1024, 64), np.uint64)
    assert found.tolist() == [64, 1087, BASE + 1024, 7]
    assert moved(b"\1\2\3\4", 0, 1 << 32, 64) == b"\1\2\3\4"


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What suites would have recorded; ptxas is not asked: the emulator takes the PTX."""
    pytest.importorskip("cutlass")
    from lab.hardware import launches
    from lab.hardware.backward_hopper import skeleton as backward
    from lab.hardware.forward_hopper import skeleton as forward
    from lab.hardware.warpgroup_bits import suite as bits

    written: dict[str, Any] = {}
    for module in (forward, backward, bits):
        monkeypatch.setattr(module, "assemble", lambda ptx, ptxas: ptx.encode() + b"\0")
    monkeypatch.setattr(
        launches, "write_record", lambda path, report, *_, **__: written.update({path.stem: report})
    )
    yield written


def through(one: ModuleType, folder: Path, gpu: EmulatedGpu) -> int:
    """All three steps of a suite."""
    one.SUITE.store(folder, "ptxas")
    run_folder(gpu, folder, folder / "out" / "results.npz")
    return int(one.SUITE.compare(folder, folder / "out" / "results.npz"))


def one_bit(gpu: EmulatedGpu) -> EmulatedGpu:
    """A GPU that turns a bit of each output round as it is read."""
    read = gpu.read

    def wrong(address: int, size_bytes: int) -> Any:
        found = read(address, size_bytes)
        found[size_bytes // 2] ^= 0x40
        return found

    gpu.read = wrong  # type: ignore[method-assign]
    return gpu


@pytest.mark.parametrize("gpu, wrong", [(EmulatedGpu, 0), (lambda: one_bit(EmulatedGpu()), 1)])
def test_the_forward_skeleton_goes_through(
    recorded: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    gpu: Callable[[], EmulatedGpu], wrong: int,
) -> None:  # fmt: skip
    """Packed sequences, whose views begin before the tensors, at another address."""
    from lab.hardware.forward_hopper import skeleton, skeleton_cases

    name = "packed causal"
    case = skeleton_cases.cases()[name]
    for module in (skeleton, skeleton_cases):
        monkeypatch.setattr(module, "cases", lambda: {name: case})
    monkeypatch.setattr(skeleton, "repeats", lambda name: 1)
    assert through(skeleton, tmp_path, gpu()) == wrong
    report = recorded["forward_skeleton_hopper"]
    assert report["wrong"] == [name] * wrong and report["cases"][name]["device"] == "the emulator"
    assert report["cases"][name]["findings"] == []


def test_the_backward_skeleton_goes_through(
    recorded: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Sums of integers, in a window."""
    from lab.hardware.backward_hopper import skeleton, skeleton_cases
    from tests.sm100.test_backward_skeleton import SMALL

    for module in (skeleton, skeleton_cases):
        monkeypatch.setattr(module, "cases", lambda: {"integers": SMALL["integers"]})
    monkeypatch.setattr(skeleton, "repeats", lambda name: 2)
    assert through(skeleton, tmp_path, EmulatedGpu()) == 0
    row = recorded["backward_skeleton_hopper"]["cases"]["integers"]
    assert row["share"] == 0.0 and set(row["same_bytes"].values()) == {1.0}


def test_the_neutral_parts_go_through(
    recorded: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two launches of each kernel; cubins stand for the PTX that they were made of."""
    from lab.hardware.forward_hopper import neutral

    texts: dict[bytes, str] = {}

    def compiled(*given: Any) -> Any:
        kernel = compile_neutral(*given)
        texts[kernel.artifacts.CUBIN] = kernel.artifacts.PTX
        return kernel

    compile_neutral = neutral.compile_neutral
    monkeypatch.setattr(neutral, "compile_neutral", compiled)
    monkeypatch.setattr(neutral, "COUNTS", {"tiles": 2, "rows": 2})
    neutral.SUITE.store(tmp_path, "")
    run_folder(EmulatedGpu(texts), tmp_path, tmp_path / "out" / "results.npz")
    assert neutral.SUITE.compare(tmp_path, tmp_path / "out" / "results.npz") == 0
    rows = recorded["forward_hopper"]["kernels"]
    assert len(rows) == 5 and not any(row["differ"] for row in rows.values())
    assert all(row["launches"] == 2 and row["values"] > 3000 for row in rows.values())


def test_exact_bits_go_through(
    recorded: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a call with packed sequences: both kernels, equal in every bit."""
    from lab.hardware.warpgroup_bits import suite as bits

    name, texts = "tests: packed", {}
    case = bits.cases()[name]

    def captured(one: Any) -> Any:
        launch, *rest, cubin = known(one)
        texts[cubin] = launch.ptx
        return launch, *rest, cubin

    known = bits.captured
    monkeypatch.setattr(bits, "cases", lambda: {name: case})
    monkeypatch.setattr(bits, "REPEATS", 2)
    monkeypatch.setattr(bits, "captured", captured)
    bits.SUITE.store(tmp_path, "")
    run_folder(EmulatedGpu(texts), tmp_path, tmp_path / "out" / "results.npz")
    assert bits.SUITE.compare(tmp_path, tmp_path / "out" / "results.npz") == 0
    shares = recorded["warpgroup_bits"]["equal_share"]
    assert set(shares.values()) == {1.0} and recorded["warpgroup_bits"]["launches"] == 2


def test_calls_around_the_backward_kernel_go_through(
    recorded: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of packed sequences; and a timed one."""
    from lab.hardware.backward_hopper import prepost

    texts: dict[bytes, str] = {}

    def compiled(*given: Any) -> Any:
        kernel = compile_small(*given)
        texts[kernel.artifacts.CUBIN] = kernel.artifacts.PTX
        return kernel

    compile_small, call = prepost.compile_small, prepost.calls()["packed"]
    monkeypatch.setattr(prepost, "compile_small", compiled)
    monkeypatch.setattr(prepost, "calls", lambda: {"packed": call})
    monkeypatch.setattr(prepost, "LARGE", prepost.Sizes((300,), heads=1, gaps=False))
    monkeypatch.setattr(prepost, "REPEATS", 2)
    monkeypatch.setattr(suite, "ROUNDS", 1)
    prepost.SUITE.store(tmp_path, "")
    run_folder(EmulatedGpu(texts), tmp_path, tmp_path / "out" / "results.npz")
    assert prepost.SUITE.compare(tmp_path, tmp_path / "out" / "results.npz") == 0
    report = recorded["backward_hopper"]
    assert set(report["timed"]) == set(prepost.FUNCTIONS)
    assert all(not row["other_bytes"] and row["bytes"] for row in report["launches"].values())
