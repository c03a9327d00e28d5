"""A sharded call that autograd records: forward by one plan, backward by another.

Saved are the rank's own q, k, v, O and LSE; keys travel again for the gradients. A sink belongs to
a row, not to a key: it is put into the merged result, once. Its gradient is that of this rank's
rows, as every parameter's is, and is reduced over the group with them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from fa4.distributed.execute import Channel, Executor, Tensors
from fa4.distributed.group import GroupChannel, run_rank
from fa4.distributed.methods import check_spec, make_plan, make_program
from fa4.distributed.plan import RankProgram, Spec
from fa4.distributed.public import BlockKernel, PublicCalculator


@lru_cache(maxsize=64)
def program_of(spec: Spec, rank: int) -> RankProgram:
    """A rank's program, made once."""
    return make_program(spec, rank)


@lru_cache(maxsize=64)
def places_of(spec: Spec) -> Any:
    """Where messages lie in the inboxes, for all ranks."""
    from fa4.distributed.peers import Places

    return Places(make_plan(spec))


@dataclass(frozen=True)
class ShardedCall:
    """What a rank computes, with whom. spec: of the forward pass, checked."""

    spec: Spec
    rank: int
    group: Any
    kernel: BlockKernel
    softmax_scale: float
    softcap: float
    transport: str = "group"

    def channel(self, spec: Spec) -> Channel:
        """What carries the messages of one execution."""
        if self.transport == "group":
            return GroupChannel(self.group)
        from fa4.distributed.peers import PeerChannel

        return PeerChannel(self.group, places_of(spec))

    def run(self, backward: bool, given: dict[str, Tensors]) -> dict[str, Tensors]:
        """One pass on this rank."""
        spec = check_spec(replace(self.spec, backward=backward))
        like = given["kv"][0]
        calculator = PublicCalculator(
            spec.sizes, self.kernel, like, self.softmax_scale, self.softcap
        )
        program = program_of(spec, self.rank)
        executor = Executor(program, spec.sizes, calculator, self.channel(spec))
        with torch.no_grad():
            return run_rank(executor, given)


def attend(
    job: ShardedCall, q: Any, k: Any, v: Any, sink: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(O, LSE) of this rank's rows, LSE (B, heads, rows); recorded by autograd."""
    out, lse = _Sharded.apply(q, k, v, sink, job)
    return out, lse


def add_sink(out: Any, lse: Any, sink: Any) -> tuple[Any, Any]:
    """O and LSE (B, rows, heads, 1) of rows that also have a sink's logit."""
    logits = sink.to(lse.dtype)[:, None]
    total = torch.logaddexp(lse, logits)
    safe = torch.where(total == -float("inf"), 0.0, total)
    return (out * torch.exp(lse - safe)).to(out.dtype), total


class _Sharded(torch.autograd.Function):
    """O and LSE; the LSE takes no gradient."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, sink: Any, job: ShardedCall) -> Any:
        """By the plan of the forward pass."""
        out, lse = job.run(False, {"q": (q,), "kv": (k, v)})["o"]
        if sink is not None:
            out, lse = add_sink(out, lse, sink)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.job = job
        shown = lse[..., 0].transpose(1, 2)
        ctx.mark_non_differentiable(shown)
        ctx.set_materialize_grads(False)
        return out, shown

    @staticmethod
    def backward(ctx: Any, dout: Any, _: Any) -> Any:
        """By that of the backward pass."""
        q, k, v, sink, out, lse = ctx.saved_tensors
        if dout is None:
            return None, None, None, None, None
        found = ctx.job.run(True, {"q": (q, dout, lse, out), "kv": (k, v)})
        dsink = None
        if sink is not None:
            delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1, keepdim=True)
            share = torch.exp(sink.to(lse.dtype)[:, None] - lse)
            dsink = -(share * delta).sum((0, 1))[:, 0].to(sink.dtype)
        (dq,), (dk, dv) = found["dq"], found["dkv"]
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsink, None
