"""docs/architecture.md: the files of a call are those that Python passes, and they are few.

Written anew by `python -m tests.docs.test_architecture_page`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import fa4  # noqa: E402
from fa4 import checked  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
START, END = "<!-- way -->\n", "<!-- end -->"
MOST_FILES = 12
VOCABULARY = {"call.py", "arrays.py", "config.py", "dtypes.py"}
# Where the computing begins: what a backend calls is not the way to it.
ENGINES = ("reference/", "oracle/", "emulator/", "plan/", "sm100/")


def way(call: Callable[[], Any]) -> list[str]:
    """Files of fa4 whose functions run for a call of a known form, up to the engines."""
    call()
    checked._known.clear()  # else a call in torch that is written alike takes a shorter way
    seen: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(f"{ROOT / 'fa4'}/"):
            seen[Path(frame.f_code.co_filename).relative_to(ROOT / "fa4").as_posix()] = None

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [name for name in seen if name not in VOCABULARY and not name.startswith(ENGINES)]


def ways() -> dict[str, tuple[list[str], list[str]]]:
    """Implementation -> files for arrays, files for tensors that need gradients."""
    arrays = [np.zeros((1, 4, 1, 16), np.float16)] * 3
    tensors = [torch.zeros(1, 4, 1, 16, dtype=torch.float16, requires_grad=True)] * 3
    found = {}
    for impl in ("reference", "oracle", "emulator"):
        by_kind = [
            way(lambda x=x, impl=impl: fa4.flash_attn_func(*x, impl=impl))  # type: ignore[misc]
            for x in (arrays, tensors)
        ]
        found[impl] = (by_kind[0], by_kind[1])
    return found


def table() -> str:
    """The rows of the page."""
    lines = ["| implementation | arrays | torch tensors with gradients |", "|---|---|---|"]
    for impl, kinds in ways().items():
        cells = [f"{len(files)}: " + ", ".join(f"`{name}`" for name in files) for files in kinds]
        lines.append(f"| {impl} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n"


def test_the_way_of_a_call() -> None:
    """As written, and at most twelve files."""
    pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
    text = PAGE.read_text(encoding="utf-8")
    assert text[text.index(START) + len(START) : text.index(END)] == table()
    for kinds in ways().values():
        assert all(len(files) <= MOST_FILES for files in kinds)


def test_what_the_page_names_exists() -> None:
    """Every file and folder in backquotes or in the figure."""
    text = PAGE.read_text(encoding="utf-8")
    names = set(re.findall(r"(?<![\w./])fa4/[\w/.]*\w", text))
    assert len(names) > 10
    assert [name for name in sorted(names) if not (ROOT / name).exists()] == []


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    before, after = page[: page.index(START) + len(START)], page[page.index(END) :]
    PAGE.write_text(before + table() + after, encoding="utf-8")
