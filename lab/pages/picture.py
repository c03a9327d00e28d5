"""The picture of README.md and tile.md: one work tile's timeline and, below it, its memory.

`python -m lab.pages.picture` draws docs/pictures/tile.svg from what the simulator records for 512
queries and keys: what `fa4 trace --seqlen 512 --heads 1 --cta-group 1` writes, without the latency
of the first loads. A role has its colour and letter of fa4/base/role_styles.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

from fa4.base.role_styles import ROLES
from fa4.sim.options import build
from fa4.sim.timeline import CtaTimeline, Event, UnitSlice, record
from lab.pages import DOCS

PICTURE = DOCS / "pictures" / "tile.svg"
SETTINGS = {"seqlen": 512, "heads": 1, "cta_group": 1}
DRAWN = ("load", "mma", "softmax0", "softmax1", "correction", "epilogue")
COLOURS = {role: ROLES[role].light for role in DRAWN}
WAIT = "#E9E9E9"
WIDTH, LEFT, RIGHT, ROW, TOP = 980, 128, 12, 21, 46
LETTER = 5.3  # width of a letter of size 9
LEAST_PIXELS = 0.4
# First word of a piece of work -> the name of a run of such pieces, and the colour's strength.
STEPS = {
    "read": ("read", 0.55), "mask": ("max", 0.75), "row": ("max", 0.75), "write": ("write", 0.55),
    "exp": ("exp, write P", 1.0), "vote": ("vote", 1.0), "scale": ("scale O", 0.8),
    "rescale": ("rescale O", 0.8),
}  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """A bar: cycles, name, colour, opacity."""

    start: float
    end: float
    name: str
    colour: str
    strength: float = 1.0


Rows = dict[str, list[Piece]]


def role_rows(cta: CtaTimeline) -> Rows:
    """What each role does and waits for; neighbouring pieces of one step as one bar."""
    rows: Rows = {role: [] for role in COLOURS}
    for event in cta.events:
        pieces = rows[event.role]
        if event.kind == "arrive" or event.end <= event.start:
            continue
        if event.kind == "wait":
            pieces.append(Piece(event.start, event.end, event.what.split()[1], WAIT))
            continue
        name, strength = step_of(event)
        last = pieces[-1] if pieces else None
        if last and last.name == name and last.end == event.start and event.kind == "work":
            pieces[-1] = Piece(last.start, event.end, name, last.colour, strength)
        else:
            pieces.append(Piece(event.start, event.end, name, COLOURS[event.role], strength))
    return rows


def step_of(event: Event) -> tuple[str, float]:
    """(name, strength) of a piece of work; P is written between exponentials."""
    words = event.what.split()
    if event.kind == "issue":
        return words[0], 1.0
    if words[:2] == ["row", "sum"]:
        return "sum", 0.55
    if words[0] == "write" and words[1].startswith("P"):
        return STEPS["exp"]
    return STEPS[words[0]]


def unit_rows(cta: CtaTimeline) -> Rows:
    """The two units that must never wait."""
    rows: Rows = {"tensor core": [], "exponentials": []}
    for piece in cta.unit_slices:
        if piece.unit == "tensor":
            tile = COLOURS[f"softmax{piece.what[2]}"]
            rows["tensor core"].append(Piece(piece.start, piece.end, piece.what[:3], tile))
        elif piece.unit == "mufu":
            rows["exponentials"].append(Piece(piece.start, piece.end, "", COLOURS[piece.role]))
    return rows


def named(cta: CtaTimeline, role: str, what: str) -> list[Event]:
    """A role's events of one name, in order."""
    return [event for event in cta.events if (event.role, event.what) == (role, what)]


def products(cta: CtaTimeline, what: str) -> list[UnitSlice]:
    """The tensor core's pieces of one name, in order."""
    return [piece for piece in cta.unit_slices if (piece.unit, piece.what) == ("tensor", what)]


def tensor_memory_rows(cta: CtaTimeline) -> Rows:
    """S and P of each Q tile, which share columns, and O."""
    rows: Rows = {"S0 / P0": [], "S1 / P1": [], "O0": [], "O1": []}
    for tile in "01":
        softmax, colour = f"softmax{tile}", COLOURS[f"softmax{tile}"]
        scores, ends = products(cta, f"QK{tile}"), products(cta, f"PV{tile} tail")
        reads, writes = named(cta, softmax, f"read S{tile}"), named(cta, softmax, f"write P{tile}")
        firsts = writes[:: len(writes) // len(scores)]
        for product, read, write, end in zip(scores, reads, firsts, ends, strict=True):
            rows[f"S{tile} / P{tile}"] += [
                Piece(product.start, read.end, f"S{tile}", colour, 0.85),
                Piece(write.start, end.end, f"P{tile}", colour, 0.45),
            ]
        start = products(cta, f"PV{tile} head")[0].start
        end_of_o = named(cta, "correction", f"read O{tile}")[0].end
        rows[f"O{tile}"].append(Piece(start, end_of_o, f"O{tile}, float32", colour, 0.7))
    return rows


def shared_memory_rows(cta: CtaTimeline, slots: int) -> Rows:
    """Q, the slots of the ring of K and V (pale while they are loaded), and O on its way out."""
    rows: Rows = {}
    for tile in "01":
        start = named(cta, "load", f"load Q{tile}")[0].start
        here = named(cta, "load", f"arrive q{tile}_full")[0].done
        free = named(cta, "mma", f"arrive q{tile}_empty")[0].done
        rows[f"Q{tile}"] = [
            Piece(start, here, "", COLOURS["load"], 0.35),
            Piece(here, free, f"Q{tile}", COLOURS["load"]),
        ]
    loads = [x for x in cta.events if x.role == "load" and x.what in ("load K", "load V")]
    full, empty = named(cta, "load", "arrive kv_full"), named(cta, "mma", "arrive kv_empty")
    for number, (load, landed, left) in enumerate(zip(loads, full, empty, strict=True)):
        row = rows.setdefault(f"K/V slot {number % slots}", [])
        row.append(Piece(load.start, landed.done, "", COLOURS["load"], 0.35))
        row.append(Piece(landed.done, left.done, f"{load.what[-1]}{number // 2}", COLOURS["load"]))
    for tile in "01":
        written = named(cta, "correction", f"write O{tile}")[0].start
        gone = named(cta, "epilogue", f"store O{tile}")[0].done
        rows[f"O{tile} on its way out"] = [Piece(written, gone, f"O{tile}", COLOURS["epilogue"])]
    return rows


def draw_rows(rows: Rows, top: float, first: float, scale: float) -> Iterator[str]:
    """Bars with the names that fit, and the row's name on the left."""
    for number, (label, pieces) in enumerate(rows.items()):
        y = top + number * ROW
        letter = (
            f' <tspan font-weight="bold">{ROLES[label].letter}</tspan>' if label in ROLES else ""
        )
        yield (
            f'<text x="{LEFT - 8}" y="{y + 12:g}" text-anchor="end">{escape(label)}{letter}</text>'
        )
        for piece in pieces:
            start = LEFT + max(0.0, piece.start - first) * scale
            width = LEFT + (piece.end - first) * scale - start
            if width < LEAST_PIXELS:
                continue
            yield (
                f'<rect x="{start:.1f}" y="{y:g}" width="{width:.1f}" height="16" '
                f'fill="{piece.colour}" fill-opacity="{piece.strength:g}"/>'
            )
            if piece.name and len(piece.name) * LETTER + 3 <= width:
                dark = (
                    piece.colour in (COLOURS["mma"], COLOURS["softmax0"]) and piece.strength > 0.8
                )
                ink = "#FFF" if dark else "#222"
                yield (
                    f'<text x="{start + width / 2:.1f}" y="{y + 11.5:g}" text-anchor="middle" '
                    f'font-size="9" fill="{ink}">{escape(piece.name)}</text>'
                )


def draw() -> str:
    """The whole picture."""
    request = build(SETTINGS)
    timeline = record(request.problem, request.pipeline, request.machine, request.simulation)
    cta, plan = timeline.ctas[0], timeline.plan
    products = [piece for piece in cta.unit_slices if piece.unit == "tensor"]
    first, last = products[0].start - 250, max(event.done for event in cta.events)
    scale = (WIDTH - LEFT - RIGHT) / (last - first)
    parts = [
        ("Warp roles: colour is work, grey is waiting for the signal named", role_rows(cta)),
        ("Units: by Q tile", unit_rows(cta)),
        ("Tensor memory: 512 columns", tensor_memory_rows(cta)),
        ("Shared memory: 227 KiB", shared_memory_rows(cta, plan.signal("kv_full").stages)),
    ]
    top, body = float(TOP), list[str]()
    for title, rows in parts:
        body.append(f'<text x="{LEFT}" y="{top + 2:g}" font-weight="bold">{title}</text>')
        body += draw_rows(rows, top + 9, first, scale)
        top += 9 + len(rows) * ROW + 14
    body += draw_axis(first, last, scale, top - 8)
    name = f"{timeline.machine.name}, 512 queries and keys, head dim 128"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 26:g}" role="img" '
        'aria-label="Timeline of a work tile and its memory" font-family="sans-serif" '
        'font-size="11" fill="#222">\n'
        f'<rect width="{WIDTH}" height="{top + 26:g}" rx="6" fill="#FFF"/>\n'
        f'<text x="{LEFT}" y="22" font-size="14" font-weight="bold">One work tile of the forward '
        f"kernel, predicted: {escape(name)}</text>"
    )
    return "\n".join([head, *body, "</svg>", ""])


def draw_axis(first: float, last: float, scale: float, y: float) -> Iterator[str]:
    """Cycles from the CTA's first instruction on."""
    yield f'<line x1="{LEFT}" y1="{y:g}" x2="{WIDTH - RIGHT}" y2="{y:g}" stroke="#888"/>'
    for cycle in range(int(first // 2000 + 1) * 2000, int(last), 2000):
        x = LEFT + (cycle - first) * scale
        if not LEFT + 20 < x < WIDTH - 20:  # its figure would meet the margin
            continue
        yield f'<line x1="{x:.1f}" y1="{y:g}" x2="{x:.1f}" y2="{y + 4:g}" stroke="#888"/>'
        yield f'<text x="{x:.1f}" y="{y + 16:g}" text-anchor="middle">{cycle:,}</text>'
    yield f'<text x="{LEFT - 8}" y="{y + 16:g}" text-anchor="end">SM cycles</text>'


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
