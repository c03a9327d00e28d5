"""What connects GPUs: bytes per second, and how long a message takes by its size.

A GPU's messages of one kind of link share its port: what matters is how many bytes it has to send,
or to receive, together. Curves are measured on two H200s (`fa4/measured/h200x2_links.csv`); what
other links make of them is assumed: `Link.known` says so.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from fa4.config import require, require_int

MEASURED_FILE = Path(__file__).parents[1] / "measured" / "h200x2_links.csv"
MEASURED_BYTES_PER_S = 450e9  # of the link of that file: NVLink 4, one way
MOST_SHARE = 374 / 450  # of the nominal rate, by copy engines at 256 MiB: the same file
# Of a message without bytes, assumed: nothing below 8 MiB was measured.
EMPTY_S = {"group": 20e-6, "peers": 10e-6}
EMPTY_BETWEEN_NODES_S = 30e-6  # assumed: 20 to 30 us of NCCL over InfiniBand
SHARE_BETWEEN_NODES = 0.9  # of the nominal rate, assumed


@dataclass(frozen=True, kw_only=True)
class Transport:
    """How messages are moved, and what that does to kernels.

    hidden: passes (forward, backward) whose kernels go on beside messages. sms: SMs that a message
    holds while it is under way. kept: SMs that kernels leave alone for it, always.
    """

    name: str
    curve: str
    hidden: tuple[str, ...]
    sms: int
    kept: int
    why: str


NCCL_SMS = 16  # of NCCL's sends and receives: assumed; 4 to 8 suffice by MagiAttention's account
TRANSPORTS: Mapping[str, Transport] = {
    transport.name: transport
    for transport in (
        Transport(
            name="group",
            curve="group",
            hidden=("backward",),
            sms=NCCL_SMS,
            kept=0,
            why="NCCL's kernels need SMs, and a forward kernel has them all until its end; the "
            "backward pass is several kernels, between which they get theirs",
        ),
        Transport(
            name="peers",
            curve="peers",
            hidden=("forward", "backward"),
            sms=0,
            kept=0,
            why="copy engines move the bytes, no SM works for them",
        ),
        Transport(
            name="margin",
            curve="group",
            hidden=("forward", "backward"),
            sms=0,
            kept=NCCL_SMS,
            why=f"what if kernels left {NCCL_SMS} SMs to NCCL; no kernel here does",
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Link:
    """bytes_per_s: nominal, one way, of one GPU. reach: GPUs that it connects, 0 for any number.

    known: measured, published or assumed, and by whom.
    """

    name: str
    bytes_per_s: float
    reach: int
    known: str

    def seconds(self, num_bytes: float, curve: str = "group") -> float:
        """From the call to the last byte, of the messages that one GPU sends or receives at once.

        As measured, and on a slower link no less than its rate takes; on a faster one as if it had
        so many fewer bytes. ValueError for copy engines between nodes.
        """
        if num_bytes <= 0:
            return 0.0
        if not self.reach:
            require(curve == "group", f"{self.name} needs a transport by NCCL", curve)
            return EMPTY_BETWEEN_NODES_S + num_bytes / (SHARE_BETWEEN_NODES * self.bytes_per_s)
        faster = max(1.0, self.bytes_per_s / MEASURED_BYTES_PER_S)
        at_rate = num_bytes / (MOST_SHARE * self.bytes_per_s)
        return max(at_rate, interpolate(measured_curve(curve), num_bytes / faster))


def interpolate(points: tuple[tuple[float, float], ...], x: float) -> float:
    """On straight lines between points, ascending; the last line goes on."""
    lines = list(pairwise(points))
    (low, y), (high, later) = next((line for line in lines if x <= line[1][0]), lines[-1])
    return y + (x - low) * (later - y) / (high - low)


@cache
def measured_curve(name: str) -> tuple[tuple[float, float], ...]:
    """(bytes, seconds) of swaps between two H200s, ascending; the first without bytes."""
    points = [(0.0, EMPTY_S[name])]
    with MEASURED_FILE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["transport"] == name:
                size = float(row["mebibytes"]) * 2**20
                points.append((size, size / (float(row["gb_per_s"]) * 1e9)))
    return tuple(points)


_SCALED = "rate published; curve assumed: that of NVLink 4, and its rate"
_BETWEEN = "rate published; latency (30 us) and share attained (90%) assumed"
LINKS: Mapping[str, Link] = {
    link.name: link
    for link in (
        Link(
            name="nvlink3",
            bytes_per_s=300e9,
            reach=16,
            known=f"A100 data sheet, 600 GB/s both ways: {_SCALED}",
        ),
        Link(
            name="nvlink4",
            bytes_per_s=450e9,
            reach=8,
            known="measured on two H200s; nominal: data sheet, 900 both ways",
        ),
        Link(
            name="nvlink4-h800",
            bytes_per_s=200e9,
            reach=8,
            known=f"H800, 400 GB/s both ways: {_SCALED}",
        ),
        Link(
            name="nvlink5",
            bytes_per_s=900e9,
            reach=72,
            known=f"B200 data sheet, 1.8 TB/s both ways: {_SCALED}",
        ),
        Link(
            name="infiniband50",
            bytes_per_s=50e9,
            reach=0,
            known=f"NDR, one 400 Gb/s adapter for each GPU: {_BETWEEN}",
        ),
        Link(
            name="infiniband100",
            bytes_per_s=100e9,
            reach=0,
            known=f"XDR, one 800 Gb/s adapter for each GPU: {_BETWEEN}",
        ),
    )
}
INSIDE = tuple(name for name, link in LINKS.items() if link.reach)
BETWEEN = tuple(name for name, link in LINKS.items() if not link.reach)
OWN_LINK = {"sm_90a": "nvlink4", "sm_100a": "nvlink5", "sm_103a": "nvlink5"}  # by Gpu.arch


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """`gpus` ranks, node after node; `inside` connects those of a node, `between` all others."""

    gpus: int
    nodes: int
    inside: Link
    between: Link
    transport: Transport

    def link(self, rank: int, peer: int) -> Link:
        """What connects two ranks."""
        each = self.gpus // self.nodes
        return self.inside if rank // each == peer // each else self.between

    def seconds(self, sizes: Mapping[str, float]) -> float:
        """Of messages by name of their link: the two kinds go on beside each other."""
        curve = self.transport.curve
        return max((LINKS[x].seconds(size, curve) for x, size in sizes.items()), default=0.0)


def make_fabric(
    gpus: int,
    inside: str,
    nodes: int = 1,
    between: str = "infiniband50",
    transport: str = "group",
) -> Fabric:
    """ValueError for names that there are not, and nodes that do not fit."""
    require_int("gpus", gpus, 1, 1 << 14)
    require_int("nodes", nodes, 1, gpus)
    require(inside in INSIDE, f"link must be one of {', '.join(INSIDE)}", inside)
    require(between in BETWEEN, f"node link must be one of {', '.join(BETWEEN)}", between)
    require(transport in TRANSPORTS, f"transport must be one of {', '.join(TRANSPORTS)}", transport)
    require(gpus % nodes == 0, f"nodes must divide {gpus} GPUs", nodes)
    reach = LINKS[inside].reach
    require(gpus // nodes <= reach, f"{inside} connects at most {reach} GPUs of a node",
            gpus // nodes)  # fmt: skip
    require(transport != "peers" or nodes == 1, "transport peers is of one node", nodes)
    return Fabric(
        gpus=gpus,
        nodes=nodes,
        inside=LINKS[inside],
        between=LINKS[between],
        transport=TRANSPORTS[transport],
    )
