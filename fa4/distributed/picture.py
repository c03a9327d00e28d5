"""A plan as a picture: which rank computes which square of the mask in which step, who sends what.

On the left the mask, rows downwards, keys to the right: a colour for each rank, a number for each
step. On the right what each rank does when, as `simulate` has it: its kernels above, its messages
below. Needs matplotlib, like all pictures (`fa4.base.drawing`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fa4.base import drawing
from fa4.config import require
from fa4.distributed.blocks import SequenceMask
from fa4.distributed.plan import CommunicationPlan, Compute, Post
from fa4.distributed.simulate import COMPUTE, COPY, MERGE, RankTimes

MOST_RANKS, MOST_SQUARES = 16, 4000
COLOURS = (
    drawing.BLUE, drawing.ORANGE, drawing.GREEN, drawing.PINK,
    drawing.SKY, drawing.VERMILION, drawing.SILVER, drawing.GREY,
)  # fmt: skip
Corner = tuple[float, float]


class MaskSquare(NamedTuple):
    """A part of the mask that one rank computes in one of its steps; corners are (key, row)."""

    rank: int
    step: int
    corners: tuple[Corner, ...]

    @property
    def middle(self) -> Corner:
        """Its centre of gravity, about."""
        keys, rows = zip(*self.corners, strict=True)
        return sum(keys) / len(keys), sum(rows) / len(rows)


def find_squares(plan: CommunicationPlan) -> list[MaskSquare]:
    """Of the forward pass or dQ, steps counted by what a rank computes from the same keys.

    ValueError for rows with a stride, and for more than a picture can show.
    """
    require(plan.ranks <= MOST_RANKS, f"a picture shows at most {MOST_RANKS} ranks", plan.ranks)
    found: list[MaskSquare] = []
    for rank, program in enumerate(plan.programs):
        computed = (step for step in program.steps if isinstance(step, Compute) and step.out[0])
        for number, step in enumerate(computed):
            for block in step.blocks:
                for rows in block.rows:
                    for keys in block.keys:
                        found += _visible(plan.spec.mask, rank, number, rows, keys)
    require(len(found) <= MOST_SQUARES, f"a picture shows at most {MOST_SQUARES} squares",
            len(found))  # fmt: skip
    return found


def _visible(
    mask: SequenceMask, rank: int, step: int, rows: range, keys: range
) -> Iterator[MaskSquare]:
    """What the mask shows of rows x keys."""
    if max(rows.step, keys.step) > 1:
        raise ValueError(f"a picture needs runs of neighbouring rows; got every {rows.step}th")
    corners: list[Corner] = [
        (keys.start, rows.start), (keys.stop, rows.start),
        (keys.stop, rows.stop), (keys.start, rows.stop),
    ]  # fmt: skip
    if mask.right is not None:
        corners = _cut(corners, 1.0, mask.right + 0.5)
    if mask.left is not None:
        corners = _cut(corners, -1.0, mask.left + 0.5)
    if len(corners) > 2:
        yield MaskSquare(rank, step, tuple(corners))


def _cut(corners: Sequence[Corner], sign: float, most: float) -> list[Corner]:
    """The part of a polygon where sign * (key - row) <= most."""
    kept: list[Corner] = []
    for one, other in zip(corners, [*corners[1:], *corners[:1]], strict=True):
        here, there = (sign * (key - row) - most for key, row in (one, other))
        if here <= 0:
            kept.append(one)
        if here * there < 0:
            share = here / (here - there)
            kept.append(tuple(a + share * (b - a) for a, b in zip(one, other, strict=True)))  # type: ignore[arg-type]
    return kept


def draw_plan(figure: Any, plan: CommunicationPlan, times: Sequence[RankTimes], title: str) -> None:
    """Mask and timeline onto an empty matplotlib figure."""
    mask, timeline = figure.subplots(1, 2, gridspec_kw={"width_ratios": (1, 1.55)})
    _draw_mask(mask, plan)
    _draw_times(timeline, plan, times)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=12)


def _colour(rank: int) -> str:
    return COLOURS[rank % len(COLOURS)]


def _draw_mask(axes: Any, plan: CommunicationPlan) -> None:
    from matplotlib.patches import Polygon

    seqlen = plan.spec.rows.seqlen
    squares = find_squares(plan)
    for square in squares:
        hatch = drawing.HATCHES[square.rank // len(COLOURS)]
        axes.add_patch(Polygon(square.corners, facecolor=_colour(square.rank), edgecolor="white",
                               linewidth=0.8, alpha=0.85, hatch=hatch))  # fmt: skip
        if len(squares) <= 200:
            axes.text(*square.middle, str(square.step), ha="center", va="center", fontsize=8,
                      color="white")  # fmt: skip
    axes.set_xlim(0, seqlen)
    axes.set_ylim(seqlen, 0)
    axes.set_aspect("equal")
    axes.set_xlabel("keys")
    axes.set_ylabel("rows")
    axes.set_title("who computes it (colour), in which step", fontsize=10, fontweight="normal")


def _draw_times(axes: Any, plan: CommunicationPlan, times: Sequence[RankTimes]) -> None:
    from matplotlib.patches import Patch

    longest = max(x.seconds for x in times)
    for one in times:
        top = one.rank - 0.4
        steps = list(dict.fromkeys(x.step for x in one.spans if x.kind == COMPUTE))
        for span in one.spans:
            place, width = 1e3 * span.start_s, 1e3 * (span.end_s - span.start_s)
            bar: dict[str, Any] = {"height": 0.38, "left": place, "align": "edge"}
            if span.kind == COMPUTE:
                colour = _colour(one.rank)
                axes.barh(top, width, color=colour, edgecolor="white", linewidth=0.5, **bar)
                if width > 30 * longest:  # 3% of it, in ms
                    axes.text(place + width / 2, top + 0.2, str(steps.index(span.step)),
                              ha="center", va="center", fontsize=8, color="white")  # fmt: skip
            elif span.kind in (MERGE, COPY):
                axes.barh(top, width, color=drawing.GREY, **bar)
        for sent in one.sends:
            place, width = 1e3 * sent.start_s, 1e3 * (sent.end_s - sent.start_s)
            axes.barh(top + 0.44, width, 0.3, place, align="edge",
                      color=drawing.PALE, edgecolor=drawing.SILVER, linewidth=0.5)  # fmt: skip
            said = _say_sends(plan.programs[one.rank].steps[sent.step])
            axes.text(place, top + 0.6, f" {said}", va="center", fontsize=6.5,
                      color=drawing.GREY, clip_on=True)  # fmt: skip
    axes.set_ylim(len(times) - 0.4, -0.6)
    axes.set_yticks([x.rank for x in times], [f"rank {x.rank}" for x in times])
    axes.set_xlim(0, None)
    axes.set_xlabel("ms (predicted)")
    handles = [
        Patch(color=drawing.GREY, label="merge, copy"),
        Patch(facecolor=drawing.PALE, edgecolor=drawing.SILVER, label="messages"),
    ]
    above: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": 2}
    axes.legend(handles=handles, frameon=False, fontsize=8, **above)


def _say_sends(post: object) -> str:
    """What goes to whom, short."""
    if not isinstance(post, Post) or not post.sends:
        return ""
    kinds = "+".join(dict.fromkeys(message.piece.kind for message in post.sends))
    peers = list(dict.fromkeys(message.peer for message in post.sends))
    return f"{kinds} to {peers[0] if len(peers) == 1 else 'all' if len(peers) > 2 else peers}"


def render_plan(
    plan: CommunicationPlan, times: Sequence[RankTimes], title: str, kind: str
) -> bytes:
    """The picture as "png" or "svg". ImportError without matplotlib."""
    with drawing.styled():
        figure = drawing.new_figure((11, 2.2 + 0.55 * max(4, plan.ranks)), layout="constrained")
        draw_plan(figure, plan, times, title)
        return drawing.save(figure, kind)
