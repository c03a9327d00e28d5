"""FlashAttention-4's forward kernel on Blackwell, and its variants, as a plan.

One CTA (or each CTA of a pair) works on one or two Q tiles of 128 rows. Per KV tile and Q tile i:
S_i = Q_i K^T (tensor core) -> softmax_i: P_i over S_i -> O_i += P_i V. With ping-pong the tensor
core runs PV0, QK0', PV1, QK1', so that one Q tile's softmax hides behind the other's products. The
correction warps rescale O between products, off the softmax warps' path.

Memory is laid out in `forward_layout`, the roles' programs are in `forward_roles`; this file puts
them together and owns the signals.
"""

from __future__ import annotations

from fa4.config import ForwardPipeline
from fa4.hardware import Gpu
from fa4.plan.forward_layout import (
    kv_slot_bytes,
    lay_out,
    output_over_queries,
    registers,
    split_columns,
    steals_work,
)
from fa4.plan.forward_roles import (
    correction_role,
    epilogue_role,
    load_role,
    mma_role,
    softmax_role,
)
from fa4.plan.schema import PipelinePlan, Signal, ring
from fa4.plan.work import WARPGROUP
from fa4.plan.work_stealing import steal_work


def forward_plan(pipeline: ForwardPipeline, gpu: Gpu) -> PipelinePlan:
    """The plan of a forward kernel. Raises ValueError if it does not fit the machine."""
    if gpu.tmem_cols == 0:
        raise ValueError(f"this plan needs tensor memory; {gpu.name} has none")
    if pipeline.numerics.tile_m != WARPGROUP:
        raise ValueError(
            f"tile_m must be {WARPGROUP}, the lanes of tensor memory; "
            f"got {pipeline.numerics.tile_m}"
        )
    if pipeline.numerics.tile_n % 32:
        raise ValueError(f"tile_n must be a multiple of 32; got {pipeline.numerics.tile_n}")
    buffers = lay_out(pipeline, gpu)
    stages = next(b for b in buffers if b.name == "kv").stages
    roles = [softmax_role(pipeline, tile) for tile in range(pipeline.numerics.q_tiles)]
    if pipeline.correction == "warpgroup":
        roles.append(correction_role(pipeline))
    roles += [mma_role(pipeline), epilogue_role(pipeline), load_role(pipeline, stages)]
    signals = _signals(pipeline, stages)
    if steals_work(pipeline):
        roles, of_work = steal_work(roles, registers(pipeline).others)
        signals += of_work
    return PipelinePlan(
        name=f"forward d{pipeline.head_dim}x{pipeline.head_dim_v} cta_group {pipeline.cta_group}",
        roles=tuple(roles),
        signals=tuple(signals),
        buffers=tuple(buffers),
        cta_group=pipeline.cta_group,
        trips=("kv_tiles", "masked_tiles", "plain_tiles"),
        shares=("rescale_rate",),
    )


def _signals(pipeline: ForwardPipeline, stages: int) -> list[Signal]:
    """Every signal with its arrive counts; one meaning each."""
    pair, q_tiles = pipeline.cta_group, pipeline.numerics.q_tiles
    inline = pipeline.correction == "inline"
    q_bytes = WARPGROUP * pipeline.head_dim * pipeline.element_bytes * pair
    signals = [*ring("kv", "load", "mma", stages, tx_bytes=kv_slot_bytes(pipeline) * pair)]
    if output_over_queries(pipeline):
        signals.append(
            Signal(name="o_stored", arrivals={"epilogue": 32}, waiters=("load",), free=1)
        )
    for i in range(q_tiles):
        softmax = f"softmax{i}"
        fixer = softmax if inline else "correction"
        p_ready = {softmax: 128 * pair} if inline else {softmax: 128 * pair, fixer: 128 * pair}
        signals += ring(f"q{i}", "load", "mma", 1, tx_bytes=q_bytes)
        signals += [
            Signal(name=f"s{i}_full", arrivals={"mma": 1}, waiters=(softmax,)),
            Signal(
                name=f"p{i}_full_o{i}_scaled",
                arrivals=p_ready,
                waiters=("mma",),
                remote=pair == 2,
            ),
            Signal(name=f"o{i}_full", arrivals={"mma": 1}, waiters=(fixer,)),
            Signal(name=f"epi{i}_full", arrivals={fixer: 128}, waiters=("epilogue",)),
            Signal(name=f"epi{i}_empty", arrivals={"epilogue": 32}, waiters=(fixer,), free=1),
        ]
        if split_columns(pipeline) < pipeline.numerics.tile_n:
            signals.append(
                Signal(
                    name=f"p{i}_last",
                    arrivals={softmax: 4 * pair},
                    waiters=("mma",),
                    remote=pair == 2,
                )
            )
        if inline:
            signals.append(
                Signal(name=f"pv{i}_done", arrivals={"mma": 1}, waiters=(softmax,), free=1)
            )
            continue
        signals += [
            Signal(name=f"stats{i}_full", arrivals={softmax: 128}, waiters=("correction",),
                   kind="named"),
            Signal(name=f"stats{i}_empty", arrivals={"correction": 128}, waiters=(softmax,),
                   kind="named"),
        ]  # fmt: skip
    return signals
