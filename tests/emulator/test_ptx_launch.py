"""PTX launched from arrays and numbers, and the same written as text."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4.emulator import EmulationFailed, EmulatorError, LaunchError, Options, Tma, explore
from fa4.emulator.host.ptx_arguments import ALIGNMENT_BYTES, TYPES, arrays_of, parse_arguments
from fa4.emulator.host.ptx_launch import make_launch, run_ptx

HEADER = ".version 8.8\n.target sm_100a\n.address_size 64\n"


def kernel(parameters: str, body: str = "", directives: str = "") -> str:
    """A module with one kernel."""
    return f"{HEADER}.visible .entry k({parameters}) {directives} {{\n{body}\nret;\n}}\n"


def parameters_of(declared: str, *values: Any) -> tuple[bytes, ...]:
    """What the kernel would receive."""
    return make_launch(kernel(declared), values)[0].parameters


# Values: (declaration, value, bytes as struct packs them).
PACKED = [
    (".param .u32 a", 5, struct.pack("<I", 5)),
    (".param .s32 a", -5, struct.pack("<i", -5)),
    (".param .b64 a", -1, struct.pack("<q", -1)),
    (".param .u64 a", (1 << 64) - 1, struct.pack("<Q", (1 << 64) - 1)),
    (".param .u8 a", 255, b"\xff"),
    (".param .f32 a", 0.1, struct.pack("<f", 0.1)),
    (".param .f64 a", 0.1, struct.pack("<d", 0.1)),
    (".param .f32 a", 2, struct.pack("<f", 2.0)),
    (".param .b16 a", 0.5, struct.pack("<e", 0.5)),
    (".param .b32 a", np.float32(0.25), struct.pack("<f", 0.25)),
    (".param .b16 a", ml_dtypes.bfloat16(1.5), b"\xc0\x3f"),
    (".param .align 8 .b8 a[5]", b"12345", b"12345"),
    (".param .align 8 .b8 a[24]", (np.uint8(7), np.int64(-1), np.int32(3)),
     struct.pack("<Bxxxxxxxqixxxx", 7, -1, 3)),
    (".param .align 4 .b8 a[8]", (np.int16(1), b"ab", np.int32(2)),
     struct.pack("<h2si", 1, b"ab", 2)),
]  # fmt: skip


@pytest.mark.parametrize(("declared", "value", "expected"), PACKED)
def test_parameters_are_packed(declared: str, value: Any, expected: bytes) -> None:
    """Python numbers take the parameter's size, others their own."""
    assert parameters_of(declared, value) == (expected,)


REFUSED = [
    (".param .u32 a", 1 << 32, "does not fit 4 bytes"),
    (".param .u32 a", -(1 << 31) - 1, "does not fit 4 bytes"),
    (".param .u8 a", 1.5, "its parameter has 1 bytes"),
    (".param .u32 a", np.int64(1), "argument 0 has 8 bytes; parameter a takes 4"),
    (".param .u64 a", np.zeros((4, 4))[:, :2], "not contiguous"),
    (".param .u64 a", np.zeros(3, ">f4"), "only native numbers"),
    (".param .u64 a", "x", "is a str"),
    (".param .align 8 .b8 a[8]", (1, 2), "needs a type"),
    (".param .u32 a, .param .u32 b", 1, "takes 2 parameter(s), 1 given"),
    ("", 1, "takes 0 parameter(s), 1 given: none"),
]


@pytest.mark.parametrize(("declared", "value", "message"), REFUSED)
def test_what_does_not_fit_is_refused(declared: str, value: Any, message: str) -> None:
    """Before anything runs, with the parameter's name."""
    with pytest.raises(LaunchError) as failure:
        parameters_of(declared, value)
    assert message in str(failure.value)


def test_arrays_become_addresses_and_memory() -> None:
    """An array that is given twice is one piece of memory; a read-only one stays so."""
    x, y = np.zeros(8, np.int32), np.zeros(4)
    y.flags.writeable = False
    text = kernel(".param .u64 a, .param .u64 b, .param .align 8 .b8 c[16]")
    launch, memory = make_launch(text, {"x": x, "y": y, "both": (x, np.int32(7))})
    address = struct.pack("<Q", x.ctypes.data + memory[0].shift)
    assert launch.parameters[0] == address and launch.parameters[2] == address + b"\7" + bytes(7)
    assert [(m.name, m.address, m.size_bytes, m.writable) for m in memory] == [
        ("x", x.ctypes.data, 32, True), ("y", y.ctypes.data, 32, False)
    ]  # fmt: skip


def test_shapes_default_to_what_the_kernel_requires() -> None:
    """.reqntid and .reqnctapercluster; one cluster; else 128 threads."""
    launch, _ = make_launch(kernel("", directives=".reqntid 64, 2 .reqnctapercluster 2"), [])
    assert (launch.grid, launch.block, launch.cluster) == ((2, 1, 1), (64, 2, 1), (2, 1, 1))
    launch, _ = make_launch(kernel(""), [], block=(32, 1, 1))
    assert (launch.grid, launch.block, launch.cluster) == ((1, 1, 1), (32, 1, 1), (1, 1, 1))
    assert make_launch(kernel(""), [])[0].block == (128, 1, 1)


TMA_COPY = kernel(
    ".param .align 64 .b8 map[128], .param .u64 y",
    """
  .reg .pred %p;
  .reg .b32 %t, %bar, %tile, %v;
  .reg .b64 %m, %y, %o;
  .shared .align 1024 .b8 tile[1024];
  .shared .align 8 .b64 full;
  mov.u32 %t, %tid.x;
  mov.u32 %bar, full;
  mov.u32 %tile, tile;
  mov.b64 %m, map;
  setp.eq.u32 %p, %t, 0;
  @%p mbarrier.init.shared::cta.b64 [%bar], 1;
  @%p fence.mbarrier_init.release.cluster;
  bar.sync 0;
  @%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], 512;
  @%p cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
      [%tile], [%m, {4, 2}], [%bar];
wait:
  mbarrier.try_wait.parity.shared::cta.b64 %p, [%bar], 0;
  @!%p bra wait;
  mad.lo.u32 %tile, %t, 4, %tile;
  ld.shared.b32 %v, [%tile];
  ld.param.u64 %y, [y];
  mul.wide.u32 %o, %t, 4;
  add.u64 %y, %y, %o;
  st.global.b32 [%y], %v;""",
)


def tile_16x8(x: np.ndarray) -> np.ndarray:
    """Rows 2 to 17 and columns 4 to 11 of x, zeros beyond it: the box that TMA_COPY loads."""
    tile = np.zeros((16, 8), x.dtype)
    part = x[2:18, 4:12]
    tile[: part.shape[0], : part.shape[1]] = part
    return tile


def test_a_tensor_map() -> None:
    """Boxes are given like shapes, outermost dimension first."""
    x = np.arange(20 * 12, dtype=np.float32).reshape(20, 12)
    y = np.full((16, 8), np.nan, np.float32)
    assert run_ptx(TMA_COPY, {"x": Tma(x, box=(16, 8)), "y": y}, seed=1, schedule="random").ok
    np.testing.assert_array_equal(y, tile_16x8(x))
    with pytest.raises(EmulatorError, match="box"):
        run_ptx(TMA_COPY, [Tma(x, box=(16, 8, 1)), y])
    with pytest.raises(LaunchError, match="complex64"):
        Tma(np.zeros(4, np.complex64), (4,)).encode()


def test_a_tensor_map_written_as_text() -> None:
    """The same from a command line."""
    values = parse_arguments(["x:f32[20,12]=random tma box=16,8", "y:f32[16,8]=nan"], seed=3)
    arrays = arrays_of(values)
    assert run_ptx(TMA_COPY, values).ok
    np.testing.assert_array_equal(arrays["y"], tile_16x8(arrays["x"]))


def test_findings_carry_the_names() -> None:
    """An access behind an array names it."""
    text = kernel(".param .u64 a", ".reg .b64 %a; ld.param.u64 %a, [a]; st.global.b32 [%a+64], 1;")
    with pytest.raises(EmulationFailed, match="behind the end of lengths"):
        run_ptx(text, {"lengths": np.zeros(16, np.int32)})


def test_explore_restores_memory_and_keeps_the_last_results() -> None:
    """A counter that every run raises by one is one above the start after all of them."""
    text = kernel(
        ".param .u64 a",
        ".reg .b64 %a; .reg .b32 %v; ld.param.u64 %a, [a];"
        " ld.global.b32 %v, [%a]; add.u32 %v, %v, 1; st.global.b32 [%a], %v;",
    )
    counter = np.array([40], np.int32)
    launch, memory = make_launch(text, [counter], block=(1, 1, 1))
    found = explore([launch], memory, Options(schedule="random", seed=5), seeds=3, record=True)
    assert counter[0] == 41 and found.seeds == [5, 6, 7] and found.differing == {}
    assert found.recorder is not None
    stores = [e for e in found.recorder.events if e.name == "st.global.b32"]
    assert len(stores) == 1  # of the last run only


# Arguments as text.

FLOATS = ("f16", "f32", "f64", "bf16", "e4m3", "e5m2")
SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@settings(max_examples=40)
@given(st.sampled_from(sorted(TYPES)), SHAPES, st.integers(0, 100), st.data())
def test_sources(kind: str, shape: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    """Shape, type and content are those that the text says; random depends on the seed alone."""
    sizes = ",".join(map(str, shape))
    value = data.draw(st.integers(0, 100))
    texts = [f"a:{kind}[{sizes}]={s}" for s in ("zeros", "ones", "arange", "random", str(value))]
    zeros, ones, arange, drawn, number = (
        arrays_of(parse_arguments([text], seed))["a"] for text in texts
    )
    for array in (zeros, ones, arange, drawn, number):
        assert array.shape == shape and array.dtype == np.dtype(TYPES[kind])
        assert array.ctypes.data % ALIGNMENT_BYTES == 0 and array.flags.c_contiguous
    assert (zeros == 0).all() and (ones == 1).all()
    assert (number == np.array(value).astype(number.dtype)).all()
    flat = arange.reshape(-1)
    assert all(flat[i] == np.array(i).astype(arange.dtype) for i in range(flat.size))
    again = parse_arguments([texts[3]], seed)["a"]
    assert drawn.tobytes() == again.tobytes()
    if drawn.nbytes >= 8:
        assert drawn.tobytes() != parse_arguments([texts[3]], seed + 1)["a"].tobytes()


def test_arguments_draw_numbers_of_their_own() -> None:
    """Two random arrays differ, and numbers of a float type are like a normal distribution's."""
    values = parse_arguments(["f32[4000]=random", "f32[4000]=random", "i8[4000]=random"])
    assert list(values) == ["arg0", "arg1", "arg2"]
    assert not np.array_equal(values["arg0"], values["arg1"])
    assert abs(values["arg0"].mean()) < 0.1 and abs(values["arg0"].std() - 1) < 0.1
    assert values["arg2"].min() == -128 and values["arg2"].max() == 127


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """.npy and .npz, converted by value or, for types NumPy does not know, by bits."""
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    brain = x.astype(ml_dtypes.bfloat16)
    np.save("x.npy", x)
    np.save("brain.npy", brain)
    np.savez("both.npz", x=x, counts=np.arange(5))
    Path("raw.bin").write_bytes(b"abc")
    texts = ["f32[3,4]=x.npy", "bf16[]=x.npy", "bf16[]=brain.npy", "u8[5]=both.npz:counts"]
    same, rounded, bits, counts = parse_arguments(texts).values()
    np.testing.assert_array_equal(same, x)
    assert rounded.tobytes() == bits.tobytes() == brain.tobytes()
    assert counts.tolist() == [0, 1, 2, 3, 4]
    assert parse_arguments(["bytes=raw.bin"]) == {"arg0": b"abc"}


def test_scalars_structs_and_references() -> None:
    """A struct of an array and numbers; @ names an array once more."""
    values = parse_arguments(["x:i32[2]=arange", "i64=-0x10", "bf16=1.5", "@x; u8=3", "y:@x"])
    assert values["arg1"] == -16 and values["arg1"].dtype == np.int64
    assert values["arg2"].tobytes() == b"\xc0\x3f"
    (array, number) = values["arg3"]
    assert array is values["x"] is values["y"] and number.dtype == np.uint8
    assert list(arrays_of(values)) == ["x"]


BAD = [
    "", "f32[2]", "f32[2=ones", "f32=one", "i32=1.5", "i8=200", "u8=-1", "f32[,]=ones",
    "f32[]=ones", "f32[2]=x.txt", "x y", "@", "@z", "i32=1 tma box=1", "f32[8]=ones tma swizzle=32",
    "f32[8]=ones tma box=a", "f32[8]=ones tma box=8 mode=3", "q32[4]=zeros",
]  # fmt: skip


@pytest.mark.parametrize("text", BAD)
def test_bad_texts(text: str) -> None:
    """Refused with the text, or the part of it that is wrong."""
    with pytest.raises(LaunchError):
        parse_arguments([text])


def test_bad_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another shape, numbers that do not fit, no such name, no NumPy file, a second x."""
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.array([1.5, 300]))
    np.save("n.npy", np.array([1, 300]))
    np.savez("x.npz", a=np.zeros(2))
    Path("no.npy").write_text("no")
    for text, message in {
        "f32[3]=x.npy": r"has shape \[2\], not \[3\]",
        "i32[2]=x.npy": "holds float64",
        "u8[2]=n.npy": "do not fit uint8",
        "f32[2]=x.npz": "x.npz holds a",
        "f32[2]=x.npz:b": "x.npz holds a",
        "f32[2]=no.npy": "is not a NumPy file",
    }.items():
        with pytest.raises(LaunchError, match=message):
            parse_arguments([text])
    with pytest.raises(LaunchError, match="two arrays are called x"):
        parse_arguments(["x:f32[1]=ones", "x:f32[1]=ones"])
