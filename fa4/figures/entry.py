"""One figure: what it shows, where its numbers are from, and how it is drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from fa4.base import drawing

Data = Mapping[str, Any]
CAPTION_CHARACTERS_PER_INCH = 15.5  # of letters of 7.5 points


@dataclass(frozen=True, kw_only=True)
class FigureEntry:
    """A figure that `fa4 figures` knows.

    collect: its numbers as plain data, at least `title`, `columns` (names with units) and `rows`.
    draw: onto an empty matplotlib figure. sources: of the numbers. needs: a package besides
    matplotlib, or nothing.
    """

    name: str
    about: str
    sources: str
    size_inches: tuple[float, float]
    collect: Callable[[], Data]
    draw: Callable[[Any, Data], None]
    needs: str = ""

    @property
    def command(self) -> str:
        """What makes it."""
        return f"fa4 figures {self.name}"

    def render(self, data: Data, kind: str) -> bytes:
        """The figure of `data` as "png" or "svg". ImportError if matplotlib is missing."""
        with drawing.styled():
            width, height = self.size_inches
            figure = drawing.new_figure(self.size_inches, layout="constrained")
            self.draw(figure, data)
            caption = f"{data.get('note', '')} Sources: {self.sources}."
            text = fill(caption.strip(), round(CAPTION_CHARACTERS_PER_INCH * width))
            text += f"\nMade by: {self.command}"
            room = (0.17 + 0.135 * len(text.splitlines())) / height
            figure.text(0.01, 0.06 / height, text, fontsize=7.5, color=drawing.GREY, va="bottom")
            figure.get_layout_engine().set(rect=(0, room, 1, 1 - room))
            return drawing.save(figure, kind)
