"""The one place that asks CuTe-DSL to compile, and to export what it made."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cutlass import cute
from cutlass._mlir import ir
from cutlass.base_dsl.compiler import DumpDir
from cutlass.cute.runtime import make_fake_stream
from cutlass.cutlass_dsl import CuTeDSL, tvm_ffi_provider

from fa4.plan import require_sound


def compile_host(
    host: Any, arguments: Sequence[Any], spec: Any, arch: str, trace: list[Any] | None
) -> Any:
    """What `cute.compile` returns for a host function, with PTX and cubin in `.artifacts`.

    arguments: all but the stream, the spec and the trace. What is returned is not called but
    exported (`compile_artifact`), which compiles the host code: on a GPU of this architecture
    CuTe-DSL would do that here, too, twice. Raises ValueError, naming the rule, for a plan that
    `check_plan` refuses.
    """
    require_sound(spec.plan, spec.gpu)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    with tempfile.TemporaryDirectory() as folder:
        options = (
            cute.EnableTVMFFI(True),
            cute.KeepPTX(True),
            cute.KeepCUBIN(True),
            cute.GPUArch(arch),
            DumpDir(folder),
        )
        steps = [] if trace is None else trace
        with _modules_not_printed():
            return cute.compile[options](host, *arguments, stream, spec, steps, no_jit_engine=True)


def host_function(compiled: Any) -> str:
    """MLIR text of the function that launches the kernels; the module's text has the cubin, too."""
    for operation in compiled.ir_module.body.operations:
        found = operation.attributes
        if "sym_name" in found and found["sym_name"].value == compiled.function_name:
            return str(operation)
    raise ValueError(f"the module has no function {compiled.function_name}")


def export_host(compiled: Any, function: str) -> bytes:
    """The host code as an object file whose only symbol is that of TVM-FFI's `function`.

    What `export_to_c` does with a copy of the module by way of its text is done to the module here:
    nobody needs it any more.
    """
    module, provider = compiled.ir_module, tvm_ffi_provider
    provider.rename_tvm_ffi_function(module, compiled.function_name, function)
    provider._inplace_hide_symbols(module, lambda name: not name.startswith("__tvm_ffi"))
    code: bytes = provider._aot_support.export_module_to_bytes(
        module, format="o", opt_level=3, enable_pic=True
    )
    return code


@contextmanager
def _modules_not_printed() -> Iterator[None]:
    """At every kernel CuTe-DSL prints all those before it, for a log, also where it keeps none."""
    dsl = CuTeDSL._get_dsl()

    def enter() -> Any:
        return ir.InsertionPoint(dsl.gpu_module.bodyRegion.blocks[0])

    dsl._enter_gpu_module = enter
    try:
        yield
    finally:
        del dsl._enter_gpu_module
