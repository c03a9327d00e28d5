"""From a spec to a kernel that runs: compiled once, kept, found again without CuTe-DSL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
tvm_ffi = pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

from fa4.compiled import build as build_module  # noqa: E402
from fa4.compiled import cache as cache_module  # noqa: E402
from fa4.compiled import identity  # noqa: E402
from fa4.compiled.artifact import to_bytes  # noqa: E402
from fa4.compiled.build import build  # noqa: E402
from fa4.compiled.cache import CacheWarning, open_cache  # noqa: E402
from fa4.emulator import LaunchError, launch  # noqa: E402
from fa4.sm100.forward.spec import ForwardSpec  # noqa: E402
from tests.sm100.standin import LOG, clamp, compilations, compile_scale  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

ROOT = Path(__file__).resolve().parents[2]
SPEC = ForwardSpec(head_dim=64, head_dim_v=64)
N = 40
PINNED = """
from fa4.compiled import identity
hash_now, identity.source_hash = identity.source_hash, lambda: "pinned"
"""
START_SECONDS = 0.050  # the promise for a kernel that is in the cache


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, and a process that has built nothing."""
    monkeypatch.setenv("FA4_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv(LOG, str(tmp_path / "compilations"))
    monkeypatch.setattr(build_module, "_made", {})
    monkeypatch.setattr(cache_module, "_said", set())
    # Two processes of one test must agree on the sources while somebody edits them.
    monkeypatch.setattr(identity, "source_hash", lambda: "pinned")
    build_module._plain_key.cache_clear()


def make(spec: ForwardSpec = SPEC, arch: str = "sm_100a") -> Any:
    return build(spec, arch, compiler=compile_scale)


def forget() -> None:
    """As a new process would begin."""
    build_module._made.clear()


def scaled(kernel: Any) -> np.ndarray:
    source, out = np.arange(N, dtype=np.float32), np.zeros(N, np.float32)
    (report,) = launch(kernel, source, out, None)
    assert not report.findings
    return out / np.maximum(source, 1)


def run_python(text: str) -> subprocess.Popen[str]:
    """A new process that sees the same cache. It finds the tests and the package."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", PINNED + textwrap.dedent(text)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment,
    )  # fmt: skip


def output_of(process: subprocess.Popen[str]) -> Any:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out)


def test_a_kernel_is_compiled_once_and_runs_in_the_emulator() -> None:
    kernel = make()
    assert make() is kernel and compilations() == 1
    forget()
    again = make()
    assert again is not kernel and to_bytes(again) == to_bytes(kernel) and compilations() == 1
    for one in (kernel, again):
        assert np.all(scaled(one)[1:] == 64.0)
    assert kernel.ptx.count(".target sm_100a") == 1 and kernel.cubin.startswith(b"\x7fELF")
    assert kernel.metadata["spec"] == {"head_dim": 64, "head_dim_v": 64}
    assert kernel.metadata["compiler"]["flavour"] in ("cu12", "cu13")
    assert kernel.parameters[:3] == ("source", "out", "extra") and again.spec == SPEC


def test_specs_and_architectures_have_kernels_of_their_own() -> None:
    other = make(ForwardSpec(head_dim=32, head_dim_v=64))
    assert np.all(scaled(other)[1:] == 32.0)
    b300 = make(SPEC, "sm_103a")
    assert ".target sm_103a" in b300.ptx and np.all(scaled(b300)[1:] == 64.0)
    assert len({other.key, b300.key, make().key}) == 3 == compilations()


def test_callables_are_compiled_in_and_kept() -> None:
    """Also a callable that CuTe-DSL rewrites; one with another closure is another kernel."""

    def biased(bias: float) -> Any:
        return lambda value: value + bias

    specs = [ForwardSpec(head_dim=64, head_dim_v=64, score_mod=mod)
             for mod in (clamp, biased(1.0), biased(2.0), biased(1.0))]  # fmt: skip
    kernels = [make(spec) for spec in specs]
    assert compilations() == 3 and kernels[1] is kernels[3]
    source, out = np.arange(N, dtype=np.float32), np.zeros(N, np.float32)
    expected = np.minimum(64 * source, 100), 64 * source + 1, 64 * source + 2
    for kernel, values in zip(kernels, expected, strict=False):
        launch(kernel, source, out, None)
        np.testing.assert_array_equal(out, values)
    forget()
    assert make(specs[0]).key == kernels[0].key and compilations() == 3


def test_a_callable_that_cannot_be_hashed_is_said_and_not_kept() -> None:
    box = type("Box", (), {"value": 2.0})()
    spec = ForwardSpec(head_dim=64, head_dim_v=64, score_mod=lambda value: value * box.value)
    with pytest.warns(CacheWarning, match=r"not kept in the cache: .*Box"):
        kernel = make(spec)
    assert kernel.key == "" and np.all(scaled(kernel)[1:] == 128.0)
    assert make(spec) is kernel  # and says nothing more
    assert open_cache().entries() == [] and compilations() == 1


def test_a_damaged_entry_is_compiled_anew() -> None:
    good = make()
    path = open_cache().path(good.key)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    forget()
    with pytest.warns(CacheWarning, match="is damaged"):
        again = make()
    assert compilations() == 2 and np.all(scaled(again)[1:] == 64.0)
    forget()
    assert make().key == good.key and compilations() == 2


def test_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Switched off: compiled once per process. A place that takes no files: said once."""
    monkeypatch.setenv("FA4_CACHE", "0")
    assert make() is make()
    forget()
    make()
    assert compilations() == 2 and not (tmp_path / "cache").exists()
    monkeypatch.setenv("FA4_CACHE", "1")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FA4_CACHE_DIR", str(tmp_path / "file" / "cache"))
    for messages in (2, 0):  # it can neither be read nor written
        forget()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert np.all(scaled(make())[1:] == 64.0)
        assert sum(one.category is CacheWarning for one in said) == messages
    assert compilations() == 4


def test_threads_compile_once() -> None:
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: make(), range(8)))
    assert all(one is made[0] for one in made) and compilations() == 1


def test_processes_compile_once() -> None:
    """Two that need a kernel at the same time: one makes it, the other waits for it."""
    program = """
        import json, os, time
        from pathlib import Path
        from fa4.compiled.build import build
        from fa4.sm100.forward.spec import ForwardSpec
        from tests.sm100.standin import compile_scale
        folder = Path(os.environ["FA4_CACHE_DIR"]).parent
        (folder / f"ready-{os.getpid()}").touch()
        while len(list(folder.glob("ready-*"))) < 2:
            time.sleep(0.01)
        kernel = build(ForwardSpec(head_dim=64, head_dim_v=64), compiler=compile_scale)
        print(json.dumps(kernel.key))
    """
    found = [output_of(process) for process in [run_python(program), run_python(program)]]
    assert found[0] == found[1] == make().key
    assert compilations() == 1


def test_a_kept_kernel_starts_fast_and_without_cutlass() -> None:
    """A new process finds it, loads its host code and runs it in the emulator."""
    make()
    program = f"""
        import json, sys, time
        import numpy as np, tvm_ffi
        from fa4.compiled import build as build_module
        from fa4.compiled.build import build
        from fa4.sm100.forward.spec import ForwardSpec
        from fa4.compiled.native import load_function
        from fa4.emulator import launch
        def compile_scale(spec, arch):
            raise AssertionError("compiled")
        compile_scale.__module__ = {compile_scale.__module__!r}
        seconds = []
        for repeat in range(3):
            start = time.perf_counter()
            hash_now.cache_clear()
            hash_now()
            kernel = build(ForwardSpec(head_dim=64, head_dim_v=64), compiler=compile_scale)
            load_function(kernel.host_object, kernel.function_name)
            seconds.append(time.perf_counter() - start)
            build_module._made.clear()
            build_module._plain_key.cache_clear()
        source, out = np.arange({N}, dtype=np.float32), np.zeros({N}, np.float32)
        launch(kernel, source, out, None)
        print(json.dumps([min(seconds), float(out[1]), "cutlass" in sys.modules]))
    """
    seconds, value, cutlass_loaded = output_of(run_python(program))
    assert value == 64.0 and not cutlass_loaded
    assert seconds < START_SECONDS


def test_on_a_gpu_it_takes_gpu_tensors_only() -> None:
    """The host code is linked here as on a GPU; TVM-FFI's check of the arguments comes first."""
    kernel = make()
    arrays = [tvm_ffi.from_dlpack(np.zeros(N, np.float32)) for _ in range(2)]
    with pytest.raises(ValueError, match="expected device_type=cuda"):
        kernel(*arrays, None)
    with pytest.raises(TypeError, match="Expects 3 parameters"):
        kernel(*arrays)
    with pytest.raises(LaunchError, match="Expects 3 parameters"):
        launch(kernel, *(np.zeros(N, np.float32) for _ in range(2)))


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="arch must be one of sm_100a, sm_103a; got 'sm_90a'"):
        make(SPEC, "sm_90a")


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cutlass", None)
    with pytest.raises(ImportError, match="pip install nvidia-cutlass-dsl"):
        build(SPEC)
