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
from fa4.call import checked  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
START, END = "<!-- way -->\n", "<!-- end -->"
MOST_FILES = 12
VOCABULARY = {"call/call.py", "call/options.py", "call/arrays.py", "config.py", "dtypes.py"}
# Where the computing begins: what a backend calls is not the way to it.
ENGINES = ("reference/", "oracle/", "emulator/", "plan/", "sm100/", "kit/")
# The rooms that a call passes, in this order; below the backends they stand side by side.
ROOMS = ("api.py", "call/", "backends/", ("compiled/", *ENGINES))


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


def room(name: str) -> int:
    """Number of a file's room, from the front; -1 for what all rooms share."""
    inside = (n for n, names in enumerate(ROOMS) if name.startswith(names))
    return -1 if name in VOCABULARY else next(inside, -1)


def climbs(call: Callable[[], Any]) -> set[tuple[str, str]]:
    """(caller, callee) of the calls from a room to one nearer to the front; files of fa4."""
    found, package = set(), f"{ROOT / 'fa4'}/"

    def note(frame: FrameType, event: str, _: Any) -> None:
        name, caller = frame.f_code.co_filename, frame.f_back
        if event != "call" or not name.startswith(package):
            return
        while caller is not None and not caller.f_code.co_filename.startswith(package):
            caller = caller.f_back
        if caller is not None:
            ends = caller.f_code.co_filename.removeprefix(package), name.removeprefix(package)
            if -1 < room(ends[1]) < room(ends[0]):
                found.add(ends)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


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


@pytest.mark.parametrize("impl", ["reference", "oracle", "emulator"])
def test_a_call_never_climbs(impl: str) -> None:
    """From the public function down: no room calls one nearer to the front."""
    if impl == "emulator":
        pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
    q = np.zeros((1, 4, 1, 16), np.float16)
    x = torch.zeros(1, 4, 1, 16, dtype=torch.float16, requires_grad=True)
    assert climbs(lambda: fa4.flash_attn_func(q, q, q, impl=impl)) == set()
    assert climbs(lambda: fa4.flash_attn_func(x, x, x, impl=impl).sum().backward()) == set()


def test_a_climb_is_found() -> None:
    """A backend that checks a call anew."""
    from fa4.backends import reference

    def above(*given: Any) -> Any:
        return checked.make_call(*given, {}, varlen=False)

    above.__code__ = above.__code__.replace(co_filename=reference.__file__)
    q = np.zeros((1, 4, 1, 16), np.float16)
    assert climbs(lambda: above(q, q, q)) == {("backends/reference.py", "call/checked.py")}


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
