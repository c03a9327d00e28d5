"""How every picture of this package looks, and how it becomes a file: PNG or SVG, always the same.

Colours are Okabe and Ito's, which people with any kind of colour blindness can tell apart; a hatch
or a marker says the same a second time, for print and for screens without colour.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

FORMATS = ("png", "svg")
BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
VERMILION, PINK, GREY, SILVER, PALE = "#D55E00", "#CC79A7", "#444444", "#999999", "#E3E3E3"
HATCHES = ("", "//", "xx", "..", "\\\\", "++", "oo", "--")
STYLE = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "fa4",  # the same picture is the same file
    "svg.fonttype": "none",  # letters stay letters: searchable, readable aloud, small
}


def require_matplotlib() -> None:
    """Raises ImportError if it is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"the figure needs matplotlib ({error}): pip install matplotlib"
        ) from None


@contextmanager
def styled(**changes: Any) -> Iterator[None]:
    """Draw inside of it; `changes` of STYLE have _ for the dot. ImportError without matplotlib."""
    require_matplotlib()
    import matplotlib

    changed = {name.replace("_", ".", 1): value for name, value in changes.items()}
    with matplotlib.rc_context(STYLE | changed):
        yield


def new_figure(size_inches: tuple[float, float], **how: Any) -> Any:
    """An empty figure, which needs no display whatever the user's settings say."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size_inches, dpi=130, **how)
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, kind: str) -> bytes:
    """The figure as "png" or "svg"; without the date, which would differ every time."""
    image = io.BytesIO()
    figure.savefig(image, format=kind, metadata={"Date": None} if kind == "svg" else {})
    return image.getvalue()
