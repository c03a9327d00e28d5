"""Host code that asks the driver for a tensor map, and asserts that the driver agreed."""

from __future__ import annotations

import ctypes as C
from typing import Any

import llvmlite.binding as llvm
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator.errors import EmulatorError, LaunchError
from fa4.emulator.host.code import HostCode
from fa4.emulator.host.runtime import HostRuntime
from fa4.emulator.host.tensor_maps import ELEMENTS, FILLS, INTERLEAVES, PROMOTIONS, SWIZZLES
from fa4.emulator.tma.descriptor import ELEMENT_BYTES, TensorMap

# What host code does with the two: the map's arguments come in an array of 64-bit words.
TEXT = """
declare i32 @_cuTensorMapEncodeTiled(ptr, i32, i32, ptr, ptr, ptr, ptr, ptr, i32, i32, i32, i32)
declare void @cuda_dialect_assert_success(i32)

define i32 @encode(ptr %map, ptr %words) {
LOADS
  %code = call i32 @_cuTensorMapEncodeTiled(ptr %map, i32 %i0, i32 %i1, ptr %p2, ptr %p3, ptr %p4,
    ptr %p5, ptr %p6, i32 %i7, i32 %i8, i32 %i9, i32 %i10)
  call void @cuda_dialect_assert_success(i32 %code)
  ret i32 %code
}
"""
LOADS = "".join(
    f"  %a{k} = getelementptr i64, ptr %words, i64 {k}\n  %w{k} = load i64, ptr %a{k}\n"
    + f"  %{'p' if kind == 'ptr' else 'i'}{k} = {how} i64 %w{k} to {kind}\n"
    for k in range(11)
    for how, kind in [("inttoptr", "ptr") if 2 <= k <= 6 else ("trunc", "i32")]
)
UNTOUCHED = b"\xaa" * 128


@pytest.fixture(scope="module")
def image() -> bytes:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(reloc="pic")
    module: bytes = machine.emit_object(llvm.parse_assembly(TEXT.replace("LOADS", LOADS)))
    return module


def encode(image: bytes, **fields: Any) -> tuple[int, bytes, BaseException | None]:
    """Code, map and kept error of host code with these arguments."""
    runtime = HostRuntime("")
    code = HostCode(image, runtime)
    rank = len(fields["dims"])
    arrays = [
        (kind * max(len(values), 1))(*values)
        for kind, values in (
            (C.c_uint64, fields["dims"]), (C.c_uint64, fields["strides"]),
            (C.c_uint32, fields["box"]), (C.c_uint32, fields["steps"]),
        )
    ]  # fmt: skip
    words = (C.c_uint64 * 11)(
        fields["element"], fields.get("rank", rank), fields["address"],
        *(C.addressof(array) for array in arrays), *fields["modes"],
    )  # fmt: skip
    raw = C.create_string_buffer(UNTOUCHED, 128)
    try:
        found = code.call("encode", C.addressof(raw), C.addressof(words))
    finally:
        code.close()
    return found, raw.raw, runtime.error


@st.composite
def maps(draw: Any) -> dict[str, Any]:
    """Arguments of a map that the driver accepts."""
    element = draw(st.integers(0, len(ELEMENT_BYTES) - 1))  # those of whole bytes
    size = ELEMENT_BYTES[ELEMENTS[element]]
    swizzle = draw(st.sampled_from([0, 1, 2, 3, 4, 6]))
    span = SWIZZLES[swizzle][0] or 256
    inner = draw(st.integers(1, min(span // 16, 256 * size // 16))) * 16 // size
    rank = draw(st.integers(1, 5))
    rest = st.lists(st.integers(1, 256), min_size=rank - 1, max_size=rank - 1)
    return {
        "element": element,
        "address": draw(st.integers(0, 1 << 40)) * 16,
        "dims": [draw(st.integers(1, 1 << 32)) for _ in range(rank)],
        "strides": [16 * draw(st.integers(0, (1 << 36) - 1)) for _ in range(rank - 1)],
        "box": [inner, *draw(rest)],
        "steps": [draw(st.integers(1, 8)) for _ in range(rank)],
        "modes": [
            0, swizzle, draw(st.integers(0, PROMOTIONS - 1)),
            draw(st.integers(0, 1)) if ELEMENTS[element] in ("f16", "bf16", "f32") else 0,
        ],
    }  # fmt: skip


@settings(max_examples=60)
@given(fields=maps())
def test_the_map_is_the_one_that_was_asked_for(image: bytes, fields: dict[str, Any]) -> None:
    code, raw, error = encode(image, **fields)
    assert (code, error) == (0, None)
    found = TensorMap.decode(raw)
    assert (found.element, found.address) == (ELEMENTS[fields["element"]], fields["address"])
    assert found.dims == tuple(fields["dims"]) and found.strides_bytes == tuple(fields["strides"])
    assert found.box == tuple(fields["box"]) and found.element_strides == tuple(fields["steps"])
    assert (found.swizzle, found.swizzle_atom_bytes) == SWIZZLES[fields["modes"][1]]
    assert found.fill_nan == FILLS[fields["modes"][3]]
    assert found.hints >> 17 == fields["modes"][2]


GOOD = {
    "element": 6, "address": 0x10000, "dims": [64, 64], "strides": [128], "box": [64, 64],
    "steps": [1, 1], "modes": [0, 3, 0, 0],
}  # fmt: skip


@pytest.mark.parametrize("change, says", [
    ({"rank": 0}, "rank 0, allowed are 1 to 5"), ({"rank": 6}, "rank 6"),
    ({"element": 16}, "data type 16, allowed are 0 to 15"), ({"element": 99}, "data type 99"),
    ({"modes": [3, 3, 0, 0]}, "interleave 3"), ({"modes": [0, 7, 0, 0]}, "swizzle 7"),
    ({"modes": [0, 5, 0, 0]}, "swizzle_atom_bytes"), ({"modes": [0, 3, 4, 0]}, "L2 promotion 4"),
    ({"modes": [0, 3, 0, 2]}, "out-of-bounds fill 2"), ({"address": 8}, "address"),
    ({"strides": [8]}, "strides_bytes"), ({"box": [64, 512]}, "box"),
    ({"steps": [1, 9]}, "element"), ({"dims": [0, 64]}, "dims"),
])  # fmt: skip
def test_what_the_driver_refuses_fails_in_one_line(image: bytes, change: Any, says: str) -> None:
    """The host code's assertion does not end the process, nor hide the first error."""
    code, raw, error = encode(image, **{**GOOD, **change})
    assert code != 0 and raw == UNTOUCHED
    assert isinstance(error, EmulatorError) and says in str(error) and "\n" not in str(error)


def test_an_assertion_of_the_host_code() -> None:
    runtime = HostRuntime("")
    address = runtime.addresses(["cuda_dialect_assert_success"])["cuda_dialect_assert_success"]
    check = C.CFUNCTYPE(None, C.c_int32)(address)
    check(0)
    assert runtime.error is None
    check(2)
    assert isinstance(runtime.error, LaunchError) and "CUDA error 2" in str(runtime.error)


def test_the_codes_are_the_driver_s() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    names = {
        "u8": "UINT8", "u16": "UINT16", "u32": "UINT32", "s32": "INT32", "u64": "UINT64",
        "s64": "INT64", "f16": "FLOAT16", "f32": "FLOAT32", "f64": "FLOAT64", "bf16": "BFLOAT16",
        "f32_ftz": "FLOAT32_FTZ", "tf32": "TFLOAT32", "tf32_ftz": "TFLOAT32_FTZ",
        "b4x16": "16U4_ALIGN8B", "b4x16_p64": "16U4_ALIGN16B", "b6x16_p32": "16U6_ALIGN16B",
    }  # fmt: skip
    prefix = "CU_TENSOR_MAP_DATA_TYPE_"
    types = driver.CUtensorMapDataType
    codes = [int(getattr(types, prefix + names[name])) for name in ELEMENTS]
    assert codes == list(range(len(ELEMENTS)))
    swizzles = {code.name.removeprefix("CU_TENSOR_MAP_SWIZZLE_"): int(code)
                for code in driver.CUtensorMapSwizzle}  # fmt: skip
    ours = ["NONE", "32B", "64B", "128B", "128B_ATOM_32B", "128B_ATOM_32B_FLIP_8B", "128B_ATOM_64B"]
    assert [swizzles[name] for name in ours] == list(range(len(SWIZZLES)))
    for kind, values in (
        (driver.CUtensorMapInterleave, INTERLEAVES),
        (driver.CUtensorMapL2promotion, range(PROMOTIONS)),
        (driver.CUtensorMapFloatOOBfill, FILLS),
    ):
        assert sorted(map(int, kind)) == list(range(len(values)))
