"""Loads a kernel's host code into this process, bound to the CUDA runtime that CuTe-DSL ships.

The linker is llvmlite's, which numba brings along: no C compiler and none of MLIR is needed. The
symbols come from libcute_dsl_runtime (which reaches the driver), from TVM-FFI and from libc.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from fa4.compiled.toolchain import MISSING, find_toolchain
from fa4.emulator.elf import read_symbols

_PREFIX = "__tvm_ffi_"  # of functions with TVM-FFI's calling convention
_LINKER_SYMBOLS = {"_GLOBAL_OFFSET_TABLE_"}  # defined by the linker itself


def load_function(image: bytes, name: str) -> Callable[..., None]:
    """The function `name` of an exported host object, as TVM-FFI calls it.

    Raises ImportError or OSError if a library is missing.
    """
    try:
        import tvm_ffi
    except ImportError:
        raise ImportError(MISSING) from None
    paths = (str(find_toolchain().runtime), tvm_ffi.libinfo.find_libtvm_ffi())
    code = _LinkedCode(image, [ctypes.CDLL(None), *map(ctypes.CDLL, paths)], _PREFIX + name)
    function: Callable[..., None] = tvm_ffi.Function.__from_extern_c__(
        code.address, keep_alive_object=code
    )
    return function


class _LinkedCode:
    """Linked code and what keeps it alive. address: of its function `name`."""

    def __init__(self, image: bytes, libraries: Sequence[ctypes.CDLL], name: str) -> None:
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        builder = llvm.JITLibraryBuilder().add_object_img(image).export_symbol(name)
        for symbol in sorted(read_symbols(image).undefined - _LINKER_SYMBOLS):
            builder.import_symbol(symbol, _find(symbol, libraries))
        self._libraries = libraries
        self._jit = llvm.create_lljit_compiler(use_jit_link=True, suppress_errors=True)
        self._tracker = builder.link(self._jit, "host")
        self.address: int = self._tracker[name]


def _find(symbol: str, libraries: Sequence[ctypes.CDLL]) -> int:
    for library in libraries:
        if hasattr(library, symbol):
            address = ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value
            assert address is not None
            return address
    raise OSError(f"the host code needs {symbol}, which no installed library has: update "
                  "nvidia-cutlass-dsl and apache-tvm-ffi together")  # fmt: skip
