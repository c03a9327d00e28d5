"""What was confirmed on hardware: programs that run on a GPU, and the results they gave.

README.md lists the suites. They need the project's folder on the path, and the makers and judges
the package; what runs on the GPU needs what its own text says.
"""

from pathlib import Path

RESULTS = Path(__file__).parent / "results"
