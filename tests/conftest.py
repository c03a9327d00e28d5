"""Before NumPy is loaded: one BLAS thread per test process, since the processes fill the cores."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
