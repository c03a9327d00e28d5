"""Numbers of sentences are those of the code and of the records; `make pages` writes them anew."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from lab.pages.__main__ import APART, writers
from lab.pages.claims import CLAIMS, ROOT, pages
from lab.pages.marked_tables import NUMBER, SIGN, TABLE, sentences
from lab.pages.recorded_claims import RECORDED
from lab.table import BY_NAME

TEXTS = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in pages()}
MARKED = [name for name, text in TEXTS.items() if SIGN in text]
DATED = "docs/notes/"  # dated, and not rewritten
# In a sentence on throughput: a number of three digits and more that is no size of the call.
BARE = re.compile(
    r"(?<![\w.,-])(?<!dim )(?<!batch )\d[\d,]{2,}(?:\.\d+)?(?![\w%])"
    r"(?! (?:tokens|keys|rows|columns|queries|heads|calls|W\b|cycles|MHz))|\d (?=TFLOP/s)"
)


def untied(text: str) -> list[str]:
    """Sentences, items and rows of a document with a figure in TFLOP/s that no claim makes; lines
    of its blocks with one that no test runs."""
    parts = re.split(r"\n\s*\n|\n(?=\s*[-*|] )|(?<=[.;])\s", sentences(text))
    spoken = [NUMBER.sub("#", re.sub(r"`[^`]*`", "", " ".join(part.split()))) for part in parts]
    found = [part for part in spoken if "TFLOP/s" in part and BARE.search(part)]
    for block in re.findall(r"^ *```(?:text|console|bash|py)\n(.*?)^ *```", text, re.S | re.M):
        found += re.findall(r".*\d TFLOP/s.*", block)
    return found


@pytest.mark.parametrize("name", MARKED)
def test_numbers_are_up_to_date(name: str) -> None:
    """If not: python -m lab.pages.claims, and read the sentence again."""
    assert list(CLAIMS.stale(TEXTS[name])) == []


@pytest.mark.parametrize("name", MARKED)
def test_a_wrong_number_is_found_and_mended(name: str) -> None:
    """Planted: one digit of each of a page's numbers in turn."""
    text = TEXTS[name]
    for match in NUMBER.finditer(text):
        digit = str((int(match["number"].rstrip("%")[-1]) + 1) % 10)
        place = match.end() - match["number"].endswith("%")
        wrong = text[: place - 1] + digit + text[place:]
        assert [line.startswith(match["name"]) for line in CLAIMS.stale(wrong)] == [True]
        assert CLAIMS.fill(wrong) == text


def test_a_marker_must_name_a_claim_and_have_a_number() -> None:
    """A name that is no claim, a space or a word in between, no word before it."""
    with pytest.raises(ValueError, match="no claim 'headlin'"):
        CLAIMS.fill("is <!--=headlin-->1573")
    for text in ("<!--=headline TFLOP/s--> 1573", "<!--=headline TFLOP/s-->many", "<!--=-->1"):
        with pytest.raises(ValueError, match="no number behind"):
            list(CLAIMS.stale(f"is {text}"))
    with pytest.raises(ValueError, match=r"headline TFLOP/s is \d+; the document has 1573%"):
        CLAIMS.fill("is <!--=headline TFLOP/s-->1573%")
    for before in ("", "text\n", "- ", "text\n  ", "> "):
        with pytest.raises(ValueError, match=r"a line must not begin with '[- >]*<!--=headline"):
            CLAIMS.fill(f"{before}<!--=headline TFLOP/s-->1573")


def test_every_claim_is_made_somewhere() -> None:
    """What no sentence says any more is taken out of the table."""
    said = {match["name"] for text in TEXTS.values() for match in NUMBER.finditer(text)}
    assert sorted(set(CLAIMS.claims) - said) == []


def test_a_records_number_carries_its_name() -> None:
    """Before the colon; there is such a file, and nothing computed looks like it."""
    for name in CLAIMS.claims:
        record, colon, _ = name.partition(": ")
        assert (name in RECORDED) == bool(colon), name
        if colon:
            table = ROOT / "fa4" / "measured" / f"{record}.csv"
            assert record in BY_NAME or table.exists(), name


def test_no_sentence_has_a_figure_of_its_own() -> None:
    """In TFLOP/s: each is a claim, printed by a program, or in a table that a command writes."""
    current = {name: text for name, text in TEXTS.items() if not name.startswith(DATED)}
    assert {name: untied(text) for name, text in current.items() if untied(text)} == {}


@pytest.mark.parametrize(
    "sentence",
    [
        "It reaches 1605 TFLOP/s.",
        "Tiles of 64 keys make 246 to <!--=headline TFLOP/s-->292 TFLOP/s\nwith 512 tokens.",
        "- one\n- <!--=headline TFLOP/s-->1573 and 1653 TFLOP/s.",
        "On a B200 1,605 TFLOP/s, it says.",
        "TFLOP/s of this call: 1605.",
        "```text\nall of it 1653 TFLOP/s\n```",
        "| a | 1605 TFLOP/s |",
    ],
)
def test_a_figure_that_nothing_holds_is_found(sentence: str) -> None:
    """Planted: at the end of a page that had none, and between two tables of another."""
    page = TEXTS["docs/ladder/07-tensor-memory.md"]
    assert untied(page) == [] and untied(f"{page}\n{sentence}\n") != []
    page, end = TEXTS["docs/simulator.md"], "<!-- end of choices -->\n"
    assert untied(page) == [] and untied(page.replace(end, f"{end}\n{sentence}\n")) != []


@pytest.mark.parametrize(
    "sentence",
    ["It reaches <!--=headline TFLOP/s-->1573 TFLOP/s.", "```output\n1605 TFLOP/s\n```",
     "TFLOP/s on a B200, 16 heads, batch 1.", "`fa4 predict` prints TFLOP/s of 512 tokens' shape."
     .replace("512 tokens' shape", "a call")],
)  # fmt: skip
def test_what_is_tied_is_left_alone(sentence: str) -> None:
    """A claim, an output block, a unit without a figure."""
    assert untied(sentence) == []


def test_make_pages_runs_every_program_that_writes(tmp_path: Path) -> None:
    """Those that pages name, and a planted one; pictures of measurements too."""
    command = ["make", "--no-print-directory", "-n", "pages"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.search(r"python -m lab\.pages$", done, re.MULTILINE)
    assert "fa4 figures " in done and "docs/pictures/hopper.svg" in done
    marked = {match["command"] for text in TEXTS.values() for match in TABLE.finditer(text)}
    assert marked <= {f"python -m lab.pages.{name}" for name in writers()} and len(marked) > 5
    assert {"claims", "outputs", "picture"} <= set(writers()) and not APART.keys() & set(writers())
    (tmp_path / "planted.py").write_text('if __name__ == "__main__":\n    pass\n')
    (tmp_path / "part.py").write_text("TABLES = ()\n")
    assert writers(tmp_path) == ["planted"]
