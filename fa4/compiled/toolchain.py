"""Which CuTe-DSL compiles: its version, its CUDA flavour, and choosing between two of them.

The compiler is a shared library that comes in two flavours, built with CUDA 12 and with CUDA 13
(packages nvidia-cutlass-dsl-libs-cu12 and -cu13). They write the same PTX; their ptxas differ, and
the newer one makes better code for CTA pairs. Both may be installed side by side: one process can
use one. Everything here works without importing cutlass, which takes half a second.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path

PACKAGE = "nvidia-cutlass-dsl"
FLAVOURS = ("cu13", "cu12")  # in order of preference
MISSING = (
    f"CuTe-DSL is not installed, and compiling needs it: pip install {PACKAGE} "
    f"{PACKAGE}-libs-cu13 cuda-python apache-tvm-ffi"
)

_MODULE = "cutlass._mlir._mlir_libs._cutlass_ir"  # the compiler, as Python knows it
_RUNTIME = "libcute_dsl_runtime.so"


@dataclass(frozen=True)
class Toolchain:
    """One installed compiler. fingerprint: SHA-256 of its shared library, as its package says."""

    version: str
    flavour: str
    fingerprint: str
    library: Path
    runtime: Path

    @property
    def label(self) -> str:
        """For people: "CuTe-DSL 4.8.1, CUDA 13 flavour"."""
        return f"CuTe-DSL {self.version}, CUDA {self.flavour.removeprefix('cu')} flavour"


def find_toolchain() -> Toolchain:
    """The compiler that this process uses or would use: the one loaded, else the preferred one.

    The preferred one is the newest that is installed and that the driver supports, as in CuTe-DSL
    itself. Raises ImportError if there is none.
    """
    installed = installed_toolchains()
    loaded = loaded_flavour()
    if loaded in installed:
        return installed[loaded]
    driver = driver_major()
    for flavour, toolchain in installed.items():
        if driver is None or driver >= int(flavour.removeprefix("cu")):
            return toolchain
    if installed:
        raise ImportError(
            f"the driver supports CUDA {driver} and no flavour of {PACKAGE} that is installed "
            f"({', '.join(installed)}): pip install {PACKAGE}-libs-cu{driver}"
        )
    raise ImportError(MISSING)


def select_flavour(flavour: str) -> Toolchain:
    """Makes this process compile with a flavour, "cu12" or "cu13", before cutlass is imported.

    Raises ValueError if there is no such flavour or another one is loaded already, ImportError if
    it is not installed.
    """
    if flavour not in FLAVOURS:
        raise ValueError(f"flavour must be one of {', '.join(FLAVOURS)}; got {flavour!r}")
    installed = installed_toolchains()
    if not installed:
        raise ImportError(MISSING)
    if flavour not in installed:
        raise ImportError(
            f"the {flavour} flavour of the compiler is not installed, {', '.join(installed)} is: "
            f"pip install {PACKAGE}-libs-{flavour}=={next(iter(installed.values())).version}"
        )
    loaded = loaded_flavour()
    if loaded is not None and loaded != flavour:
        raise ValueError(
            f"this process compiles with {loaded} already; start a new one for {flavour}"
        )
    if loaded is None:
        _load(installed[flavour])
    return installed[flavour]


@lru_cache(maxsize=1)
def installed_toolchains() -> dict[str, Toolchain]:
    """The flavours that are installed and complete, the preferred one first."""
    root = _package_folder()
    if root is None:
        return {}
    folder = root / "dsl_packages" / "cutlass" / "_mlir" / "_mlir_libs"
    found = {}
    for flavour in FLAVOURS:
        library = next(folder.glob(f"_cutlass_ir.{flavour}.*.so"), None)
        runtime = root / flavour / "lib" / _RUNTIME
        if library is not None and runtime.exists():
            version = metadata.version(PACKAGE)
            fingerprint = _fingerprint(folder / f"_cutlass_ir_version_{flavour}.py", library)
            found[flavour] = Toolchain(version, flavour, fingerprint, library, runtime)
    return found


def loaded_flavour() -> str | None:
    """The flavour that this process has loaded; None if cutlass was not imported yet."""
    path = getattr(sys.modules.get(_MODULE), "__file__", None) or ""
    match = re.search(r"_cutlass_ir\.(cu\d+)\.", path)
    return match[1] if match else None


@lru_cache(maxsize=1)
def driver_major() -> int | None:
    """The CUDA version that the driver supports, such as 13; None without a driver."""
    version = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value // 1000


def _package_folder() -> Path | None:
    """nvidia_cutlass_dsl's folder, found without running any of its code."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _fingerprint(version_file: Path, library: Path) -> str:
    """The hash that the package gives; without it, what tells one file from another cheaply."""
    try:
        match = re.search(r'"([0-9a-f]{64})"', version_file.read_text(encoding="utf-8"))
    except OSError:
        match = None
    if match:
        return match[1]
    status = library.stat()
    return f"{status.st_size}-{status.st_mtime_ns}"


def _load(toolchain: Toolchain) -> None:
    """Loads this flavour's library under the name that cutlass looks for first."""
    spec = importlib.util.spec_from_file_location(_MODULE, toolchain.library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module
    try:
        spec.loader.exec_module(module)
        parent = importlib.import_module(_MODULE.rpartition(".")[0])
    except BaseException:
        sys.modules.pop(_MODULE, None)
        raise
    parent._cutlass_ir = module  # type: ignore[attr-defined]
