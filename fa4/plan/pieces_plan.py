"""The plan of a forward kernel with scores in pieces (`fa4.plan.pieces`), and its signals."""

from __future__ import annotations

from fa4.hardware import Gpu
from fa4.plan.pieces import PiecesPipeline, chain_name
from fa4.plan.pieces_layout import kv_slot_bytes, lay_out, output_over_queries, require_registers
from fa4.plan.pieces_output import correction_role, epilogue_role
from fa4.plan.pieces_products import load_role, mma_role
from fa4.plan.pieces_softmax import softmax_role
from fa4.plan.schema import PipelinePlan, Signal, ring
from fa4.plan.work import WARPGROUP

MAXIMUM_ARCHES = ("sm_103a", "sm_107a")  # whose loads from tensor memory return a maximum


def pieces_plan(pipeline: PiecesPipeline, gpu: Gpu) -> PipelinePlan:
    """The plan. Raises ValueError, with the numbers, if it does not fit the machine."""
    if gpu.tmem_cols == 0:
        raise ValueError(f"pieces of scores lie in tensor memory; {gpu.name} has none")
    if pipeline.maximum == "loaded" and gpu.arch not in MAXIMUM_ARCHES:
        raise ValueError(
            f"maximum loaded needs tcgen05.ld.red of {', '.join(MAXIMUM_ARCHES)}; {gpu.name} is "
            f"{gpu.arch}"
        )
    require_registers(pipeline)
    buffers = lay_out(pipeline, gpu)
    stages = next(buffer.stages for buffer in buffers if buffer.name == "kv")
    roles = [softmax_role(pipeline, i, g) for i, g in pipeline.chains]
    if pipeline.correction == "warpgroup":
        roles.append(correction_role(pipeline))
    roles += [mma_role(pipeline), epilogue_role(pipeline), load_role(pipeline, stages)]
    return PipelinePlan(
        name=f"forward d{pipeline.head_dim}x{pipeline.head_dim_v} in pieces of {pipeline.piece}, "
        f"cta_group {pipeline.cta_group}",
        roles=tuple(roles),
        signals=tuple(_signals(pipeline, stages)),
        buffers=tuple(buffers),
        cta_group=pipeline.cta_group,
        trips=("kv_tiles", "masked_tiles", "plain_tiles"),
        persistent=pipeline.scheduler == "static",
        shares=("rescale_rate",),
    )


def _signals(pipeline: PiecesPipeline, stages: int) -> list[Signal]:
    """Every signal with its arrive counts; one meaning each."""

    pair, alone = pipeline.cta_group, pipeline.rescales_alone
    q_bytes = WARPGROUP * pipeline.head_dim * pipeline.element_bytes * pair
    signals = [*ring("kv", "load", "mma", stages, tx_bytes=kv_slot_bytes(pipeline) * pair)]
    if output_over_queries(pipeline):
        signals.append(
            Signal(name="o_stored", arrivals={"epilogue": 32}, waiters=("load",), free=1)
        )
    for i in range(pipeline.q_tiles):
        names = [f"softmax{chain_name(pipeline, i, g)}" for g in range(pipeline.groups)]
        inline = pipeline.correction == "inline"
        fixers = dict.fromkeys(names if inline else ["correction"], 128)
        signals += ring(f"q{i}", "load", "mma", pipeline.q_buffers, tx_bytes=q_bytes)
        signals += [
            Signal(name=f"epi{i}_full", arrivals=fixers, waiters=("epilogue",)),
            Signal(name=f"epi{i}_empty", arrivals={"epilogue": 32}, waiters=tuple(fixers), free=1),
        ]
        # With warps of its own the rescale of a work tile's first piece waits for nothing, and the
        # last P V is one of all.
        ends = {"o": 0} if inline or alone else {}
        ends |= {} if alone else {"pv": int(inline)}
        for name, free in ends.items():
            end = f"{name}{i}_full" if name == "o" else f"{name}{i}_done"
            signals.append(Signal(name=end, arrivals={"mma": 1}, waiters=tuple(fixers), free=free))
        for g, softmax in enumerate(names):
            signals += _of_chain(pipeline, i, g, softmax)
    return signals


def _of_chain(pipeline: PiecesPipeline, i: int, g: int, softmax: str) -> list[Signal]:
    """Signals of one softmax warpgroup."""
    name, pair, stages = chain_name(pipeline, i, g), pipeline.cta_group, pipeline.buffers
    inline = pipeline.correction == "inline"
    ready = {softmax: 128 * pair}
    if g == 0 and not inline:
        ready["correction"] = 128 * pair
    if g == 0 and inline:  # all of them have rescaled their columns of O
        ready = {f"softmax{chain_name(pipeline, i, h)}": 128 * pair for h in range(pipeline.groups)}
    remote = pair == 2
    found = [
        Signal(name=f"s{name}_full", arrivals={"mma": 1}, waiters=(softmax,), stages=stages),
        Signal(name=f"p{name}_full", arrivals=ready, waiters=("mma",), stages=stages,
               remote=remote),
    ]  # fmt: skip
    if pipeline.split_columns < pipeline.piece:
        found.append(Signal(name=f"p{name}_last", arrivals={softmax: 4 * pair}, waiters=("mma",),
                            stages=stages, remote=remote))  # fmt: skip
    if pipeline.groups > 1:
        other = f"softmax{chain_name(pipeline, i, 1 - g)}"
        found.append(Signal(name=f"max{name}_full", arrivals={softmax: 128}, waiters=(other,),
                            kind="named", stages=2))  # fmt: skip
    if not inline:
        # Sums are told once in a work tile; there are not named barriers for all.
        what, kind = ("stats", "named") if g == 0 else ("sum", "mbarrier")
        found += [
            Signal(name=f"{what}{name}_full", arrivals={softmax: 128}, waiters=("correction",),
                   kind=kind),
            Signal(name=f"{what}{name}_empty", arrivals={"correction": 128}, waiters=(softmax,),
                   kind=kind),
        ]  # fmt: skip
    return found
