"""`fa4 compile` and `fa4 cache`, with a small kernel in the place of the real one."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from fa4 import cli
from fa4.commands import cache as cache_command
from fa4.commands import compile as compile_command
from fa4.compiled import build as build_module
from fa4.compiled import cache as cache_module
from fa4.compiled import toolchain
from fa4.compiled.variants import common_specs
from fa4.designs.backward import LAUNCHES
from fa4.inspect import cubin
from tests.sm100.standin import LOG, compilations, compile_scale

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA4_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv(LOG, str(tmp_path / "compilations"))
    monkeypatch.setattr(build_module, "_made", {})
    monkeypatch.setattr(build_module, "compile_kernel", compile_scale)
    monkeypatch.setattr(cache_module, "_said", set())


@pytest.fixture
def fa4(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command line: (exit code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        build_module._made.clear()
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        captured = capsys.readouterr()
        return stop.value.code, captured.out, captured.err

    return run


def report_of(fa4: Any, *arguments: str) -> dict[str, Any]:
    code, out, err = fa4(*arguments, "--json")
    assert code == 0, err
    report: dict[str, Any] = json.loads(out)
    return report


def test_compile_writes_what_it_made_and_says_how(fa4: Any, tmp_path: Path) -> None:
    out = tmp_path / "made" / "here"
    report = report_of(fa4, "compile", "forward", "--head-dim", "64", "--causal", "--out", str(out))
    assert report["arch"] == "sm_100a" and report["compiler"]["flavour"] in toolchain.FLAVOURS
    assert report["spec"]["causal"] is True and report["from_cache"] is False
    stem = "forward-64-bf16-causal-sm_100a"
    names = {path.name for path in out.iterdir()}
    assert {f"{stem}.ptx", f"{stem}.cubin", f"{stem}.o"} <= names
    assert sorted(report["files"]) == sorted(str(path) for path in out.iterdir())
    assert ".target sm_100a" in (out / f"{stem}.ptx").read_text()
    (kernel,) = report["kernels"]
    assert kernel["frame_bytes"] == 0 and kernel["dynamic_smem_bytes"] == 0
    assert report["plan"]["roles"][0]["registers"] > 0
    again = report_of(fa4, "compile", "--head-dim", "64", "--causal")
    assert again["from_cache"] and again["key"] == report["key"] and compilations() == 1
    assert not report_of(fa4, "compile", "--head-dim", "64", "--causal", "--no-cache")["from_cache"]
    assert compilations() == 2


def test_the_backward_kernels(fa4: Any, tmp_path: Path) -> None:
    """Their own options; the other kernel's are refused."""
    arguments = ("compile", "backward", "--head-dim", "64", "--any-order", "--lse-gradient",
                 "--out-residual")  # fmt: skip
    report = report_of(fa4, *arguments, "--sink", "--window", "left", "--out", str(tmp_path))
    spec = {"head_dim": 64, "head_dim_v": 64, "window_left": True, "sink": True,
            "lse_gradient": True, "out_residual": True}  # fmt: skip
    assert report["spec"] == spec and report["kernels"][0]["planned"] is True
    stem = "backward-64-bf16-window_left-sink-lse_gradient-out_residual-any_order-sm_100a"
    assert (tmp_path / f"{stem}.ptx").exists()
    assert report_of(fa4, "compile", "backward")["spec"]["deterministic"] is True
    for kernel, option, message in (
        ("backward", ("--group", "2"), "--group is an option of the forward kernel; got backward"),
        ("backward", ("--no-lse",), "--no-lse is an option of the forward kernel; got backward"),
        ("forward", ("--any-order",), "--any-order is an option of the backward kernel"),
    ):
        code, _, err = fa4("compile", kernel, *option)
        assert code == 2 and message in err


def test_several_kernels_are_told_apart() -> None:
    """In the order of their launches; the plan is of the one with most shared memory."""
    kernels = [
        {"kernel": name, "dynamic_smem_bytes": smem}
        for name, smem in (("main", 4096), ("after", None), ("before", 0))
    ]
    found = compile_command.in_launch_order(kernels, ["before", "main", "after"], LAUNCHES)
    assert [one["kernel"] for one in found] == ["before", "main", "after"]
    assert [one["planned"] for one in found] == [False, True, False]
    assert [one["does"].split(":")[0] for one in found] == [
        "pre-process", "main kernel", "post-process"
    ]  # fmt: skip
    (alone,) = compile_command.in_launch_order(kernels[:1], [], ())
    assert alone["planned"] and alone["does"] == ""


def test_the_report_for_people(fa4: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a disassembler: how to get one, and the loops of the PTX instead."""
    monkeypatch.setattr(cubin, "find_disassembler", lambda: None)
    code, out, _ = fa4("compile", "--head-dim", "64", "--arch", "sm_103a", "--softcap")
    assert code == 0
    text = " ".join(out.split())
    for part in ("softcap", "for sm_103a: compiled in", "CUDA 1", "softmax0 0, 1, 2, 3",
                 "spills: 0 bytes", "shared memory: 0 bytes dynamic", "tensor memory:",
                 "pip install nvidia-cuda-nvdisasm"):  # fmt: skip
        assert part in text, part


def test_ignored_registers_are_said() -> None:
    """Planted: a kernel whose setmaxnreg the compiler has dropped."""
    kernel = {"ptx": {"budgets": [("inc", 152)]}, "registers_at_launch": 128, "frame_bytes": 0,
              "instructions": None, "dynamic_smem_bytes": 0, "static_smem_bytes": 0,
              "planned": False, "ignored_budgets": [], "wgmma": 64,
              "wgmma_wait": False, "late_exponentials": 0, "uniform_moves": 300,
              "descriptors_by_threads": False}  # fmt: skip
    line = "registers per thread at launch: 128; setmaxnreg: 152 (inc)"
    assert next(compile_command.render_memory(kernel, {})) == line
    kernel["ignored_budgets"] = [152]
    ignoring = next(compile_command.render_memory(kernel, {}))
    assert ignoring == f"{line}; the compiler IGNORES 152"
    lines = list(compile_command.render_memory(kernel, {"tmem_columns_limit": 0}))
    assert not any(word in one for one in lines for word in ("WAITS", "MOVED", "COMPUTE"))
    kernel |= {"wgmma_wait": True, "late_exponentials": 32, "descriptors_by_threads": True}
    lines = list(compile_command.render_memory(kernel, {"tmem_columns_limit": 0}))
    for start in ("the compiler WAITS for each of 64 wgmma", "the compiler has MOVED 32 exp",
                  "threads COMPUTE descriptors: 300 moves"):  # fmt: skip
        assert any(one.startswith(start) for one in lines), start


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sideways",), "the kernel must be one of forward, backward, hopper_forward"),
        (("--head-dim", "7"), "head_dim must be a positive multiple of 8; got 7"),
        (("--head-dim", "0"), "head_dim must be a positive multiple of 8; got 0"),
        (("--dtype", "fp8"), "dtype"),
        (("--window", "up"), "--window must be left, right or both; got 'up'"),
        (("--group", "3"), "group must divide 128; got 3"),
        (("--arch", "sm_80"), "arch must be one of sm_100a, sm_103a, sm_90a; got 'sm_80'"),
        (("--tile-m", "64"), "--tile-m 64 is a choice for --arch sm_90a; sm_100a has one tile"),
        (("--arch", "sm_90a", "--tile-m", "100"), "--tile-m must be 64, 128 or 192; got 100"),
        (("--arch", "sm_90a", "--cta-group", "2"), "sm_90a has no pairs"),
        (
            ("backward", "--arch", "sm_90a", "--tile-m", "64"),
            "--tile-m 64 is an option of the forw",
        ),
        (
            ("backward", "--arch", "sm_90a", "--head-dim", "264"),
            "head_dim must be between 8 and 256; got 264",
        ),
        (("--arch", "sm_90a", "--scheduler", "clc"), "snake, queue, lpt, naive; got 'clc'"),
        (
            ("--arch", "sm_90a", "--tile-m", "192", "--tile-n", "128"),
            "needs 186 registers: S 64 + O 64 + P 32 + statistics 6 + addresses 20; it has 160",
        ),
        (
            ("--arch", "sm_90a", "--tile-m", "128", "--tile-n", "256"),
            "shared memory plan needs 295168 bytes: q 32768 + k 2x65536 + v 2x65536",
        ),
        (("--flavour", "cu11"), "flavour must be one of cu13, cu12; got 'cu11'"),
        (("--scheduler", "none"), "scheduler must be one of"),
    ],
)
def test_bad_options_are_one_line(fa4: Any, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = fa4("compile", *arguments)
    assert code == 2 and out == "" and err.count("\n") == 1
    assert message in err and compilations() == 0


def test_every_feature_reaches_the_spec(fa4: Any) -> None:
    options = ("--varlen", "--used", "--softcap", "--sink", "--no-lse", "--group", "4",
               "--window", "left", "--dtype", "fp16", "--head-dim-v", "32", "--scheduler",
               "lpt")  # fmt: skip
    spec = report_of(fa4, "compile", *options)["spec"]
    names = ("packed_q", "packed_k", "used_q", "used_k", "softcap", "sink", "window_left")
    assert all(spec[name] is True for name in names) and spec["lse"] is False
    assert (spec["group"], spec["dtype"], spec["head_dim_v"]) == (4, "fp16", 32)
    assert spec["scheduler"] == "lpt"


def test_what_is_missing_is_named(fa4: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "installed_toolchains", dict)
    code, _, err = fa4("compile")
    assert code == 2 and "pip install nvidia-cutlass-dsl" in err


def test_cache_trouble_is_a_note(fa4: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FA4_CACHE_DIR", str(tmp_path / "file"))
    report = report_of(fa4, "compile", "--head-dim", "64")
    assert any("cannot keep compiled kernels" in note for note in report["notes"])


def test_cache_lists_and_clears(fa4: Any) -> None:
    assert report_of(fa4, "cache", "ls")["kernels"] == []
    for options in ((), ("--causal",), ("--softcap",)):
        report_of(fa4, "compile", "--head-dim", "64", *options)
    rows = report_of(fa4, "cache", "ls")["kernels"]
    assert len(rows) == 3 and all(row["size_bytes"] > 10_000 for row in rows)
    assert all(row["age_seconds"] < 600 and not row["problem"] for row in rows)
    code, out, _ = fa4("cache", "ls")
    assert code == 0 and "3 kernels" in out and rows[0]["key"][:12] in out and "softcap" in out
    assert fa4("cache", "clear", "--older-than", "1h")[1].endswith("deleted 0 kernels, 0.0 MB\n")
    (gone,) = report_of(fa4, "cache", "clear", "softcap")["kernels"]
    assert "softcap" in gone["spec"]
    assert "deleted 2 kernels" in fa4("cache", "clear")[1]
    assert "0 kernels" in fa4("cache", "ls")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("clear", "--older-than", "3y"), "--older-than must be a number and one of s, m, h, d, w"),
        (("warm", "--arch", "sm_80"), "arch must be one of"),
        (("warm", "--jobs", "0"), "jobs"),
    ],
)
def test_bad_cache_options(fa4: Any, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = fa4("cache", *arguments)
    assert code == 2 and out == "" and message in err and err.count("\n") == 1


def test_cache_that_is_off(fa4: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA4_CACHE", "0")
    code, _, err = fa4("cache", "ls")
    assert code == 2 and "FA4_CACHE" in err


def test_warm_makes_what_is_missing(fa4: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All common kernels, once; the others go on when one does not compile: exit code 1."""
    # Processes would compile the real kernel.
    monkeypatch.setattr(cache_command, "_pool", ThreadPoolExecutor)
    count = len(list(common_specs()))
    report = report_of(fa4, "cache", "warm", "--jobs", "2")
    assert len(report["kernels"]) == count == len({row["key"] for row in report["kernels"]})
    assert all(row["made"] for row in report["kernels"])
    assert not any(row["made"] for row in report_of(fa4, "cache", "warm")["kernels"])
    assert compilations() == count

    def refuse(spec: Any, arch: str) -> Any:
        if spec.causal:
            raise RuntimeError("no such kernel\nat line 1")
        return compile_scale(spec, arch)

    monkeypatch.setattr(build_module, "compile_kernel", refuse)
    code, out, _ = fa4("cache", "warm", "--json")
    rows = json.loads(out)["kernels"]
    failed = [row for row in rows if row["problem"] == "RuntimeError: no such kernel"]
    assert code == 1 and len(failed) == count // 2 and len(rows) == count


def test_the_pool_has_processes_that_begin_anew() -> None:
    """Forked ones would share the lock and half a compiler with this one."""
    with cache_command._pool(1) as pool:
        assert pool._mp_context.get_start_method() == "spawn"


def install(folder: Path, *flavours: str) -> dict[str, toolchain.Toolchain]:
    """A package folder with these flavours of the compiler, as pip would lay it out."""
    libraries = folder / "dsl_packages" / "cutlass" / "_mlir" / "_mlir_libs"
    libraries.mkdir(parents=True)
    for flavour in flavours:
        (libraries / f"_cutlass_ir.{flavour}.cpython-311-x86_64-linux-gnu.so").touch()
        version = libraries / f"_cutlass_ir_version_{flavour}.py"
        version.write_text(f'DSO_SHA256 = {{"x": "{flavour[-1] * 64}"}}\n')
        (folder / flavour / "lib").mkdir(parents=True)
        (folder / flavour / "lib" / "libcute_dsl_runtime.so").touch()
    return toolchain.installed_toolchains.__wrapped__()


@pytest.mark.parametrize(
    ("flavours", "driver", "chosen"),
    [
        (("cu12",), None, "cu12"),
        (("cu12", "cu13"), None, "cu13"),
        (("cu12", "cu13"), 13, "cu13"),
        (("cu12", "cu13"), 12, "cu12"),
    ],
)
def test_the_newest_flavour_that_the_driver_supports(
    flavours: tuple[str, ...], driver: int | None, chosen: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(toolchain, "_package_folder", lambda: tmp_path)
    found = install(tmp_path, *flavours)
    monkeypatch.setattr(toolchain, "installed_toolchains", lambda: found)
    monkeypatch.setattr(toolchain, "loaded_flavour", lambda: None)
    monkeypatch.setattr(toolchain, "driver_major", lambda: driver)
    assert toolchain.find_toolchain().flavour == chosen
    assert {one.fingerprint for one in found.values()} == {name[-1] * 64 for name in flavours}
    # Whatever would be preferred, the one that is loaded compiles.
    monkeypatch.setattr(toolchain, "loaded_flavour", lambda: flavours[0])
    assert toolchain.find_toolchain().flavour == flavours[0]
    if len(flavours) > 1:
        with pytest.raises(ValueError, match="compiles with cu12 already"):
            toolchain.select_flavour("cu13")


def test_flavours_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_package_folder", lambda: tmp_path)
    found = install(tmp_path, "cu13")
    monkeypatch.setattr(toolchain, "installed_toolchains", lambda: found)
    monkeypatch.setattr(toolchain, "loaded_flavour", lambda: None)
    monkeypatch.setattr(toolchain, "driver_major", lambda: 12)
    with pytest.raises(ImportError, match=r"supports CUDA 12.*libs-cu12"):
        toolchain.find_toolchain()
    with pytest.raises(ImportError, match=r"cu12 flavour .* is not installed, cu13 is: pip"):
        toolchain.select_flavour("cu12")
