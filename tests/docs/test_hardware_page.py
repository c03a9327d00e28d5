"""hardware/README.md: the machines and result files that it names are those on record."""

from __future__ import annotations

import re
from pathlib import Path

from hardware import RESULTS

FOLDER = RESULTS.parent
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")


def unlike_the_records(page: str) -> list[str]:
    """Rows of the table whose result file names no such GPU, and result files without a row;
    a table of numbers goes with the JSON file of its name."""
    rows = re.findall(r"^\| `[^|]*\|[^|]*\| ([^|]+) \| `(results/[^`]+)` \|$", page, re.MULTILINE)
    wrong = [name for gpu, name in rows if gpu not in (FOLDER / name).read_text(encoding="utf-8")]
    listed = [FOLDER / name for _, name in rows]
    files = {path for path in RESULTS.iterdir() if path.with_suffix(".json") not in listed}
    return wrong + sorted(path.name for path in files if path not in listed)


def test_machines_and_result_files_are_those_on_record() -> None:
    """Every result file has its row; another GPU, or a row left out, would be seen."""
    assert unlike_the_records(PAGE) == []
    assert unlike_the_records(PAGE.replace("NVIDIA H100", "NVIDIA B200", 1)) != []
    assert unlike_the_records(re.sub(r"(?m)^.*results/h200_exp2.*\n", "", PAGE)) != []


def test_the_files_it_names_exist() -> None:
    """Suites, scripts and modules of the commands."""
    named = set(re.findall(r"`([a-z0-9_]+(?:\.py|/(?:\w+\.py)?))`", PAGE))
    named = {f"hardware/{name}" for name in named if name != "benchmarks/"}
    named |= set(re.findall(r"\b(?:hardware|docs|fa4)/[\w/]+\.(?:py|md)\b", PAGE))
    named |= {f"{name.replace('.', '/')}.py" for name in re.findall(r"-m ([\w.]+)", PAGE)}
    root = Path(FOLDER.parent)
    assert len(named) > 10
    assert [name for name in sorted(named) if not (root / name).exists()] == []
