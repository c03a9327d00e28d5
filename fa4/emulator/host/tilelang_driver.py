"""TileLang in the emulator: its kernels are compiled to PTX, its host code calls a driver of ours.

TileLang compiles with nvcc, which needs no GPU, and launches through the driver's functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from fa4.emulator.host.arguments import aside, is_array
from fa4.emulator.host.dlpack import DeviceView
from fa4.emulator.host.driver import EmulatedDriverCalls
from fa4.emulator.host.patches import Replacements, replaced


@contextlib.contextmanager
def redirected(target: Any) -> Iterator[None]:
    """TileLang's launches go to `target` (a `Session`); undone at the end."""
    driver = EmulatedDriverCalls()
    with contextlib.ExitStack() as stack:
        stack.enter_context(driver.active())
        for owner, name, value in (*_compilation(), *_calls(target, driver)):
            stack.enter_context(replaced(owner, name, value))
        yield


def _compilation() -> Replacements:
    """Kernels become PTX and are not kept for programs that run on a GPU."""
    import tilelang
    from tilelang.cache.cuda_binary_cache import CUDABinaryCache
    from tilelang.contrib import nvcc

    compile_cuda = nvcc.compile_cuda

    def compile_to_ptx(code: str, form: str = "ptx", *rest: Any, **keywords: Any) -> Any:
        return compile_cuda(code, "ptx", *rest, **keywords)

    yield nvcc, "compile_cuda", compile_to_ptx
    yield CUDABinaryCache, "load", staticmethod(lambda *_, **__: None)
    yield CUDABinaryCache, "save", staticmethod(lambda *_, **__: None)
    yield type(tilelang.env), "is_cache_enabled", lambda self: False


def _calls(target: Any, driver: EmulatedDriverCalls) -> Replacements:
    """Compiled functions get CPU tensors as a GPU's, and their launches run after the host code."""
    from tilelang import tvm
    from tilelang.jit.adapter.tvm_ffi import TVMFFIKernelAdapter

    get_executable = TVMFFIKernelAdapter._get_executable

    def _get_executable(self: Any) -> Any:
        executable = get_executable(self)

        def call(*values: Any) -> Any:
            with aside():
                memory = {f"argument {i}": x for i, x in enumerate(values) if is_array(x)}
                for tensor in memory.values():
                    target.tensors.note(tensor, tensor)
                views = [_on_gpu(tvm, target, value) for value in values]
                try:
                    result = executable(*views)
                finally:
                    launches = driver.take_launches()
                target.run_launches(launches, memory)
                return result

        return call

    yield TVMFFIKernelAdapter, "_get_executable", _get_executable


def _on_gpu(tvm: Any, target: Any, value: Any) -> Any:
    if not is_array(value):
        return value
    return tvm.runtime.from_dlpack(DeviceView(value, shift=target.tensors.shift_of(value)))
