"""Functions that CuTe-DSL exported, run from their object file and PTX alone."""

from __future__ import annotations

import numpy as np
import pytest

from fa4.emulator import LaunchError, emulate, launch
from fa4.emulator.host.exported import Export, Exported

cutlass = pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
cute = pytest.importorskip("cutlass.cute")
runtime = pytest.importorskip("cutlass.cute.runtime")
host_kernels = pytest.importorskip("tests.emulator.host_kernels")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

N = 200


@pytest.fixture(scope="module")
def add(tmp_path_factory):
    """`host_kernels.add`, exported."""

    def fake():
        return runtime.make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(),), assumed_align=4)

    with emulate():
        compiled = cute.compile(
            host_kernels.add, fake(), fake(), fake(), options="--enable-tvm-ffi"
        )
    path = tmp_path_factory.mktemp("exported") / "add.o"
    compiled.export_to_c(str(path), "exported_add", export_only_tvm_ffi_symbols=True)
    return Export("exported_add", path.read_bytes(), compiled.artifacts.PTX, ("a", "b", "c"))


def operands():
    a, b = np.random.default_rng(0).standard_normal((2, N), np.float32)
    return a, b, np.zeros(N, np.float32)


def test_it_runs_like_the_function_it_came_from(add):
    a, b, c = operands()
    (report,) = launch(add, a, b, c)
    np.testing.assert_array_equal(c, a + b)
    assert not report.findings and isinstance(add, Exported)


def test_arguments_are_named_in_reports_of_stray_accesses(add):
    """The allocations carry the names of `parameters`; arguments beyond them a number."""
    seen = []
    a, b, c = operands()
    launch(add, a, b, c, executor=lambda group, memory, options: seen.extend(memory))
    assert [allocation.name for allocation in seen] == ["a", "b", "c"]
    short = Export(add.function_name, add.host_object, add.ptx, ("a",))
    seen.clear()
    launch(short, a, b, c, executor=lambda group, memory, options: seen.extend(memory))
    assert [allocation.name for allocation in seen] == ["a", "argument 1", "argument 2"]


def test_what_does_not_fit_is_refused(add):
    a, b, c = operands()
    with pytest.raises(LaunchError, match="exported_add refuses its arguments"):
        launch(add, a, b)
    with pytest.raises(LaunchError, match="float32"):
        launch(add, a, b.astype(np.float64), c)
    with emulate() as session, pytest.raises(LaunchError, match="no keyword arguments: c"):
        session.call(add, (a, b), {"c": c})
    with pytest.raises(LaunchError, match="no function '__tvm_ffi_other'"):
        launch(Export("other", add.host_object, add.ptx), a, b, c)
    other = add.ptx.replace("add_kernel", "bad_kernel")
    with pytest.raises(LaunchError, match=r"no kernel .* in the PTX"):
        launch(Export(add.function_name, add.host_object, other), a, b, c)
