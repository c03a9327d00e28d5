"""`fa4 emulate` and the front door of fa4.emulator, seen from outside."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fa4 import cli, emulator

ROOT = Path(__file__).resolve().parents[2]

HEADER = ".version 8.8\n.target sm_100a\n.address_size 64\n"
SCALE = f"""{HEADER}
.visible .entry scale(.param .u64 x, .param .u64 y, .param .u32 n, .param .f32 factor)
.maxntid 256
{{
  .reg .pred %p;
  .reg .b32 %i, %n, %t;
  .reg .f32 %v, %s;
  .reg .b64 %x, %y, %o;
  ld.param.u32 %n, [n];
  mov.u32 %i, %ctaid.x;
  mov.u32 %t, %ntid.x;
  mul.lo.u32 %i, %i, %t;
  mov.u32 %t, %tid.x;
  add.u32 %i, %i, %t;
  setp.ge.u32 %p, %i, %n;
  @%p ret;
  ld.param.u64 %x, [x];
  ld.param.u64 %y, [y];
  ld.param.f32 %s, [factor];
  mul.wide.u32 %o, %i, 4;
  add.u64 %x, %x, %o;
  add.u64 %y, %y, %o;
  ld.global.f32 %v, [%x];
  mul.f32 %v, %v, %s;
  st.global.f32 [%y], %v;
  ret;
}}
"""

# Two warps exchange a word of shared memory; SYNC is the barrier between them.
EXCHANGE = f"""{HEADER}
.visible .entry exchange()
{{
  .reg .b32 %t, %a, %b;
  .shared .align 8 .b8 tile[256];
  .loc 1 7 0
  mov.u32 %t, %tid.x;
  mov.u32 %a, tile;
  mad.lo.u32 %b, %t, 4, %a;
  st.shared.b32 [%b], %t;
  SYNC
  xor.b32 %t, %t, 32;
  mad.lo.u32 %b, %t, 4, %a;
  .loc 1 9 0
  ld.shared.b32 %t, [%b];
  ret;
}}
.file 1 "exchange.py"
"""

# Lane 0 of each warp leaves its warp's number; if warp 0 comes after warp 1, it executes BODY.
LATE_WARP = f"""{HEADER}
.visible .entry late(.param .u64 x)
{{
  .reg .pred %p;
  .reg .b32 %w, %first;
  .reg .b64 %x;
  mov.u32 %w, %tid.x;
  and.b32 %first, %w, 31;
  setp.ne.u32 %p, %first, 0;
  @%p ret;
  shr.u32 %w, %w, 5;
  ld.param.u64 %x, [x];
  atom.global.exch.b32 %first, [%x], %w;
  setp.ne.u32 %p, %first, 1;
  @%p ret;
  BODY
  ret;
}}
"""


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `fa4 emulate <arguments>`, run in this process."""
    with pytest.raises(SystemExit) as stop:
        cli.main(["emulate", *map(str, arguments)])
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


@pytest.fixture
def ptx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """scale.ptx in a folder of its own, which is the current one."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "scale.ptx"
    path.write_text(SCALE)
    return path


ARGUMENTS = ("--arg", "x:f32[300]=arange", "--arg", "y:f32[300]=nan", "--arg", "u32=300")


def test_a_kernel_runs(ptx: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The array comes out right; counts and roles are shown; exit code 0."""
    code, out, err = run(
        capsys, ptx, "--grid", 3, *ARGUMENTS, "--arg", "f32=2.5", "--out", "y=new/y.npy"
    )
    assert (code, err) == (0, "")
    np.testing.assert_array_equal(np.load("new/y.npy"), np.arange(300, dtype=np.float32) * 2.5)
    assert "mov.u32 1152, " in out and "300 of 300" in out and out.endswith("no findings\n")
    assert re.search(r"warps 0, 1, 2, 3: compute; mov.u32 36, ", out) is not None


def test_json(ptx: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same figures for machines."""
    code, out, _ = run(capsys, ptx, "--grid", "3", *ARGUMENTS, "--arg", "f32=1", "--json")
    report = json.loads(out)
    assert code == 0 and report["findings"] == []
    assert report["instructions"]["setp.ge.u32"] == 3 * 128
    assert report["thread_instructions"] == sum(report["instructions"].values())
    assert (report["grid"], report["block"], report["cluster"]) == ([3, 1, 1], [128, 1, 1], [1] * 3)
    assert (
        sum(role["warp_instructions"] for role in report["roles"]) * 32
        == (report["thread_instructions"])
    )
    (x, y) = report["arrays"]
    assert (x["changed"], y["changed"], y["not_finite"], y["max"]) == (0, 300, 0, 299.0)


def test_findings_name_line_and_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A race: exit code 1, the text of the PTX line and the source line. Repaired: exit code 0."""
    path = tmp_path / "exchange.ptx"
    path.write_text(EXCHANGE.replace("SYNC", ""))
    code, out, _ = run(capsys, path, "--block", 64, "--schedule", "random")
    assert code == 1
    assert "race: " in out and "ld.shared.b32 %t, [%b];" in out and "from exchange.py:9" in out
    assert re.search(r"\n\d+ findings? with seed 0\n$", out)
    code, out, _ = run(capsys, path, "--block", 64, "--json")
    assert code == 1
    rows = {row["line"]: row for row in json.loads(out)["findings"]}
    line = path.read_text().splitlines().index("  ld.shared.b32 %t, [%b];") + 1
    assert rows[line]["text"] == "ld.shared.b32 %t, [%b];"
    assert rows[line]["source"] == "exchange.py:9" and rows[line]["cta"] == 0

    assert run(capsys, path, "--block", 64, "--no-checks")[0] == 0
    path.write_text(EXCHANGE.replace("SYNC", "bar.sync 0;"))
    assert run(capsys, path, "--block", 64)[0] == 0


def test_sums_in_any_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two CTAs add a float to one place: a finding only where fixed orders are asked for."""
    path = tmp_path / "sum.ptx"
    path.write_text(
        f"{HEADER}\n.visible .entry sum(.param .u64 x)\n{{ .reg .b64 %x; ld.param.u64 %x, [x]; "
        "red.global.add.f32 [%x], 0f3F800000; ret; }\n"
    )
    given = path, "--grid", 2, "--arg", "x:f32[1]=zeros"
    assert run(capsys, *given)[0] == 0
    code, out, _ = run(capsys, *given, "--ordered-sums")
    assert code == 1 and "race: " in out


def test_seeds_stop_at_the_first_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fault that only another order of warps reaches; memory starts afresh for every seed."""
    path = tmp_path / "late.ptx"
    path.write_text(LATE_WARP.replace("BODY", "st.global.b32 [%x+64], %w;"))
    job = (path, "--block", 64, "--arg", "x:i32[1]=7", "--json")
    assert run(capsys, *job)[0] == 0  # fifo: warp 0 comes first
    code, out, _ = run(capsys, *job, "--seeds", 30)
    report = json.loads(out)
    assert code == 1 and report["schedule"] == "random"
    assert 1 <= len(report["seeds"]) < 30
    assert report["findings"][0]["kind"] == "out-of-bounds"
    found = str(report["seeds"][-1])
    assert run(capsys, *job, "--schedule", "random", "--seed", found)[0] == 1
    for seed in report["seeds"][:-1]:
        assert run(capsys, *job, "--schedule", "random", "--seed", seed)[0] == 0


def test_results_that_depend_on_the_seed_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two atomics in either order: no fault, but the array differs."""
    path = tmp_path / "late.ptx"
    path.write_text(LATE_WARP.replace("BODY", ""))
    code, out, _ = run(capsys, path, "--block", 64, "--arg", "x:i32[1]=7", "--seeds", 20)
    assert code == 0
    assert re.search(r"x differs between seed 0 and seed \d+\n", out)


def test_trace(ptx: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Perfetto file with what the warps did."""
    code, out, _ = run(
        capsys, ptx, "--grid", 3, *ARGUMENTS, "--arg", "f32=1", "--trace", "traces/t.json"
    )
    events = json.loads(Path("traces/t.json").read_text())["traceEvents"]
    stores = [e for e in events if e["ph"] == "X" and e["name"] == "st.global.f32"]
    assert code == 0 and "ui.perfetto.dev" in out
    assert {e["pid"] for e in stores} == {0, 1, 2}


def test_list(ptx: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a launch needs, and what keeps a kernel from loading."""
    broken = SCALE.replace("mul.f32 %v", "wgmma.mma_async.sp.sync.aligned;\n  mul.f32 %v")
    ptx.write_text(broken.replace("{\n", "{\n  .shared .b8 tile[48];\n", 1))
    code, out, _ = run(capsys, ptx, "--list", "--json")
    (kernel,) = json.loads(out)["kernels"]
    assert code == 0
    assert [(p["name"], p["bytes"]) for p in kernel["parameters"]] == [
        ("x", 8), ("y", 8), ("n", 4), ("factor", 4)
    ]  # fmt: skip
    assert kernel["static_smem_bytes"] == 48 and not kernel["uses_dynamic_smem"]
    assert kernel["registers"] == {"b32": 3, "b64": 3, "f32": 2, "pred": 1}
    assert kernel["directives"] == {"maxntid": [256, 1, 1]} and kernel["mix"]["mov.u32"] == 3
    (problem,) = kernel["unsupported"]
    assert problem["text"] == "wgmma.mma_async.sp.sync.aligned"
    text = run(capsys, ptx, "--list")[1]
    assert "parameter factor: .f32, 4 bytes" in text and "unsupported, line" in text
    code, _, err = run(capsys, ptx, *ARGUMENTS, "--arg", "f32=1")
    assert code == 2 and "wgmma.mma_async.sp.sync.aligned" in err and err.count("\n") == 1


BAD = [
    ("missing file", ["nowhere.ptx"], "No such file or directory: nowhere.ptx"),
    ("no file", [], "missing argument FILE.ptx"),
    ("folder", ["."], "Is a directory"),
    ("kernel", ["scale.ptx", "--kernel", "no"], "no kernel 'no'; the PTX has scale"),
    ("argument count", ["scale.ptx", *ARGUMENTS], "takes 4 parameter(s), 3 given: x (8 bytes)"),
    ("size", ["scale.ptx", *ARGUMENTS, "--arg", "f64=1"], "has 8 bytes; parameter factor takes 4"),
    ("type", ["scale.ptx", "--arg", "f31=1"], "type 'f31': allowed are i8"),
    ("form", ["scale.ptx", "--arg", "5"], "--arg 5: expected TYPE=NUMBER"),
    ("source", ["scale.ptx", "--arg", "f32[4]=zeroes"], "source 'zeroes': zeros, ones"),
    ("number", ["scale.ptx", "--arg", "u8=256"], "'256' is not a number of type uint8"),
    ("array file", ["scale.ptx", "--arg", "f32[]=scale.npy"], "No such file or directory"),
    ("huge", ["scale.ptx", "--arg", "f32[99999999999]=ones"], "at most 17179869184"),
    ("unknown array", ["scale.ptx", "--arg", "@x"], "no array of this name before it"),
    ("grid", ["scale.ptx", *ARGUMENTS, "--arg", "f32=1", "--grid", "1;2"], "--grid 1;2: one to"),
    ("block", ["scale.ptx", *ARGUMENTS, "--arg", "f32=1", "--block", "512"], "allows 256"),
    ("cluster", ["scale.ptx", *ARGUMENTS, "--arg", "f32=1", "--cluster", "2", "--grid", "3"],
     "not a multiple of cluster"),
    ("smem", ["scale.ptx", *ARGUMENTS, "--arg", "f32=1", "--smem", "232449"],
     "needs 232449 bytes of shared memory"),
    ("schedule", ["scale.ptx", *ARGUMENTS, "--arg", "f32=1", "--schedule", "best"],
     "allowed are fifo, random, adversarial"),
    ("seeds", ["scale.ptx", *ARGUMENTS, "--arg", "f32=1", "--seeds", "2", "--schedule", "fifo"],
     "take random or adversarial"),
    ("out", ["scale.ptx", *ARGUMENTS, "--arg", "f32=1", "--out", "z=z.npy"],
     "no such array; there are x, y"),
    ("out folder", ["scale.ptx", *ARGUMENTS, "--arg", "f32=1", "--out", "y=scale.ptx/y.npy"],
     "Not a directory: scale.ptx"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), [r[1:] for r in BAD], ids=[r[0] for r in BAD])
def test_bad_options(
    arguments: list[str], message: str, ptx: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that says what is wrong, exit code 2, nothing on stdout."""
    code, out, err = run(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1), (out, err)
    assert err.startswith("fa4: error: ") and message in err


BAD_TEXTS = [
    ("binary", b"\x7fELF\x02\x01\xff\xfe", "is not PTX text"),
    ("empty", b"", "expected"),
    ("not PTX", b"int main() { return 0; }", "PTX line 1"),
    ("truncated", SCALE[: SCALE.index("mul.f32")].encode(), "text ends"),
    ("target", SCALE.replace("sm_100a", "sm_80").encode(), "PTX target sm_80"),
    ("version", SCALE.replace("8.8", "7.0").encode(), ".version 7.0 is not supported"),
    ("no kernel", HEADER.encode(), "the PTX has none"),
    ("unknown opcode", SCALE.replace("mul.f32", "mull.f32").encode(), "mull.f32"),
]


@pytest.mark.parametrize(
    ("content", "message"), [r[1:] for r in BAD_TEXTS], ids=[r[0] for r in BAD_TEXTS]
)
def test_bad_files(
    content: bytes, message: str, ptx: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files that are no PTX, or none that the emulator runs."""
    ptx.write_bytes(content)
    code, out, err = run(capsys, ptx, *ARGUMENTS, "--arg", "f32=1")
    assert (code, out, err.count("\n")) == (2, "", 1), (out, err)
    assert message in err and "Traceback" not in err


# The documentation.

DOCUMENT = (ROOT / "docs" / "emulator.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    """The fenced blocks of this kind in docs/emulator.md."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", DOCUMENT, re.DOTALL | re.MULTILINE)


def test_documented_commands_and_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The console lines do what they say; the report that is shown is the one they print."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec("\n".join(blocks("python")[:2]), names)
    lines = [line for block in blocks("console") for line in block.splitlines()]
    assert len(lines) == 4
    capsys.readouterr()
    shown = ""
    for line in lines:
        words = line.partition("  #")[0].split()
        assert words[:2] == ["fa4", "emulate"]
        code, out, err = run(capsys, *words[2:])
        assert (code, err) == (1 if "exit code 1" in line else 0, ""), line
        shown += out
    (report,) = blocks("text")
    assert report in shown
    np.testing.assert_array_equal(np.load("y.npy"), np.arange(128)[::-1])


def test_documented_cute_dsl_program(tmp_path: Path) -> None:
    """The CuTe-DSL example runs as a program of its own, where CuTe-DSL is installed."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    (example,) = (block for block in blocks("py") if "@cute.kernel" in block)
    path = tmp_path / "program.py"
    path.write_text(example)
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "ld.param" in done.stdout


# The front door.


def test_front_door_is_lazy_and_needs_no_optional_package() -> None:
    """Importing it loads neither compiler nor CuTe-DSL; PTX runs without torch and cutlass."""
    code = f"""
import sys
for name in ("torch", "cutlass", "cuda", "tvm_ffi"):
    sys.modules[name] = None
import fa4.emulator
assert not {{"llvmlite", "numba"}} & set(sys.modules), sorted(sys.modules)
import numpy as np
x, y = np.ones((2, 128), np.float32)
report = fa4.emulator.run_ptx({SCALE!r}, [x, y, 128, 3.0])
assert report.ok and (y == 3).all()
assert set(fa4.emulator.__all__) <= set(dir(fa4.emulator))
for name in fa4.emulator.__all__:
    assert getattr(fa4.emulator, name).__name__ == name, name
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_unknown_names_are_refused() -> None:
    """As for any module."""
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = emulator.nothing
