"""The front door without CuTe-DSL: launch records, device answers, the memory of arguments."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.elf import read_symbols
from fa4.emulator.errors import LaunchError
from fa4.emulator.host import Launch
from fa4.emulator.host.arguments import array_allocation
from fa4.emulator.host.device import DEVICE_ATTRIBUTES, device_attribute, max_active_clusters
from fa4.emulator.host.runtime import HostRuntime
from fa4.emulator.machine.launch_record import overlapping_groups


def test_importing_needs_neither_cutlass_nor_torch():
    code = (
        "import sys; sys.modules.update(cutlass=None, torch=None, cuda=None)\n"
        "import fa4.emulator.host as host; print(host.launch.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "launch"


def record(stream: int = 0, programmatic: bool = False) -> Launch:
    return Launch("k", "", (1, 1, 1), (32, 1, 1), (1, 1, 1), 0, (), programmatic, stream=stream)


@pytest.mark.parametrize(
    ("launches", "sizes"),
    [
        ([], []),
        ([record()], [1]),
        ([record(programmatic=True)], [1]),
        ([record(), record()], [1, 1]),
        ([record(), record(programmatic=True), record(programmatic=True)], [3]),
        ([record(), record(programmatic=True), record()], [2, 1]),
        ([record(), record(stream=5, programmatic=True)], [1, 1]),
        ([record(stream=5), record(stream=5, programmatic=True)], [2]),
    ],
)
def test_only_programmatic_launches_on_one_stream_may_overlap(launches, sizes):
    groups = overlapping_groups(launches)
    assert [len(group) for group in groups] == sizes
    assert [one for group in groups for one in group] == launches


def test_elf_symbols():
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    text = """
    @table = internal constant i32 7
    declare i32 @needed(i32)
    define internal i32 @hidden(i32 %x) noinline { ret i32 %x }
    define i32 @offered(i32 %x) {
      %y = call i32 @needed(i32 %x)
      %z = call i32 @hidden(i32 %y)
      ret i32 %z
    }
    """
    machine = llvm.Target.from_default_triple().create_target_machine(reloc="pic")
    symbols = read_symbols(machine.emit_object(llvm.parse_assembly(text)))
    assert symbols.defined == {"offered"}
    assert symbols.undefined - {"_GLOBAL_OFFSET_TABLE_"} == {"needed"}


def test_runtime_refuses_symbols_it_does_not_have():
    with pytest.raises(LaunchError, match="_cudaGraphLaunch"):
        HostRuntime("").addresses(["printf", "_cudaGetDevice", "_cudaGraphLaunch"])
    assert set(HostRuntime("").addresses(["printf", "_cudaGetDevice"])) == {"_cudaGetDevice"}


def test_device_answers_as_a_b200():
    enum = pytest.importorskip("cuda.bindings.runtime").cudaDeviceAttr
    wanted = {
        "cudaDevAttrMultiProcessorCount": 148,
        "cudaDevAttrMaxSharedMemoryPerBlockOptin": 232_448,
        "cudaDevAttrComputeCapabilityMajor": 10,
        "cudaDevAttrComputeCapabilityMinor": 0,
        "cudaDevAttrWarpSize": 32,
        "cudaDevAttrL2CacheSize": 132_644_864,
        "cudaDevAttrMaxThreadsPerBlock": 1024,
        "cudaDevAttrMaxThreadsPerMultiProcessor": 2048,
        "cudaDevAttrMaxRegistersPerBlock": 65_536,
        "cudaDevAttrMaxBlockDimZ": 64,
        "cudaDevAttrCooperativeLaunch": 1,
        "cudaDevAttrReservedSharedMemoryPerBlock": 1024,
    }
    assert {name: device_attribute(int(getattr(enum, name))) for name in wanted} == wanted
    assert all(number in {int(member) for member in enum} for number in DEVICE_ATTRIBUTES)
    assert [max_active_clusters(size) for size in (1, 2, 4)] == [148, 74, 37]
    with pytest.raises(LaunchError, match="attribute 9999"):
        device_attribute(9999)


# Memory of arguments


def test_the_device_is_that_of_the_architecture() -> None:
    """An H200 inside a session for sm_90a, a B200 in others and outside."""
    from fa4.emulator.host import emulate

    def device() -> tuple[int, ...]:
        return device_attribute(16), device_attribute(75), max_active_clusters(2)

    for arch, expected in (("sm_90a", (132, 9, 66)), ("sm_100a", (148, 10, 74))):
        with emulate(arch=arch):
            assert device() == expected
        assert device() == (148, 10, 74)


@settings(max_examples=40)
@given(st.data())
def test_allocations_span_first_to_last_element(data):
    """Checked against the address of every single element."""
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    kind = data.draw(st.sampled_from(["f4", "u1", "f8"]))
    view = np.zeros(shape, kind)[tuple(slice(0, None, data.draw(st.integers(1, 3))) for _ in shape)]
    view = view.transpose(data.draw(st.permutations(range(view.ndim))))
    addresses = [view[(*at, None)].ctypes.data for at in np.ndindex(view.shape)]
    found = array_allocation("a", view)
    assert found is not None
    assert found.address == min(addresses)
    assert found.address + found.size_bytes == max(addresses) + view.itemsize
    assert found.holds(max(addresses)) and not found.holds(found.address + found.size_bytes)


def test_allocations_of_torch_views_match_numpy():
    torch = pytest.importorskip("torch")
    for tensor in (torch.zeros(5, 8), torch.zeros(5, 8)[:, 2:6], torch.zeros(5, 8)[1::2].t()):
        ours = array_allocation("t", tensor)
        theirs = array_allocation("t", tensor.numpy())
        assert ours is not None and ours == theirs and ours.writable
    assert array_allocation("t", torch.zeros(0, 4)) is None


def test_read_only_arrays_give_read_only_memory():
    array = np.zeros(4)
    array.flags.writeable = False
    found = array_allocation("a", array)
    assert found is not None and not found.writable and found.owner is array


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.zeros(4)[::-1], "negative"),
        (np.array([object()]), "object"),
        (np.zeros(4, ">f4"), "byte order"),
        (np.zeros(4, [("x", "f4")]), "only numbers"),
        ("text", "str"),
    ],
)
def test_unusable_arrays(array, says):
    with pytest.raises(LaunchError, match=says):
        array_allocation("a", array)
