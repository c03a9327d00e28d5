"""The figures that the pages show: the command that they name still makes them; they are small."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from threadpoolctl import threadpool_limits

from fa4.demo.minilm import find_model
from fa4.figures.catalogue import FIGURES

DOCS = Path(__file__).resolve().parents[2] / "docs"
PICTURES = DOCS / "pictures"
MOST_BYTES = 1_500_000
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
NAMES = re.compile(r'(?:id="|url\(#|href="#)[^")]*')  # made from what they name
TOOL = re.compile(r"Matplotlib v[\d.]+")


def same(one: str, other: str) -> bool:
    """Are two pictures the same but for rounding? Words, if they are of different matplotlibs."""
    if TOOL.findall(one) != TOOL.findall(other):
        return words(one) == words(other)
    one, other = (NAMES.sub("", text) for text in (one, other))
    if NUMBER.sub("", one) != NUMBER.sub("", other):
        return False
    pairs = zip(map(float, NUMBER.findall(one)), map(float, NUMBER.findall(other)), strict=True)
    return all(abs(a - b) <= 0.5 + 0.002 * abs(a) for a, b in pairs)


def words(picture: str) -> list[str]:
    """What is written in a picture: title, caption and labels, apart from axes' numbers."""
    texts = re.findall(r"<text[^>]*>(.*?)</text>", picture, re.DOTALL)
    return sorted(text for text in texts if re.search("[A-Za-z]{2}", text))


@pytest.mark.parametrize("name", FIGURES)
def test_the_command_still_makes_the_figure_of_the_page(name: str) -> None:
    """If not: make pages."""
    pytest.importorskip("matplotlib")
    entry = FIGURES[name]
    if entry.needs:
        try:
            find_model()
        except ImportError as error:
            pytest.skip(str(error))
    drawn = entry.render(entry.collect(), "svg").decode()
    assert same(drawn, (PICTURES / f"{name}.svg").read_text("utf-8"))


def test_errors_are_drawn_alike_by_more_threads() -> None:
    """Their sums have another order, in which another element of O may be the worst one."""
    pytest.importorskip("matplotlib")
    entry = FIGURES["budget"]
    with threadpool_limits(2, user_api="blas"):
        drawn = entry.render(entry.collect(), "svg").decode()
    assert same(drawn, (PICTURES / "budget.svg").read_text("utf-8"))


@pytest.mark.parametrize("name", FIGURES)
def test_a_page_shows_the_figure_and_its_command(name: str) -> None:
    """With a text for those who do not see it; the picture names sources and loads nothing."""
    pages = [path.read_text("utf-8") for path in DOCS.rglob("*.md")]
    shown = [page for page in pages if f"pictures/{name}.svg)" in page]
    assert len(shown) == 1
    assert re.search(rf"!\[[^\]]{{40,}}\]\((\.\./)?pictures/{name}\.svg\)", shown[0])
    assert f"`fa4 figures {name}`" in shown[0]
    picture = (PICTURES / f"{name}.svg").read_text("utf-8")
    assert f"Made by: fa4 figures {name}" in picture and "Sources:" in picture
    assert not re.search(r'href="(?!#)|<script|<image', picture)


def test_the_pictures_are_small() -> None:
    """All of the site's together."""
    sizes = {path.name: path.stat().st_size for path in PICTURES.iterdir()}
    assert sum(sizes.values()) < MOST_BYTES, sizes


def test_a_stale_picture_is_noticed() -> None:
    """Another number or word is; rounding and the names of parts are not."""
    head = "<title>Matplotlib v3.11.2, x</title>"
    old = f'{head}<text>gain 177</text><path id="p1" d="M 10.1 20.2"/>'
    assert same(old, old.replace("p1", "q7").replace("10.1", "10.2"))
    assert not same(old, old.replace("177", "178"))
    assert not same(old, old.replace("20.2", "25.2"))
    assert not same(old, old.replace("gain", "loss"))
    newer = old.replace("3.11.2", "3.12.0")
    assert same(old, newer.replace("20.2", "99")) and not same(old, newer.replace("gain", "loss"))
