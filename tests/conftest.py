"""Before NumPy is loaded: one BLAS thread per test process, since the processes fill the cores."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# pytest-xdist sets it in its workers; what is printed to a pipe must not depend on that.
os.environ.pop("COLUMNS", None)
