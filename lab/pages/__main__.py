"""Writes what the pages show of the code and the records anew: tables, outputs, numbers.

python -m lab.pages [NAME ...]      all of them, or those named: python -m lab.pages claims
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

APART = {
    "check_site": "reads the site",
    "explorer_picture": "needs a browser: make picture",
    "report_picture": "needs a browser: make picture",
}
PROGRAM = re.compile(r'^if __name__ == "__main__":$', re.MULTILINE)


def writers(folder: Path = Path(__file__).parent) -> list[str]:
    """Names of the programs of a folder that write into pages."""
    return [
        path.stem
        for path in sorted(folder.glob("*.py"))
        if path.name != Path(__file__).name
        and path.stem not in APART
        and PROGRAM.search(path.read_text("utf-8"))
    ]


def main(names: Sequence[str]) -> None:
    """Run those of these names; all, if none is given."""
    known = writers()
    if unknown := sorted(set(names).difference(known)):
        sys.exit(f"no program {unknown[0]!r} in lab/pages; there are {', '.join(known)}")
    for name in names or known:
        print(f"python -m lab.pages.{name}", flush=True)
        sys.argv[1:] = []
        runpy.run_module(f"lab.pages.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
