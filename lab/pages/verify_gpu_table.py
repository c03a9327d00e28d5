"""The table of docs/verify.md of kernels on a GPU, from their record.

`python -m lab.pages.verify_gpu_table` writes it between its markers; a test of the pages compares.
"""

from __future__ import annotations

from lab.hardware import verify_gpu
from lab.pages import DOCS
from lab.pages.marked_tables import MarkedTables
from lab.records import read_record

PAGE = DOCS / "verify.md"
TABLES = MarkedTables(
    "python -m lab.pages.verify_gpu_table",
    {"gpu": lambda: verify_gpu.table(read_record("verify_gpu")["backends"])},
)

if __name__ == "__main__":
    TABLES.write(PAGE)
