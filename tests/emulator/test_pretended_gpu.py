"""`emulate(cuda=True)`: torch says that it has a GPU, and programs for one run."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from fa4 import cli, emulator
from fa4.emulator.errors import ArgumentError, LaunchError
from fa4.emulator.host.arguments import TensorBook
from fa4.emulator.host.triton_arguments import pack
from fa4.emulator.host.triton_driver import without_inner_lines
from fa4.emulator.tma.descriptor import TensorMap


def test_tensors_are_on_the_gpu() -> None:
    """Made there, moved there and back, asked where they are."""
    with emulator.emulate(cuda=True):
        x = torch.arange(4.0, device="cuda")
        y = torch.zeros(4).to("cuda:0")
        assert x.is_cuda and not y.is_cpu and y.device == torch.device("cuda", 0)
        assert torch.empty_like(x).device == x.device == torch.ones(2, device=x.device).device
        assert x.new_zeros(3, device="cuda").shape == (3,) and x.get_device() == 0
        with torch.device("cuda"):
            assert torch.ones(2).is_cuda
        assert (x + y).sum().item() == 6
    assert not x.is_cuda and x.device.type == "cpu"


@pytest.mark.parametrize(
    "make",
    [lambda: torch.zeros(4, device=0), lambda: torch.zeros(4).to(0),
     lambda: torch.zeros(4).to(0, torch.float32), lambda: torch.zeros(4).to(device=0),
     lambda: torch.zeros_like(torch.ones(4), device=torch.ones(1).device.index),
     lambda: torch.tensor([0.0] * 4, device=torch.device(0)),
     lambda: torch.zeros(4, device=torch.device("cuda", 0)),
     lambda: torch.zeros(4, device=torch.accelerator.current_accelerator())],
)  # fmt: skip
def test_a_device_by_its_number(make: Any) -> None:
    """0 is the GPU, wherever a device may be said; a tensor that is there already stays."""
    with emulator.emulate(cuda=True):
        x = make()
        assert x.device == torch.device(0) == torch.device("cuda:0")
        moved = x.to(0)
        moved += 1
        assert x.tolist() == [1] * 4
        assert x.to(torch.int32).dtype == torch.int32 and x.sum(0).item() == 4


@pytest.mark.parametrize(
    "name", [1, "cuda:1", "cuda:10", torch.device("cuda", 2)], ids=["number", "1", "10", "device"]
)
def test_there_is_one_gpu(name: Any) -> None:
    """Another is refused, wherever it is named."""
    refused = pytest.raises(LaunchError, match=r"device cuda:\d+: the pretended GPU is cuda:0")
    with emulator.emulate(cuda=True):
        x = torch.ones(2)
        for use in (lambda: torch.zeros(3, device=name), lambda: x.to(name), lambda: x.cuda(name)):
            with refused:
                use()


def test_the_accelerator_is_the_gpu() -> None:
    """Where programs do not ask for CUDA by name."""
    before = torch.accelerator.is_available()
    with emulator.emulate(cuda=True):
        assert torch.accelerator.is_available() and torch.accelerator.device_count() == 1
        assert torch.accelerator.current_accelerator().type == "cuda"
        assert torch.accelerator.current_device_index() == 0
        torch.accelerator.synchronize()
        torch.accelerator.current_stream().synchronize()
    assert torch.accelerator.is_available() == before


def test_tensors_outlive_streams_and_become_cute_tensors() -> None:
    """What host code of kernels does with a tensor on a GPU beside launching."""
    from cutlass.cute.runtime import from_dlpack

    with emulator.emulate(cuda=True):
        x = torch.arange(8.0, device="cuda")
        x.record_stream(torch.cuda.current_stream())
        x.record_stream(torch.cuda.Stream())
        with torch.cuda.nvtx.range("a name for profilers"):
            seen = from_dlpack(x.detach(), assumed_align=16)
        assert tuple(seen.shape) == (8,)


@pytest.mark.parametrize(
    "move", [lambda x: x.cuda(), lambda x: x.cpu(), lambda x: x.to("cuda"), lambda x: x.to("cpu")]
)
def test_moving_copies(move: Any) -> None:
    """What a kernel writes there is not seen here."""
    with emulator.emulate(cuda=True):
        x = torch.zeros(4)
        moved = move(x)
        moved += 1
    assert not x.any() and moved.all()


@pytest.mark.parametrize(
    "make",
    [lambda: torch.zeros(4, device="cuda"), lambda: torch.zeros(4).cuda(),
     lambda: torch.zeros(4).to("cuda"), lambda: torch.zeros(8, device="cuda")[:4] + 0,
     lambda: torch.zeros(2, 2, device=torch.device("cuda", 0)).view(4)],
)  # fmt: skip
def test_what_is_there_is_not_copied_again(make: Any) -> None:
    """A tensor of the GPU that is moved to it stays the same one, unless a copy is asked for."""
    with emulator.emulate(cuda=True):
        x = make()
        for moved in (x.cuda(), x.to("cuda"), x.to(x.device), x.to(device="cuda:0")):
            moved += 1
        assert x.tolist() == [4] * 4
        apart = (x.to("cuda", copy=True), x.cpu(), x.to("cpu"), x.cpu().cuda())
        for moved in apart:
            moved += 1
        assert x.tolist() == [4] * 4


def test_torch_answers_as_the_machine_would() -> None:
    """The properties that programs choose kernels by; nothing stays behind, whatever happens."""
    for arch, capability, processors in (("sm_100a", (10, 0), 148), ("sm_90a", (9, 0), 132)):
        with emulator.emulate(arch=arch, cuda=True):
            assert torch.cuda.is_available() and torch.cuda.device_count() == 1
            assert torch.cuda.get_device_capability() == capability
            properties = torch.cuda.get_device_properties(0)
            assert properties.multi_processor_count == processors
            torch.cuda.manual_seed_all(1)
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            with pytest.raises(emulator.LaunchError, match="times are unknown"):
                event.elapsed_time(event)
    with pytest.raises(ZeroDivisionError), emulator.emulate(cuda=True):
        _ = 1 / 0
    assert not torch.cuda.is_available() and not torch.zeros(1).is_cuda


def test_a_front_end_that_is_imported_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is redirected when it is imported, and only then; the import system is left as it was."""
    from fa4.emulator.host import front_ends

    (tmp_path / "late_front_end.py").write_text("loaded = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders, seen = list(sys.meta_path), []

    def act() -> None:
        seen.append(sys.modules["late_front_end"].loaded)

    with front_ends._on_import({"late_front_end": act}):
        assert not seen
        import late_front_end  # type: ignore[import-not-found]

        assert seen == [True] and type(late_front_end.__spec__.loader).__name__ != "_Loader"
        assert late_front_end.__file__ == str(tmp_path / "late_front_end.py")
    assert sys.meta_path == finders


def descriptor(**fields: Any) -> Any:
    """As Triton's host descriptor: a tensor of 6 x 32 numbers, of which a part."""
    base = torch.zeros((6, 32), dtype=torch.float16)
    return types.SimpleNamespace(
        **{"base": base, "shape": [5, 32], "strides": [32, 1], "padding": "zero"} | fields
    )


MAP = {"swizzle": 2, "elem_size": 2, "elem_type": 6, "block_size": [4, 16], "fp4_padded": False}
ADDRESS = 1 << 20


def test_parameters_of_a_triton_launch() -> None:
    """Bytes by the signature's types; what a kernel does not take is left out."""
    signature = [
        ("x", "*fp32"), ("none", "*fp32"), ("n", "i32"), ("size", "constexpr"), ("flag", "i1"),
        ("pair", ("u8", ("fp32",))), ("h", "fp16"), ("b", "bf16"),
        ("tile", "tensordesc<fp16[4,16]>"),
    ]  # fmt: skip
    x = torch.zeros(3)
    values = [x, None, -2, 128, True, (255, (1.5,)), 1.5, 1.5, descriptor()]
    packed = pack(signature, values, [MAP], lambda array: ADDRESS)
    *numbers, tensor_map = packed.parameters[:8]
    assert [int.from_bytes(raw, "little") for raw in numbers] == [
        ADDRESS, 0, 2**32 - 2, 1, 255, 0x3FC00000, 0x3E00,
    ]  # fmt: skip
    assert tensor_map == bytes.fromhex("c03f")
    raw, *sizes = packed.parameters[8:]
    assert [len(part) for part in sizes] == [4, 4, 8, 8]
    assert [int.from_bytes(part, "little") for part in sizes] == [5, 32, 32, 1]
    found = TensorMap.decode(raw)
    assert (found.dims, found.box, found.strides_bytes) == ((32, 5), (16, 4), (64,))
    assert (found.element, found.swizzle, found.address) == ("f16", 64, ADDRESS)
    assert set(packed.memory) == {"x", "tile"}


def test_lines_of_inline_assembly() -> None:
    """Those that LLVM counts inside it go; every other line stays where it is."""
    kept = ".loc 1 19 25"
    before = f"{kept}\n\t// begin inline asm\n\t.loc 1 20 25\nmov;\n\t// end inline asm\n\t{kept}"
    assert without_inner_lines(before) == before.replace("\t.loc 1 20 25", "")


def test_descriptors_without_a_map() -> None:
    """Where the compiler keeps none: base, sizes, strides, flags, and the sizes once more."""
    packed = pack(
        [("t", "tensordesc<fp16[4,16]>")], [descriptor(padding="nan")], [], lambda a: ADDRESS
    )
    lengths = [len(part) for part in packed.parameters]
    assert lengths == [8, 8, 8, 8, 8, 1, 4, 4, 8, 8]
    assert packed.parameters[5] == b"\1"


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("*fp32", "text", "x is a str, not a tensor"),
        ("fp128", 1.0, "x has the type fp128"),
    ],
)
def test_arguments_that_cannot_be_passed(kind: str, value: Any, message: str) -> None:
    """One line that names the argument."""
    with pytest.raises(ArgumentError, match=message):
        pack([("x", kind)], [value], [], lambda array: ADDRESS)
    with pytest.raises(ArgumentError, match="y: an argument is a tensor on meta"):
        pack([("y", "*fp32")], [torch.empty(3, device="meta")], [], TensorBook().address_of)
    with pytest.raises(ArgumentError, match="im2col"):
        pack([("x", "tensordesc<fp16[4,16]>")], [descriptor()], [MAP | {"is_im2col": True}],
             lambda array: ADDRESS)  # fmt: skip


def test_a_script_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Arguments, folder and name as python gives them; options of PTX are refused."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside.py").write_text("NUMBER = 5\n")
    Path("program.py").write_text(
        "import sys, torch, beside\n"
        "assert __name__ == '__main__' and sys.argv == ['program.py', 'a', '-b'], sys.argv\n"
        "print(torch.full((2,), beside.NUMBER, device='cuda').sum().item())\n"
    )
    before = list(sys.path), list(sys.argv)
    with pytest.raises(SystemExit) as stop:
        cli.main(["emulate", "program.py", "a", "--", "-b"])
    assert not stop.value.code
    assert capsys.readouterr().out.split("\n")[:2] == [
        "10", "0 launches on an emulated sm_100a, 0 thread-instructions",
    ]  # fmt: skip
    assert before == (sys.path, sys.argv)
    for arguments, message in (
        (["nowhere.py"], "nowhere.py: no such file"),
        (["program.py", "--grid", "2", "--list"], "--grid, --list cannot be used with a script"),
        (["program.py", "--arch", "sm_80"], "--arch sm_80: allowed are sm_100a, sm_103a, sm_90a"),
        (["kernel.ptx", "7"], "7: only a script takes arguments"),
        (["program.py", "--fail-on", "x"], "--fail-on x: allowed are style, formal, hazard, error"),
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(["emulate", *arguments])
        assert stop.value.code == 2 and message in capsys.readouterr().err


def test_what_is_registered_for_cuda_counts() -> None:
    """Kernels of an operator for CUDA take tensors of the pretended GPU: as long as their library
    lives, at most to the end."""
    seven = lambda x: torch.full_like(x, 7)  # noqa: E731
    with emulator.emulate(cuda=True):
        x = torch.ones(2, device="cuda")
        library = torch.library.Library("aten", "IMPL")
        library.impl("neg", seven, "CUDA")
        assert torch.neg(x).tolist() == [7, 7]
        del library
        assert torch.neg(x).tolist() == [-1, -1]
        library = torch.library.Library("aten", "IMPL", "CUDA")
        library.impl("neg", seven)
        own = torch.library.Library("fa4_test_pretended", "DEF")
        own.define("triple(Tensor x) -> Tensor")
        own.impl("triple", lambda x: 3 * x if x.is_cuda else x, "CUDA")
        assert torch.ops.fa4_test_pretended.triple(x).tolist() == [3, 3]
        assert torch.neg(x).tolist() == [7, 7]
    assert torch.neg(torch.ones(2)).tolist() == [-1, -1]
    with pytest.raises(NotImplementedError, match="CPU"):
        torch.ops.fa4_test_pretended.triple(torch.ones(2))
    del library, own


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_autocast_is_that_of_the_gpu(dtype: torch.dtype | None) -> None:
    """Products have its type, float16 unless said; questions are answered; nothing stays."""
    with emulator.emulate(cuda=True):
        x = torch.ones(2, 2, device="cuda")
        with torch.autocast("cuda", dtype=dtype):
            assert (x @ x).dtype is (dtype or torch.float16)
            assert torch.is_autocast_enabled("cuda") and torch.is_autocast_enabled()
            assert torch.get_autocast_dtype("cuda") is (dtype or torch.float16)
            with torch.autocast("cuda", enabled=False):
                assert (x @ x).dtype is torch.float32
        assert not torch.is_autocast_enabled("cuda") and (x @ x).dtype is torch.float32
    assert torch.is_autocast_enabled.__name__ == "is_autocast_enabled"
    assert torch.autocast.__init__.__module__ == "torch.amp.autocast_mode"
