"""What measures and confirms: hardware, benchmarks, what writes pages, and the records of it all.

The records and who imports whom need the standard library alone. Nothing here is part of the
package; programs run in the project's folder, as `python -m lab.benchmarks.sim`.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
