"""Settings under which this machine computes as another CPU does, one a line, no blanks.

    env $(python -m tests.other_cpu) python -m pytest tests/reference

OpenBLAS sums in the order of another core type, with another number of threads, and NumPy's own
loops do without the widest vectors: results differ in their last digits, and nothing may depend on
those.
"""

from __future__ import annotations

import numpy as np
from threadpoolctl import threadpool_info

# What runs on nearly every x86-64 machine, the widest first.
CORE_TYPES = ("Haswell", "Sandybridge")


def other_settings() -> dict[str, str]:
    """Environment variables of another CPU; none where NumPy has no OpenBLAS."""
    blas = next((x for x in threadpool_info() if x["internal_api"] == "openblas"), None)
    if blas is None:
        return {}
    core = next(name for name in CORE_TYPES if name != blas["architecture"])
    threads = 1 if blas["num_threads"] > 1 else 2
    settings = {"OPENBLAS_CORETYPE": core, "OPENBLAS_NUM_THREADS": str(threads)}
    wide = ",".join(wide_vectors())
    return settings | ({"NPY_DISABLE_CPU_FEATURES": wide} if wide else {})


def wide_vectors() -> list[str]:
    """The instruction sets of this CPU that NumPy was compiled for, beyond its baseline."""
    described = np.show_config(mode="dicts")
    assert described is not None
    return [str(name) for name in described["SIMD Extensions"]["found"]]


if __name__ == "__main__":
    for name, value in other_settings().items():
        print(f"{name}={value}")
