"""What a call across GPUs will take, before there are any: time, efficiency, memory, and why.

The spec is that of the executors; what is timed is the programs they would carry out
(`simulate`), with kernels as `fa4.sim` predicts them and links as `fa4.sim.links` has them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fa4.config import Window, require
from fa4.distributed.blocks import SequenceMask
from fa4.distributed.kernel_times import SimulatedBlocks, memory_of, one_gpu_seconds
from fa4.distributed.layout import check_offsets, make_layout
from fa4.distributed.methods import check_spec, make_program
from fa4.distributed.plan import CommunicationPlan, Sizes, Spec
from fa4.distributed.simulate import (
    COMPUTE,
    COPY,
    MERGE,
    SEND,
    WAIT,
    RankTimes,
    TimeSpan,
    TimingModel,
    find_sample,
    time_spec,
)
from fa4.sim.links import OWN_LINK, Fabric, make_fabric

# What a user asks for: a method and a layout. None: zigzag if causal, else contiguous.
SCHEMES: dict[str, tuple[str, str | None]] = {
    "zigzag": ("ring", "zigzag"),
    "contiguous": ("ring", "contiguous"),
    "striped": ("ring", "striped"),
    "ring": ("ring", None),
    "all_gather": ("all_gather", None),
    "ulysses": ("ulysses", "contiguous"),
    "ring+ulysses": ("ring+ulysses", None),
    "halo": ("halo", "contiguous"),
    "pass_q": ("pass_q", None),
}
WORDS = {COMPUTE: "attention", MERGE: "merges and sums", COPY: "copies", SEND: "messages"}


@dataclass(frozen=True)
class CallShape:
    """A call over all GPUs. window: (left, right) of every row; causal means right = 0."""

    seqlen: int
    sizes: Sizes
    causal: bool = False
    window: Window = (None, None)
    cu_seqlens: tuple[int, ...] = ()

    @property
    def mask(self) -> SequenceMask:
        """What each row sees. ValueError for offsets that are none."""
        left, right = self.window
        offsets = check_offsets(self.cu_seqlens, self.seqlen)
        return SequenceMask(left, 0 if self.causal else right, offsets)


def make_call_spec(
    shape: CallShape, scheme: str, gpus: int, degree: int = 1, head_groups: int = 1
) -> Spec:
    """The checked spec of a forward pass. ValueError for what does not fit."""
    require(scheme in SCHEMES, f"method must be one of auto, {', '.join(SCHEMES)}", scheme)
    method, name = SCHEMES[scheme]
    mask = shape.mask
    if name is None:
        name = "zigzag" if mask.right == 0 and mask.left is None else "contiguous"
    if name == "zigzag" and len(mask.documents) > 2:
        name = "documents"
    rows = make_layout(name, shape.seqlen, gpus, cu_seqlens=shape.cu_seqlens)
    spec = Spec(method, rows, rows, mask, shape.sizes, degree=degree, head_groups=head_groups)
    return check_spec(spec)


def make_model(
    sizes: Sizes, machine: str, fabric: Fabric, merge: str = "fused", **settings: object
) -> TimingModel:
    """The model of a machine of `fa4 machines`; settings are those of `fa4 predict`."""
    from fa4.sim.machine import find_machine

    gpu = find_machine(machine).gpu
    blocks = SimulatedBlocks(sizes, machine, settings)
    return TimingModel(blocks, memory_of(machine, merge), fabric, gpu.sm_count)


def own_fabric(
    gpus: int, machine: str, link: str | None, nodes: int, between: str, transport: str
) -> Fabric:
    """A fabric whose link is that of the machine, unless one is named."""
    from fa4.sim.machine import find_machine

    return make_fabric(
        gpus, link or OWN_LINK[find_machine(machine).gpu.arch], nodes, between, transport
    )


class ChainPart(NamedTuple):
    """Time of one kind on the critical chain, and of how many spans it is."""

    kind: str
    seconds: float
    spans: int


@dataclass(frozen=True)
class PassForecast:
    """One pass of a plan. chain: what the time of the last rank is made of; ranks: it leads over.

    peak_bytes: of the plan's buffers on the rank that has most; sent_bytes likewise.
    """

    spec: Spec
    seconds: float
    one_gpu_seconds: float
    chain: tuple[ChainPart, ...]
    chain_ranks: tuple[int, ...]
    times: tuple[RankTimes, ...]
    peak_bytes: int
    sent_bytes: int

    @property
    def efficiency(self) -> float:
        """One GPU's time over that of all GPUs together."""
        return self.one_gpu_seconds / (self.spec.ranks * self.seconds)


def forecast(spec: Spec, model: TimingModel) -> PassForecast:
    """One pass of a checked spec."""
    times = time_spec(spec, model)
    alone = one_gpu_seconds(model.blocks, spec.mask, spec.sizes, spec.backward)
    sample = find_sample(spec, model.fabric)
    plan = CommunicationPlan(spec, tuple(make_program(spec, rank) for rank in sample))
    chain, ranks = follow_chain(times)
    return PassForecast(
        spec,
        max(x.seconds for x in times),
        alone,
        chain,
        ranks,
        tuple(times),
        max(plan.peak_bytes(number) for number in range(len(sample))),
        max(plan.sent_bytes(number) for number in range(len(sample))),
    )


def forecast_passes(spec: Spec, model: TimingModel, backward: bool) -> list[PassForecast]:
    """Forward, and backward if wanted."""
    passes = [forecast(spec, model)]
    if backward:
        passes.append(forecast(check_spec(replace(spec, backward=True)), model))
    return passes


def follow_chain(times: Sequence[RankTimes]) -> tuple[tuple[ChainPart, ...], tuple[int, ...]]:
    """From the end of the last rank back to the beginning: what had to wait for what.

    Where a rank waits for a message whose sender or receiver came late, the chain goes on there.
    """
    by_rank = {x.rank: x for x in times}
    rank = max(times, key=lambda x: x.seconds).rank
    now, ranks = by_rank[rank].seconds, [rank]
    spent: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    at = len(by_rank[rank].spans) - 1
    while at >= 0:
        span = by_rank[rank].spans[at]
        kind, start = span.kind, span.start_s
        if kind == WAIT:
            kind = SEND
            sent = _ending(by_rank[rank], span.end_s)
            if sent.peer in by_rank and sent.start_s > span.start_s:
                start, rank = sent.start_s, sent.peer
                at = len([x for x in by_rank[rank].spans if x.end_s <= start * (1 + 1e-12)])
                ranks.append(rank)
        spent[kind] += now - start
        counts[kind] += 1
        now, at = start, at - 1
    parts = (ChainPart(kind, spent[kind], counts[kind]) for kind in WORDS if kind in spent)
    return tuple(parts), tuple(dict.fromkeys(ranks))


def _ending(times: RankTimes, end: float) -> TimeSpan:
    return next(x for x in times.sends if x.end_s == end)


def say_chain(found: PassForecast, transport_why: str) -> str:
    """The critical chain in words."""
    parts = [
        f"{part.seconds * 1e3:.3g} ms of {WORDS[part.kind]} ({part.spans})" for part in found.chain
    ]
    ranks = found.chain_ranks
    said = f"rank {ranks[0]} is last: {', '.join(parts)}"
    if len(ranks) > 1:
        others = ", ".join(map(str, ranks[1:6])) + (", ..." if len(ranks) > 6 else "")
        said += f"; the chain leads over ranks {others}"
    wait = next((part for part in found.chain if part.kind == SEND), None)
    if wait is not None and wait.seconds > 0.01 * found.seconds:
        said += ". Messages on the chain are not hidden"
        said += "" if found.spec.backward else f": {transport_why}"
    return said + "."
