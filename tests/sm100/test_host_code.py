"""What `fa4.compiled.host_code` makes of a compiled kernel beside its PTX and cubin."""

from typing import Any

import pytest

pytest.importorskip("cutlass")

from cutlass._mlir import ir
from cutlass.cutlass_dsl import CuTeDSL

from fa4.compiled.backward import compile_backward
from fa4.compiled.host_code import export_host, host_function
from fa4.emulator.elf import read_symbols
from fa4.inspect.codegen import launch_smem_bytes
from fa4.sm100.backward.spec import BackwardSpec

SPEC = BackwardSpec(head_dim=64, head_dim_v=64)


@pytest.fixture(scope="module")
def compiled() -> Any:
    """A backward pass: three kernels in a module."""
    return compile_backward(SPEC)


def test_one_function_tells_what_the_module_tells_of_launches(compiled: Any) -> None:
    """The text of the function alone, which is an eighth of the module's, has every launch."""
    module, function = str(compiled.ir_module), host_function(compiled)
    assert launch_smem_bytes(function) == launch_smem_bytes(module)
    assert len(launch_smem_bytes(function)) == 3
    assert len(function) < len(module) / 4


def test_the_object_file_exports_one_symbol(compiled: Any) -> None:
    """So that several can be loaded side by side; CuTe-DSL's own are hidden."""
    image = export_host(compiled, "some_name")
    assert read_symbols(image).defined == {"__tvm_ffi_some_name"}


def test_modules_are_not_printed_while_kernels_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuTe-DSL prints one at each kernel; compiling leaves that as it was, also by an error."""
    printed = []
    dsl = CuTeDSL._get_dsl()
    enter = CuTeDSL._enter_gpu_module

    def counted(self: Any) -> ir.InsertionPoint:
        printed.append(self.name)
        return enter(self)

    monkeypatch.setattr(type(dsl), "_enter_gpu_module", counted)
    compile_backward(SPEC)
    assert not printed
    assert "_enter_gpu_module" not in vars(dsl)
    with pytest.raises(Exception, match="sm_1"):
        compile_backward(SPEC, "sm_1")
    assert "_enter_gpu_module" not in vars(dsl)
