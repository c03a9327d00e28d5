"""The Python examples in README.md and docs/ run as they stand and print what the page shows.

Each ```python block runs in a process of its own, in an empty folder; the blocks of a page that
says so in one (lab/pages/outputs.py). An ```output block behind one is what it prints. Blocks of
any other kind (console, py, text) are not executed. From an installed wheel, with nothing but the
extras that the page names: README's and a drawn one here, all of them in the slow tests.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from lab.pages.outputs import ROOT, Example, documents, examples, extras, run_page
from tests.drawn import draw_seed
from tests.installed import EXTRAS, build_wheel, make_environment, required_by

EXAMPLES = [example for page in documents() for example in examples(page)]
DRAWN = 1
STORY = "# Page\n\nThe Python blocks of this page build on one another.\n\n"


class Wheels:
    """Environments with the project's wheel and the packages of some extras, each made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wheel = build_wheel(folder)
        self.made: dict[tuple[str, ...], Path] = {}

    def python(self, names: tuple[str, ...]) -> Path:
        """The Python of the environment with these extras."""
        if names not in self.made:
            place = self.folder / "-".join(["venv", *names])
            self.made[names], _ = make_environment(
                place, self.wheel, required_by(self.wheel, names)
            )
        return self.made[names]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    return Wheels(tmp_path_factory.mktemp("wheels"))


def wrong(chosen: Iterable[Example], wheels: Wheels, folder: Path) -> list[str]:
    """Those that do not run from the wheel, or print something else."""
    found = []
    for number, example in enumerate(chosen):
        place = folder / str(number)
        place.mkdir()
        try:
            if example.run(place, wheels.python(example.extras)) != example.shown:
                found.append(f"{example} prints something else")
        except RuntimeError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_an_example_runs(example: Example, tmp_path: Path) -> None:
    """Nothing raises, nothing warns, outputs are those of the page. If not: python -m
    lab.pages.outputs."""
    assert example.run(tmp_path) == example.shown


@pytest.mark.timeout(600)
def test_the_readme_runs_from_a_wheel(wheels: Wheels, tmp_path: Path) -> None:
    """And an example that needs no extra, drawn anew in each run."""
    seed = draw_seed()
    plain = [e for e in EXAMPLES if not e.extras and len(e.blocks) == 1 and e.page != README]
    drawn = random.Random(seed).sample(plain, DRAWN)
    assert wrong([*examples(README), *drawn], wheels, tmp_path) == [], f"seed {seed}"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_an_example_runs_from_a_wheel(example: Example, wheels: Wheels, tmp_path: Path) -> None:
    """With the extras that its page names; without them it ends with the command that gets them."""
    assert wrong([example], wheels, tmp_path) == []
    if example.extras:
        (tmp_path / "without").mkdir()
        with pytest.raises(
            RuntimeError, match=r"pip install|No module named '(torch|transformers)"
        ):
            example.run(tmp_path / "without", wheels.python(()))


README = ROOT / "README.md"


def test_every_extra_that_is_named_exists() -> None:
    """README's examples name theirs, and so do others."""
    named = {name for example in EXAMPLES for name in example.extras}
    assert named <= set(EXTRAS) and len(named) > 2
    assert [example.extras for example in examples(README)] == [("verify",), (), ("kernels",)]


def write(folder: Path, text: str) -> Path:
    """A page with this text."""
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return page


TWO = "```python\nx = 1\n```\n\ntext\n\n```python\nassert x == 2\n```\n"


def test_a_wrong_example_fails(tmp_path: Path) -> None:
    """A planted fault in the second block is found, with its line; the first block ran."""
    (story,) = examples(write(tmp_path, STORY + TWO))
    with pytest.raises(RuntimeError, match=r'page\.md", line 12(.|\n)*AssertionError'):
        story.run(tmp_path)


def test_blocks_know_nothing_of_one_another(tmp_path: Path) -> None:
    """Neither names nor modules, unless the page says so: the planted fault is a missing import."""
    text = (
        "```python\nimport fa4.dtypes, json.tool\n```\n\n```python\nimport json\njson.tool\n```\n"
    )
    first, second = examples(write(tmp_path, text))
    assert first.run(tmp_path) == (None,)
    with pytest.raises(RuntimeError, match="has no attribute 'tool'"):
        second.run(tmp_path)
    (story,) = examples(write(tmp_path, STORY + text))
    assert story.run(tmp_path) == (None, None)


def test_a_block_that_reads_the_clone_is_found(wheels: Wheels, tmp_path: Path) -> None:
    """Planted: what a checkout has and a wheel has not, a file and a module."""
    text = "```python\nimport tests.installed\n```\n\n```python\nopen('README.md')\n```\n"
    chosen = examples(write(tmp_path, text))
    assert len(wrong(chosen, wheels, tmp_path)) == 2


def test_a_stale_output_is_mended(tmp_path: Path) -> None:
    """Another figure, an empty block; what stands around them is kept."""
    right = "# Page\n\n```python\nprint(1 + 1)\nprint()\n```\n\n```output\n2\n\n```\n\nend\n"
    for shown in ("2\n\n", "3\n\n", ""):
        assert run_page(write(tmp_path, right.replace("2\n\n", shown))) == right


def test_only_python_blocks_run(tmp_path: Path) -> None:
    """Shell blocks are left alone; a block inside a list item is dedented; names are shared."""
    page = write(
        tmp_path,
        STORY + "```console\nrm x\n```\n\n1. item\n\n   ```python\n   x = 1\n   ```\n\n"
        "```bash\nexit 1\n```\n\n```python\nprint(x + 1)\n```\n\n```output\n2\n```\n",
    )
    (story,) = examples(page)
    assert story.run(tmp_path) == story.shown == (None, "2\n")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("with the extra `viz`:", ("viz",)),
        ("extras `viz`, `test` and\n`kernels`", ("kernels", "test", "viz")),
        ("the extra is `viz`", ()),
    ],
)
def test_extras_are_read_from_the_words(words: str, named: tuple[str, ...], tmp_path: Path) -> None:
    """Of the words before a block, or of the sentence about the blocks of the page."""
    assert extras(words) == named
    text = f"{words}\n\n```python\n```\n\nno more\n\n```python\n```\n"
    assert [example.extras for example in examples(write(tmp_path, text))] == [named, ()]
    text = f"The Python blocks of this page need the extra `viz`.\n\n{text}"
    both = [set(example.extras) for example in examples(write(tmp_path, text))]
    assert both == [{"viz", *named}, {"viz"}]


def test_what_does_not_run_is_marked() -> None:
    """Every block of a page says what it is; code that is Python and not run is ```py."""
    marked = ["bash", "console", "cuda", "mermaid", "output", "sql", "text", "toml"]
    kinds = {"py", "python", *marked}
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        fences = [line for line in lines if line.startswith("```")]
        opened = {line[3:] for line in fences[::2]}
        assert {line for line in fences[1::2]} <= {"```"}, path
        assert {kind for kind in opened if not kind.startswith("{")} <= kinds, (path, opened)
