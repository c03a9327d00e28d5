"""The tables of docs/distributed.md: what the simulator of links says, measured and not.

`python -m lab.pages.distributed_tables` writes them between their markers in that page.
"""

from __future__ import annotations

from functools import cache

from fa4.distributed.forecast import CallShape, forecast, make_call_spec, make_model, own_fabric
from fa4.distributed.plan import Sizes
from fa4.plan.render import markdown_table
from fa4.sim.links import LINKS
from lab.hardware.distributed import compare
from lab.pages import DOCS
from lab.pages.marked_tables import MarkedTables
from lab.records import read_record

PAGE = DOCS / "distributed.md"
SIZES = Sizes(32, 8)  # of an 8B model
# (machine, GPUs, nodes, tokens); methods with their degree
PLACES = (
    ("h200", 8, 1, 128 << 10),
    ("b200", 8, 1, 128 << 10),
    ("b200", 64, 8, 1 << 20),
    ("b200", 1024, 128, 10 << 20),
)
METHODS = (("zigzag", 1), ("all_gather", 1), ("ulysses", 1), ("ring+ulysses", 8))


@cache
def earlier_rings() -> tuple[compare.ComparedRow, ...]:
    """Nine calls of two H200s by a program of its own."""
    return tuple(compare.earlier_rings())


@cache
def measured_rings() -> tuple[compare.MeasuredRing, ...]:
    """Calls of `fa4.distributed` on two H200s."""
    return tuple(compare.measured_rings())


def ring_errors() -> list[float]:
    """Of what is predicted of these, by each transport."""
    return [
        row.predicted / row.value - 1
        for ring in measured_rings()
        for row in ring.by_transport.values()
    ]


@cache
def eight_gpus(gpus: str = "8 H800") -> tuple[compare.ComparedRow, ...]:
    """ring-flash-attention's rings."""
    return tuple(compare.eight_gpus(gpus))


def render_earlier() -> str:
    """Measured and predicted milliseconds."""
    rows = [
        (row.name, f"{row.value:.2f}", f"{row.predicted:.2f}",
         f"{row.predicted / row.value - 1:+.1%}")
        for row in earlier_rings()
    ]  # fmt: skip
    return markdown_table(("call", "measured ms", "predicted ms", "error"), rows)


def render_rings() -> str:
    """Milliseconds and efficiency of each transport, and how far off the prediction is."""
    rows = []
    for ring in measured_rings():
        cells = [ring.name, f"{ring.one_gpu_ms:.2f}"]
        for row in ring.by_transport.values():
            efficiency = ring.one_gpu_ms / 2 / row.value
            cells += [f"{row.value:.2f}", f"{efficiency:.0%}",
                      f"{row.predicted / row.value - 1:+.1%}"]  # fmt: skip
        rows.append(cells)
    ways = [f"{way}: {x}" for way in ("NCCL", "copies") for x in ("ms", "efficiency", "predicted")]
    return markdown_table(("call", "one GPU, ms", *ways), rows)


def render_others() -> str:
    """Milliseconds beside torch's context parallelism; other methods; with gradients."""
    rows = []
    for row in read_record("two_gpus")["times"]:
        name, way = str(row.get("method", "")), row.get("transport")
        if row.get("passes"):
            what, one = f"zigzag ring, {row['passes']}", row["one_gpu_ms"]
        elif name not in ("", "one GPU", "ring"):
            what, one = name, _one_gpu_ms(row["seqlen"], row["causal"])
        else:
            continue
        mask = "causal" if row.get("causal", True) else "no mask"
        rows.append((what, {"group": "NCCL", "peers": "copies", None: ""}[way],
                     f"{row['seqlen'] // 1024}k, {mask}", f"{row['ms']:.2f}",
                     f"{one / 2 / row['ms']:.0%}"))  # fmt: skip
    return markdown_table(("method", "by", "tokens", "ms", "of one GPU's speed, each"), rows)


def _one_gpu_ms(seqlen: int, causal: bool) -> float:
    name = compare.name_call(seqlen, 16, 16, causal)
    return next(ring.one_gpu_ms for ring in measured_rings() if ring.name == name)


def render_eight() -> str:
    """Published and predicted efficiencies, in points."""
    rows = [
        (row.name, f"{row.value:.1%}", f"{row.predicted:.1%}",
         f"{100 * (row.predicted - row.value):+.1f}")
        for gpus in compare.PUBLISHED
        for row in eight_gpus(gpus)
    ]  # fmt: skip
    return markdown_table(("GPUs, passes, layout", "published", "predicted", "points"), rows)


def efficiency(machine: str, gpus: int, nodes: int, seqlen: int, scheme: str, degree: int) -> str:
    """Of the causal forward pass, or that the method does not fit."""
    transport = "peers" if nodes == 1 else "group"
    fabric = own_fabric(gpus, machine, None, nodes, "infiniband50", transport)
    shape = CallShape(seqlen, SIZES, causal=True)
    try:
        spec = make_call_spec(shape, scheme, gpus, degree)
    except ValueError:
        return "-"
    if degree >= gpus:
        return "-"
    return f"{forecast(spec, make_model(SIZES, machine, fabric)).efficiency:.0%}"


def render_predicted() -> str:
    """Efficiencies of machines that nobody measured here."""
    rows = []
    for machine, gpus, nodes, seqlen in PLACES:
        size = f"{seqlen >> 20}M" if seqlen >= 1 << 20 else f"{seqlen >> 10}k"
        where = f"{gpus} {machine.upper()}" + (f", {nodes} nodes" if nodes > 1 else "")
        found = (efficiency(machine, gpus, nodes, seqlen, *method) for method in METHODS)
        rows.append((where, size, *found))
    names = [name + (f" ({degree})" if degree > 1 else "") for name, degree in METHODS]
    return markdown_table(("GPUs", "tokens", *names), rows)


def render_links() -> str:
    """Every link, and how well it is known."""
    rows = [
        (f"`{link.name}`", f"{link.bytes_per_s / 1e9:.0f}", link.known) for link in LINKS.values()
    ]
    return markdown_table(("link", "GB/s, one way", "known"), rows)


TABLES = MarkedTables(
    "python -m lab.pages.distributed_tables",
    {
        "rings": render_rings,
        "beside": render_others,
        "two GPUs": render_earlier,
        "eight GPUs": render_eight,
        "predicted efficiencies": render_predicted,
        "links": render_links,
    },
)

if __name__ == "__main__":
    TABLES.write(PAGE)
