"""Before NumPy is loaded: one BLAS thread per test process, since the processes fill the cores.

One profile of Hypothesis for all tests: how long an example takes says how busy the machine is, and
fails no test. What is drawn is new in every run; with CI set in the environment Hypothesis draws
the same for the same test, so that a change is judged by itself.

What the emulator compiles is kept for the other processes and the next run: in tests of kernels it
took a quarter of the time.

What collecting the tests makes, a million objects, stays until the end: Python's collector begins
behind it. It took a third of the time of collecting, 6.7 of 18 CPU seconds in each process.
"""

import gc
import os
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault(
    "FA4_EMULATOR_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "fa4-machine-code")
)
# pytest-xdist sets it in its workers; what is printed to a pipe must not depend on that.
os.environ.pop("COLUMNS", None)

import pytest
from hypothesis import HealthCheck, settings  # it may load NumPy

settings.register_profile("fa4", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fa4")

gc.disable()


@pytest.hookimpl(tryfirst=True)  # a worker of xdist has a loop of its own
def pytest_runtestloop() -> None:
    """All tests are collected."""
    gc.freeze()
    gc.enable()
