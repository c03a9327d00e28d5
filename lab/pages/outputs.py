"""What the Python examples of the pages print: executed, compared, written.

Each ```python block of a page runs in a process of its own, in an empty folder. Where blocks go on
from lab import ROOT
from lab.pages import DOCS
from one another, the page says so, and they run in one process: "The Python blocks of this page
build on one another." What a block needs beside the required packages, the words before it name
("the extra `kernels`"), or those of the page ("The Python blocks of this page need the extra ...").

A block may be followed by an ```output block: exactly what it prints. `python -m lab.pages.outputs`
runs the examples of README.md and of all pages (or of those that are named) and writes their output
blocks; `tests/docs/test_examples.py` holds them to it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

from lab import ROOT
from lab.pages import DOCS

BLOCK = re.compile(
    r"^ *```python\n(?P<code>.*?)^ *```$(?:\n+```output\n(?P<output>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)
OF_THE_PAGE = re.compile(r"The Python blocks of this page\s([^.]*)\.")
STORY = "build on one another"
EXTRA = re.compile(r"\bextras?((?:(?:,|\s+and|\s+or)?\s+`\w+`)+)")
SECONDS = 280

# What the process of an example runs; its blocks come by stdin, what they print goes back.
RUNNER = """
import contextlib, io, json, sys, types

page, blocks = json.load(sys.stdin)
main = sys.modules["__main__"] = types.ModuleType("__main__")
outputs = []
for line, code in blocks:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("\\n" * line + code, page, "exec"), vars(main))
    outputs.append(printed.getvalue())
print(json.dumps(outputs))
"""


@dataclass(frozen=True)
class Example:
    """What runs in one process.

    blocks: (line, code) of each. shown: the output block of each, None where it has none. extras:
    of pyproject.toml, which its page names for it.
    """

    page: Path
    blocks: tuple[tuple[int, str], ...]
    shown: tuple[str | None, ...]
    extras: tuple[str, ...]

    def __str__(self) -> str:
        place = self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page.name
        return f"{place}:{self.blocks[0][0]}"

    def run(self, folder: Path, python: Path | None = None) -> tuple[str | None, ...]:
        """What each block with an output block prints, None for the others: `shown` if right.

        python: of an installation; by default this one, with this tree. Raises RuntimeError with
        what the process said, which points into the page.
        """
        environment = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"}
        if python is None:
            environment["PYTHONPATH"] = str(ROOT)
        done = subprocess.run(
            [str(python or sys.executable), "-W", "error", "-c", RUNNER],
            input=json.dumps([str(self.page), self.blocks]),
            cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS,
            check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{self}\n{done.stderr}")
        printed = json.loads(done.stdout.splitlines()[-1])
        return tuple(
            None if shown is None else text for text, shown in zip(printed, self.shown, strict=True)
        )


def documents() -> list[Path]:
    """README.md and the pages under docs/ that have Python examples."""
    every = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    return [path for path in every if BLOCK.search(path.read_text(encoding="utf-8"))]


def examples(page: Path) -> list[Example]:
    """A page's examples: its blocks one by one, or all in one if it says that it is a story."""
    text = page.read_text(encoding="utf-8")
    said = " ".join(" ".join(OF_THE_PAGE.findall(text)).split())
    blocks, shown, before, end = [], [], [], 0
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start("code"))
        blocks.append((line, dedent(block["code"])))
        shown.append(block["output"])
        before.append(text[end : block.start()])
        end = block.end()
    if STORY in said:
        return [Example(page, tuple(blocks), tuple(shown), extras("".join(before)))]
    return [
        Example(page, (block,), (output,), extras(said + words))
        for block, output, words in zip(blocks, shown, before, strict=True)
    ]


def extras(words: str) -> tuple[str, ...]:
    """The extras that a text names."""
    named = [name for found in EXTRA.findall(words) for name in re.findall(r"`(\w+)`", found)]
    return tuple(sorted(set(named)))


def run_page(page: Path) -> str:
    """The page with what its examples print now in its output blocks."""
    printed: list[str | None] = []
    for example in examples(page):
        with tempfile.TemporaryDirectory() as folder:
            printed += example.run(Path(folder))
    text = page.read_text(encoding="utf-8")
    pieces, end = [], 0
    for block, output in zip(BLOCK.finditer(text), printed, strict=True):
        if output is not None:
            pieces += [text[end : block.start("output")], output]
            end = block.end("output")
    return "".join([*pieces, text[end:]])


def main(arguments: Sequence[str]) -> None:
    """Write the output blocks of the pages that are named, or of all of them."""
    pages = [Path(name).resolve() for name in arguments] or documents()
    for page in pages:
        if "```output" in page.read_text(encoding="utf-8"):
            page.write_text(run_page(page), encoding="utf-8")
            print(f"wrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1:])
