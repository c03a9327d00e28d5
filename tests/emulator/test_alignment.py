"""Arrays of any alignment, for kernels that ask for that of cudaMalloc."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fa4 import emulator
from fa4.emulator.errors import EmulationFailed
from fa4.emulator.execute import Report
from fa4.emulator.execute import run as run_launches
from fa4.emulator.host.addresses import shift_of
from tests.emulator.kernels import aligned, module_text

# Lane k adds 1 to the word k of array 0, eight words at a time, and stores its address in array 1.
WIDE = """
  ld.global.v8.b32 {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}, [%rd1];
  add.u32 %r1, %r1, 1; add.u32 %r8, %r8, 1;
  st.global.v8.b32 [%rd1], {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8};
  st.global.b64 [%rd2], %rd1;
"""


def at(offset: int, values: np.ndarray) -> np.ndarray:
    """A copy of the values in memory of its own that starts `offset` bytes behind 256 n."""
    raw = bytearray(values.nbytes + 512)
    start = -np.frombuffer(raw, np.uint8).ctypes.data % 256 + offset
    array = np.frombuffer(raw, np.uint8, values.nbytes, start).view(values.dtype)
    array[...] = values
    return array


def run(body: str, *arrays: np.ndarray) -> Report:
    named = {f"array{k}": array for k, array in enumerate(arrays)}
    return emulator.run_ptx(module_text(body, len(arrays)), named, block=(1, 1, 1))


@pytest.mark.parametrize("offset", [0, 16, 64, 128, 248])
def test_an_array_starts_where_device_memory_would(offset: int) -> None:
    """The kernel's results are in the array itself."""
    array, seen = at(offset, np.arange(8, dtype=np.int32)), np.zeros(1, np.uint64)
    assert array.ctypes.data % 256 == offset
    run(WIDE, array, seen)
    assert array.tolist() == [1, 1, 2, 3, 4, 5, 6, 8]
    assert int(seen[0]) % 256 == 0


def test_views_stay_where_they_are_in_their_memory() -> None:
    """As in one allocation on a GPU: a view at byte 8 is misaligned for 32 bytes."""
    fused, seen = at(16, np.arange(64, dtype=np.int32)), np.zeros(1, np.uint64)
    run(WIDE, fused[8:16], seen)
    assert int(seen[0]) % 256 == 32 and fused[15] == 16
    with pytest.raises(EmulationFailed, match="misaligned"):
        run(WIDE, fused[2:10], seen)
    left, right = (shift_of(part) for part in (fused[:8], fused[50:]))
    assert left == right != 0


@pytest.mark.parametrize("alignment_bytes", [32, 64, 128, 256])
def test_arrays_that_were_aligned_by_hand_stay_aligned(alignment_bytes: int) -> None:
    """As parts of something larger, which is aligned less than they are."""
    seen = np.zeros(1, np.uint64)
    for _ in range(8):
        array = aligned(np.zeros(8, np.int32), alignment_bytes)
        run(WIDE, array, seen)
        assert int(seen[0]) % alignment_bytes == 0


def test_memory_that_is_apart_stays_apart() -> None:
    raw = np.zeros(1 << 12, np.uint8)
    start = raw.ctypes.data
    places = []
    for offset in range(16, 2048, 16):
        part = np.frombuffer(memoryview(raw)[offset : offset + 16], np.uint8)
        places.append(part.ctypes.data + shift_of(part))
        assert places[-1] % 256 == 0 or part.ctypes.data % 256 == 0
    assert len(set(places)) == len(places) and start not in places


def test_pointers_made_by_the_program_lead_to_the_same_memory() -> None:
    array = at(16, np.arange(4, dtype=np.int32))
    table = np.array([array.ctypes.data], np.uint64)
    body = "ld.global.b64 %rd3, [%rd2]; mov.b32 %r1, 7; st.global.b32 [%rd3+4], %r1;"
    run(body, array, table)
    assert array.tolist() == [0, 7, 2, 3]


def test_tensor_maps_hold_the_address_that_kernels_see() -> None:
    array = at(16, np.arange(64, dtype=np.float32)).reshape(4, 16)
    encoded = emulator.Tma(array, (4, 16)).encode()
    assert int.from_bytes(encoded[:8], "little") == array.ctypes.data + shift_of(array)


def torch_tensor(offset: int, count: int) -> Any:
    """Ones whose memory starts `offset` bytes behind 256 n."""
    import torch

    return torch.frombuffer(at(offset, np.ones(count, np.float32)), dtype=torch.float32)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("options", ["", "--enable-tvm-ffi"])
def test_compiled_functions_that_ask_for_128_bytes(
    kind: str, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside of emulate() and outside, arrays and CuTe tensors; the results are in place."""
    pytest.importorskip("torch")
    cutlass, cute = pytest.importorskip("cutlass"), pytest.importorskip("cutlass.cute")
    runtime = pytest.importorskip("cutlass.cute.runtime")
    host_kernels = pytest.importorskip("tests.emulator.host_kernels")
    addresses: list[int] = []
    execute = run_launches

    def noting(launches: Any, *rest: Any) -> Report:
        addresses.extend(
            int.from_bytes(value[:8], "little") for value in launches[0].parameters[:3]
        )
        return execute(launches, *rest)

    monkeypatch.setattr("fa4.emulator.execute.run", noting)

    def operands() -> list[Any]:
        if kind == "torch":
            return [torch_tensor(64, 300) for _ in range(3)]
        return [at(16, np.ones(300, np.float32)) for _ in range(3)]

    fakes = [
        runtime.make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(),), assumed_align=128)
        for _ in range(3)
    ]
    plain, wrapped, outside = operands(), operands(), operands()
    with emulator.emulate():
        compiled = cute.compile(host_kernels.add, *fakes, options=options)
        compiled(*plain)
        if not options:
            compiled(
                *(runtime.from_dlpack(x, assumed_align=128).mark_layout_dynamic() for x in wrapped)
            )
            assert wrapped[2].tolist() == [2.0] * 300
    emulator.launch(compiled, *outside)
    assert plain[2].tolist() == outside[2].tolist() == [2.0] * 300
    assert len(addresses) in (6, 9) and not any(address % 256 for address in addresses)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_pointers_to_tensors_of_the_session_are_aligned_like_them() -> None:
    """Where the program asked torch for an address and promises 128 bytes."""
    pytest.importorskip("torch")
    cutlass, cute = pytest.importorskip("cutlass"), pytest.importorskip("cutlass.cute")
    runtime = pytest.importorskip("cutlass.cute.runtime")
    host_kernels = pytest.importorskip("tests.emulator.host_kernels")
    tensor, gmem = torch_tensor(64, 300), cute.AddressSpace.gmem
    with emulator.emulate():
        pointers = [
            runtime.make_ptr(cutlass.Float32, address, gmem, assumed_align=align_bytes)
            for address, align_bytes in ((tensor.data_ptr(), 128), (tensor[4:].data_ptr(), 16))
        ]
        compiled = cute.compile(host_kernels.double_behind, pointers[1], cutlass.Int32(296))
        compiled(pointers[1], 296)
    assert tensor.tolist() == [1.0] * 4 + [2.0] * 296
    assert [pointer._pointer % 256 for pointer in pointers] == [0, 16]
