"""Loads a host object file into the process, bound to a `HostRuntime`."""

from __future__ import annotations

import ctypes as C
import sys
from typing import Any

import llvmlite.binding as llvm

from fa4.emulator.elf import read_symbols
from fa4.emulator.errors import LaunchError
from fa4.emulator.host.runtime import I32, HostRuntime, P

# Defined by the linker itself.
_LINKER_SYMBOLS = {"_GLOBAL_OFFSET_TABLE_"}


class HostCode:
    """Machine code of one compiled host function. `close` unloads it.

    image: an ELF object for this machine. Raises LaunchError for symbols nobody provides.
    """

    def __init__(self, image: bytes, runtime: HostRuntime) -> None:
        symbols = read_symbols(image)
        self._defined = symbols.defined
        self._runtime = runtime
        undefined = symbols.undefined - _LINKER_SYMBOLS
        addresses = runtime.addresses(undefined)
        addresses |= _library_addresses(undefined - addresses.keys())
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self._jit = llvm.create_lljit_compiler(use_jit_link=True, suppress_errors=True)
        library = llvm.JITLibraryBuilder().add_object_img(image)
        for name, address in addresses.items():
            library.import_symbol(name, address)
        for name in self._defined:
            library.export_symbol(name)
        try:
            self._tracker = library.link(self._jit, "host")
        except BaseException:
            self._jit.close()
            raise

    def defines(self, name: str) -> bool:
        """Whether the code has a function of that name."""
        return name in self._defined

    def address(self, name: str) -> int:
        """Address of a defined function. Raises LaunchError if the code has none of that name."""
        if name not in self._defined:
            raise LaunchError(f"the host code has no function {name!r}")
        address: int = self._tracker[name]
        return address

    def call(self, name: str, *arguments: Any) -> int:
        """Calls a function that takes pointers and returns an int."""
        kinds = [I32 if isinstance(value, I32) else P for value in arguments]
        result: int = C.CFUNCTYPE(I32, *kinds)(self.address(name))(*arguments)
        return result

    def close(self) -> None:
        """Unloads the code; its functions must not run any more."""
        self._tracker.close()
        self._jit.close()
        self._runtime.close()


def _library_addresses(symbols: frozenset[str]) -> dict[str, int]:
    """Addresses in the C library and in TVM-FFI's."""
    libraries = [C.CDLL(None)]
    if any(name.startswith("TVMFFI") for name in symbols) and "tvm_ffi" in sys.modules:
        libraries.append(C.CDLL(sys.modules["tvm_ffi"].libinfo.find_libtvm_ffi()))
    found: dict[str, int] = {}
    for name in sorted(symbols):
        for library in libraries:
            if hasattr(library, name):
                address = C.cast(getattr(library, name), P).value
                assert address is not None
                found[name] = address
                break
        else:
            raise LaunchError(f"the host code calls {name}, which the emulator does not provide")
    return found
