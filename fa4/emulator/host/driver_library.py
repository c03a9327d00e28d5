"""A libcuda.so.1 of the emulator's own, for programs that look for the driver by its name.

It holds no code but jumps through a table, which Python fills in while `emulate` is active; before
and after that every function answers that there is no driver. The library stays loaded, as the
programs keep what they found, so it is never made where a real driver is. A second one of the kind
is for those that look for the CUDA runtime among what is loaded.
"""

from __future__ import annotations

import ctypes as C
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from fa4.emulator.errors import LaunchError
from fa4.emulator.host.launches import P

NAME = "libcuda.so.1"
RUNTIME = "libcudart.so.fa4"  # no library of NVIDIA's has this name
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED, cudaErrorInitializationError
_JUMPS = {
    "x86_64": "jmp *fa4_table+{at}(%rip)",
    "aarch64": "adrp x16, fa4_table; add x16, x16, :lo12:fa4_table; ldr x16, [x16, {at}]; br x16",
}


class DriverLibrary:
    """One of the libraries, in this process. symbols: in the order of its table."""

    def __init__(self, path: Path, symbols: tuple[str, ...]) -> None:
        self._library = C.CDLL(str(path), mode=C.RTLD_GLOBAL)
        self._table = (P * len(symbols)).in_dll(self._library, "fa4_table")
        self._symbols = symbols
        # Not Python's: programs call it when the interpreter is gone, too.
        self._absent = self._library.fa4_absent
        self.set({})

    def set(self, callbacks: Mapping[str, Any]) -> None:
        """Functions without a callback say that there is no driver. The caller keeps callbacks."""
        for index, symbol in enumerate(self._symbols):
            self._table[index] = C.cast(callbacks.get(symbol, self._absent), P)


@lru_cache(maxsize=1)
def driver_libraries(symbols: tuple[str, ...]) -> list[DriverLibrary]:
    """Makes and loads both with these functions, once in a process.

    Raises LaunchError where there is a driver, or no compiler.
    """
    if sys.platform != "linux" or platform.machine() not in _JUMPS:
        raise LaunchError(f"programs that call the CUDA driver: not on {platform.machine()}")
    try:
        C.CDLL(NAME)
    except OSError:
        pass
    else:
        raise LaunchError(f"{NAME} is here: this front end can only be emulated without a driver")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise LaunchError("programs that call the CUDA driver need a C compiler: install gcc")
    made = []
    with tempfile.TemporaryDirectory(prefix="fa4-driver-") as folder:
        source = Path(folder) / "driver.c"
        source.write_text(_source(symbols), encoding="utf-8")
        for name in (NAME, RUNTIME):
            library = Path(folder) / name
            command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(library)]
            done = subprocess.run(
                [*command, str(source)], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise LaunchError(f"{compiler} cannot make {name}: {done.stderr.strip()}")
            made.append(DriverLibrary(library, symbols))
    return made


def _source(symbols: tuple[str, ...]) -> str:
    jump = _JUMPS[platform.machine()]
    entries = [
        f'asm(".text\\n.globl {symbol}\\n.type {symbol}, @function\\n'
        f'{symbol}: {jump.format(at=8 * at)}");'
        for at, symbol in enumerate(symbols)
    ]
    visible = '__attribute__((visibility("protected")))'
    head = [
        f"int fa4_absent(void) {{ return {_NOT_INITIALIZED}; }}",
        f"{visible} void *fa4_table[{len(symbols)}] = {{0}};",
    ]
    return "\n".join([*head, *entries]) + "\n"
