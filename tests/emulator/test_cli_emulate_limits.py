"""`fa4 emulate`: arguments that do not fit, endless kernels, files that cannot be, 80 columns."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from fa4 import emulator
from tests.emulator.test_cli_emulate import ARGUMENTS, EXCHANGE, HEADER, SCALE, ptx, run

__all__ = ["ptx"]  # the fixture

ENDLESS = f"{HEADER}\n.visible .entry endless()\n{{\n  LOOP: bra LOOP;\n}}\n"
WHOLE = (*ARGUMENTS, "--arg", "f32=1")


def types(name: str) -> str:
    return f"{HEADER}.visible .entry k(.param .{name} p)\n{{\n  ret;\n}}\n"


@pytest.mark.parametrize(
    ("declared", "argument", "fits"),
    [
        ("u32", "f32=1024.5", False),
        ("u32", "f32=1024", False),
        ("s32", "f32=1", False),
        ("u64", "f64=1", False),
        ("u16", "f16=1", False),
        ("f32", "i32=1", False),
        ("f64", "u64=1", False),
        ("f64", "f32[2]=ones", False),
        ("u32", "i32=-1", True),
        ("s32", "u32=1", True),
        ("u64", "i64=1", True),
        ("u64", "f32[2]=ones", True),
        ("b32", "f32=1.5", True),
        ("b32", "i32=1", True),
        ("b64", "f32[2]=ones", True),
        ("b16", "bf16=1", True),
        ("f32", "f32=1.5", True),
        ("f16", "f16=1.5", True),
    ],
)
def test_an_argument_has_the_type_of_its_parameter(
    declared: str, argument: str, fits: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers of the wrong kind would be read as other numbers. Signs do not matter."""
    path = tmp_path / "k.ptx"
    path.write_text(types(declared))
    code, _, err = run(capsys, path, "--arg", argument)
    assert code == (0 if fits else 2)
    if not fits:
        kind = argument.partition("=")[0]
        assert f"--arg {kind}" in err and f"parameter p is .{declared}" in err
        assert err.count("\n") == 1


@pytest.mark.parametrize("value", [1.5, np.float32(2)])
def test_python_arguments_have_the_type_too(value: object) -> None:
    with pytest.raises(emulator.LaunchError, match=r"parameter p is \.u32"):
        emulator.run_ptx(types("u32"), [value])
    with pytest.raises(emulator.LaunchError, match=r"parameter p is \.f32"):
        emulator.run_ptx(types("f32"), [np.int32(1)])
    assert emulator.run_ptx(types("f32"), [1]).ok  # a number of Python has no type yet


def test_an_endless_kernel_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a finding, exit code 1, and what to do if it only takes long."""
    path = tmp_path / "endless.ptx"
    path.write_text(ENDLESS)
    code, out, _ = run(capsys, path, "--max-steps", 3000)
    assert code == 1 and "step-limit: not at its end after 3000 steps" in out
    assert "--max-steps" in out and "LOOP: bra LOOP" in out
    code, out, _ = run(capsys, path, "--max-steps", 3000, "--json")
    assert json.loads(out)["max_steps"] == 3000


def test_there_is_a_limit_by_default(ptx: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(run(capsys, ptx, *WHOLE, "--json")[1])
    assert 10**6 <= report["max_steps"] <= 10**7


BAD = [
    (["--grid", "2147483648"], "--grid 2147483648"),
    (["--grid", "1,65536"], "--grid 1,65536"),
    (["--block", "1,1,65"], "--block 1,1,65"),
    (["--block", "0"], "--block 0"),
    (["--cluster", "17"], "--cluster 17"),
    (["--max-steps", "0"], "--max-steps"),
    (["--max-findings", "0"], "--max-findings"),
    (["--seed", "-1"], "--seed"),
    (["--schedule", "best"], "--schedule best: allowed are fifo, random, adversarial"),
    (["--trace", "."], "--trace .: is a directory"),
    (["--trace", "folder.npy"], "--trace folder.npy: is a directory"),
    (["--out", "y=folder.npy"], "--out y=folder.npy: is a directory"),
    (["--trace", "scale.ptx/t.json"], "scale.ptx"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[" ".join(r[0]) for r in BAD])
def test_bad_options_are_named(
    options: list[str], message: str, ptx: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything runs; no file is left behind."""
    (ptx.parent / "folder.npy").mkdir()
    before = sorted(ptx.parent.rglob("*"))
    code, out, err = run(capsys, ptx, *WHOLE, *options)
    assert (code, out, err.count("\n")) == (2, "", 1), (out, err)
    assert message in err
    assert sorted(ptx.parent.rglob("*")) == before


BAD_ARGUMENTS = ["f31=1", "5", "f32[4]=zeroes", "u8=256", "@x", "f32[9]=no.npy", "f32=random",
                 "f32[4]=ones tma box=2,2", "f32[4]=ones tma", "f32[x]=ones", "bytes=no.bin",
                 "f32[-1]=ones"]  # fmt: skip


@pytest.mark.parametrize("argument", BAD_ARGUMENTS)
def test_bad_arguments_are_shown(
    argument: str, ptx: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole option, no name of a class."""
    code, out, err = run(capsys, ptx, *ARGUMENTS, "--arg", argument)
    assert (code, out, err.count("\n")) == (2, "", 1), (out, err)
    assert f"--arg {argument}: " in err
    assert not any(name in err for name in ("Tma", "dtype", "LaunchError", "ndarray"))


def test_every_form_that_the_usage_shows_is_taken(
    ptx: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    usage = run(capsys, "--help")[1]
    shown = [word.strip(",.;") for word in usage.split() if "=" in word and "[default" not in word]
    np.save("x.npy", np.ones((8, 64)))
    taken = 0
    for word in shown:
        if not word.startswith(("NAME=", "x>")):
            from fa4.emulator.host.ptx_arguments import parse_arguments

            parse_arguments([word])
            taken += 1
    assert taken >= 4


def test_a_file_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither half a file nor a temporary one."""
    recorder = emulator.Recorder()

    def fail(self: Path, text: str, **_: object) -> int:
        self.write_bytes(b"half")
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(OSError, match="No space"):
        recorder.write(tmp_path / "t.json")
    assert list(tmp_path.iterdir()) == []


def test_a_device_is_written_to_not_replaced(tmp_path: Path) -> None:
    """Such as /dev/stdout, or a pipe."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    emulator.Recorder().write(pipe)
    assert b"traceEvents" in os.read(reader, 1 << 16)
    os.close(reader)
    assert pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


@pytest.mark.parametrize(
    "options",
    [
        ["scale.ptx", "--grid", "3", *WHOLE, "--trace", "a-long-folder-name/t.json"],
        ["scale.ptx", "--list"],
        ["exchange.ptx", "--block", "64", "--schedule", "random"],
        ["--support"],
        ["--help"],
    ],
    ids=lambda options: " ".join(options[:2]),
)
def test_what_is_printed_fits_80_columns(
    options: list[str], ptx: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (ptx.parent / "exchange.ptx").write_text(EXCHANGE.replace("SYNC", ""))
    long_name = SCALE.replace("entry scale", f"entry {'kernel_' * 30}")
    ptx.write_text(long_name)
    monkeypatch.setenv("COLUMNS", "80")
    out = run(capsys, *options)[1]
    assert [line for line in out.splitlines() if len(line) > 80] == []
    monkeypatch.setenv("COLUMNS", "300")
    assert len(run(capsys, *options)[1].splitlines()) <= len(out.splitlines())


@pytest.mark.parametrize(
    ("instruction", "shown"),
    [
        ("mov.u32 %r1, [x+4];", "operand [x+4]"),
        ("add.u32 5, %r1, %r1;", "destination 5"),
        ("add.u32 {%r1, _}, %r1, %r1;", "destination {%r1, _}"),
        ("{ .reg .b32 %r1; add.u32 -1, %r1, %r1; }", "destination -1"),
        ("@%p1 ld.shared.u32 [%r1+-8], %r2;", "destination [%r1-8]"),
        ("add.f32 %f1, %f1, _;", "operand _"),
        ("add.u32 %r1|%p1, %r1, %r1;", "destination %r1|%p1"),
        ("ld.global.u32 %r1, %r1;", "address %r1"),
        ("ld.global.u32 %r1, 0f3F800000;", "address 0f3F800000"),
        ("ld.global.u32 %r1, 1.5;", "address 0d3FF8000000000000"),
        ("add.u32 x, %r1, %r1;", "destination x"),
        ("add.u32 %r1, %r1;", "operands that do not fit"),
        ("bra x;", "x is not a label"),
        ("bra 5;", "5 is not a label"),
        ("bra;", "operands that do not fit"),
        ("shfl.sync.bfly.b32;", "operands that do not fit"),
        ("brx.idx %r1, 5;", "brx.idx needs a target list"),
        ("fma.rn.f32 %f1, %f1, %f1;", "operands that do not fit"),
    ],
)
def test_what_is_unsupported_is_shown_as_ptx(
    instruction: str, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not as the emulator's own objects."""
    path = tmp_path / "k.ptx"
    registers = ".reg .b32 %r<3>; .reg .f32 %f1; .reg .pred %p<2>; .shared .b32 x[2];"
    path.write_text(f"{HEADER}.visible .entry k() {{ {registers}\n{instruction}\nret; }}\n")
    code, _, err = run(capsys, path)
    assert code == 2 and f"({shown})" in err, err
    assert err.count("\n") == 1
