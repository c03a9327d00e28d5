"""docs/findings/index.md: faults of other libraries, each as a script and what it prints.

`python3 -m lab.hardware.run_findings` runs the scripts on a GPU; `python -m
lab.pages.findings_tables` writes them and what they printed into the page.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from lab.hardware.run_findings import SCRIPTS
from lab.pages.marked_tables import MarkedTables
from lab.records import read_record

PAGE = SCRIPTS / "index.md"


def record() -> dict[str, Any]:
    """What the scripts printed, and where."""
    found: dict[str, Any] = read_record("findings")
    return found


def printed(result: dict[str, Any]) -> str:
    """The output; of a script that ended in an error of CUDA, its name."""
    text = "\n".join(result["lines"])
    if result["code"] == 0:
        return text
    error = re.search(r"cudaError\w+", text)
    return f"ends with {error.group() if error else text}"


def render(path: Path, result: dict[str, Any]) -> str:
    """One finding: what is wrong, the script, its output."""
    source = path.read_text(encoding="utf-8")
    what, _, more = (ast.get_docstring(ast.parse(source)) or "").partition("\n")
    code = source.split('"""', 2)[2].strip()
    title = what.rstrip(".").replace("`", "")
    return "\n\n".join(
        [f"## {title}", *([more.strip()] if more.strip() else []), f"```py\n{code}\n```",
         f"```text\n{printed(result)}\n```"]
    )  # fmt: skip


def render_all() -> str:
    """Machine and versions, then each finding; of a script that was not run there, nothing."""
    found = record()
    packages = found["gpu_packages"]
    cudnn = f"{found['cudnn'] // 10000}.{found['cudnn'] // 100 % 100}"
    where = (
        f"{found['gpu']}, torch {found['torch']}, cuDNN {cudnn}, flash-attn-4 "
        f"{packages['flash-attn-4']} with nvidia-cutlass-dsl {packages['nvidia-cutlass-dsl']}."
    )
    paths = [p for p in sorted(SCRIPTS.glob("*.py")) if p.stem in found["results"]]
    return "\n\n".join([where, *(render(p, found["results"][p.stem]) for p in paths)])


TABLES = MarkedTables("python -m lab.pages.findings_tables", {"findings": render_all})


if __name__ == "__main__":
    TABLES.write(PAGE)
