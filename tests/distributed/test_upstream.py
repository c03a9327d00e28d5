"""Twenty ways in which sharded attention has gone wrong elsewhere, each planted and caught.

Most gave wrong numbers and no error. Some are faults of a plan, which the checker finds, the others
of what computes blocks or of the call, which the comparison with the oracle finds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from fa4.distributed.blocks import SequenceMask
from fa4.distributed.check import check_plan
from fa4.distributed.exact import ExactCalculator
from fa4.distributed.layout import RowLayout, make_layout
from fa4.distributed.methods import make_plan
from fa4.distributed.plan import Sizes, Spec
from tests.distributed.draws import Inputs, backward_here, forward_here, worst
from tests.distributed.mutants import MUTANTS, plan_of

BUDGET = 1e-12
DOCUMENTS = (0, 7, 16, 30)
ROWS = DOCUMENTS[-1]


def make_spec(method: str = "ring", layout: str = "documents", ranks: int = 3) -> Spec:
    """Packed documents, causal, grouped heads."""
    rows = make_layout(layout, ROWS, ranks, cu_seqlens=DOCUMENTS)
    mask = SequenceMask(None, 0, DOCUMENTS)
    return Spec(method, rows, rows, mask, Sizes(4, 2, 4, 3, 1, 8))


def differs(spec: Spec, calculator: Any) -> bool:
    """Is anything but the oracle's numbers found: O, LSE, dQ, dK, dV?"""
    inputs = Inputs.of(spec, 1)
    wanted = inputs.attend()
    found = (
        *forward_here(spec, inputs, calculator),
        *backward_here(spec, inputs, wanted, calculator),
    )
    wanted_all = (*wanted, *inputs.gradients())
    return any(worst(x, y) > BUDGET for x, y in zip(found, wanted_all, strict=True))


def honest(**fields: Any) -> ExactCalculator:
    """What the faults are compared with."""
    return ExactCalculator(make_spec().sizes, 0.5, **fields)


@dataclass(frozen=True)
class Faulty(ExactCalculator):
    """Computes blocks, then something is done to them.

    merge: in place of the merge. attended: of (O, LSE) and the block. given: of what the gradient
    of a block is given. seen: of keys and values.
    """

    merge: Callable[..., tuple[Any, Any]] | None = None
    attended: Callable[..., tuple[Any, Any]] | None = None
    given: Callable[..., Any] | None = None
    seen: Callable[..., Any] | None = None

    def attend(self, q: Any, kv: Any, part: Any) -> Any:
        """A block."""
        found = super().attend(q, self.seen(kv) if self.seen else kv, part)
        return self.attended(*found) if self.attended else found

    def differentiate(self, g: Any, kv: Any, part: Any, wanted: Any) -> Any:
        """Its gradients."""
        g = self.given(self, g, kv, part) if self.given else g
        return super().differentiate(g, kv, part, wanted)

    def accumulate(self, kind: str, into: Any, more: Any) -> None:
        """Merge."""
        if self.merge is None or kind != "o":
            super().accumulate(kind, into, more)
            return
        with np.errstate(all="ignore"):
            out, lse = self.merge(*into, *more)
        into[0][...], into[1][...] = out, lse


def faulty(**fields: Any) -> Faulty:
    """With one fault."""
    return Faulty(make_spec().sizes, 0.5, **fields)


def _sigmoid_merge(out: Any, lse: Any, more: Any, more_lse: Any) -> tuple[Any, Any]:
    """NaN where both have seen no key."""
    share = 1 / (1 + np.exp(lse - more_lse))
    return out - share * (out - more), lse - np.log(1 / (1 + np.exp(more_lse - lse)))


def _log1p_merge(out: Any, lse: Any, more: Any, more_lse: Any) -> tuple[Any, Any]:
    """Infinite where the later block dominates."""
    total = np.where(np.isneginf(lse), more_lse, lse + np.log(1 + np.exp(more_lse - lse)))
    safe = np.where(np.isneginf(total), 0.0, total)
    return out * np.exp(lse - safe) + more * np.exp(more_lse - safe), total


def _as_other_strides(lse: np.ndarray) -> np.ndarray:
    """What is laid out (rows, heads), read as (heads, rows)."""
    batch, rows, heads, one = lse.shape
    return np.ascontiguousarray(lse).reshape(batch, heads, rows, one).swapaxes(1, 2)


def _first_heads_only(out: Any, lse: Any) -> tuple[Any, Any]:
    """LSE written for the first head of each KV group, the others left as they were."""
    lse = lse.copy()
    lse[:, :, 1::2] = 0.0
    return out, lse


def _local_lse(self: Faulty, g: Any, kv: Any, part: Any) -> Any:
    """The gradient of a block from the block's own LSE."""
    _, lse = ExactCalculator.attend(self, (g[0],), kv, part)
    return g[0], g[1], lse, g[3]


def _as_other_memory(kv: Any) -> Any:
    """K and V read as if a view were contiguous: rows of another head."""
    k, v = kv
    return _as_other_strides(k), v


def _divided_offsets() -> bool:
    """Each rank's offsets are the global ones divided by the ranks: 7 rows become 6."""
    spec = make_spec()
    cut = tuple(x // spec.ranks * spec.ranks for x in DOCUMENTS)
    plan = make_plan(replace(spec, mask=SequenceMask(None, 0, cut)))
    return bool(check_plan(replace(plan, spec=spec)).findings)


def _padding_as_tail() -> bool:
    """Documents moved together, as if what pads them stood behind the last one."""
    other = make_plan(replace(make_spec(), mask=SequenceMask(None, 0, (0, 8, 17, ROWS))))
    return bool(check_plan(replace(other, spec=make_spec())).findings)


def _remainder_dropped() -> bool:
    """Documents must divide by 2P: what is left over is on no rank."""
    spec = make_spec()
    shards = tuple(tuple(run[: len(run) // 2 * 2] for run in runs) for runs in spec.rows.shards)
    plan = make_plan(replace(spec, rows=RowLayout("cut", ROWS, shards)))
    held = {row for program in plan.programs for run in program.holds[0][1].rows for row in run}
    return held != set(range(ROWS)) and bool(check_plan(plan).findings or len(held) < ROWS)


def _overflows(calculator: Any) -> bool:
    """Are there infinities or NaN among logits of thousands?"""
    inputs = Inputs.of(make_spec(), 1)
    found = forward_here(make_spec(), replace(inputs, q=inputs.q * 3e3), calculator)
    return not all(np.isfinite(x).all() for x in found)


def _sinks(times: int) -> bool:
    """A large sink, put into each of so many partial results."""
    spec = make_spec()
    sink = np.full(4, 20.0)
    inputs = Inputs.of(spec, 2, learnable_sink=sink)
    out, lse = forward_here(spec, Inputs.of(spec, 2), honest())
    for _ in range(times):
        total = np.logaddexp(lse, sink[:, None])
        out, lse = out * np.exp(lse - total), total
    return worst(out, inputs.attend()[0]) > BUDGET


def _scaled_gradients(factor: float) -> bool:
    """A loss that is divided, or not, by the ranks: every gradient is off by a factor."""
    spec = make_spec()
    inputs = Inputs.of(spec, 3)
    found = backward_here(spec, inputs, inputs.attend(), honest())
    return any(
        worst(x * factor, y) > BUDGET for x, y in zip(found, inputs.gradients(), strict=True)
    )


def _local_positions() -> bool:
    """A bias by distance, from the numbers that rows and keys have on their rank."""
    spec = replace(make_spec(layout="zigzag"), mask=SequenceMask(None, 0, (0, ROWS)))

    def local(s: Any, h: Any, i: Any, j: Any) -> Any:
        return s - 0.25 * (np.arange(i.size)[:, None] - np.arange(j.size))

    inputs = Inputs.of(spec, 4, score_mod=lambda s, b, h, i, j, *_: s - 0.25 * (i - j))
    right = honest(score_mod=lambda s, h, i, j: s - 0.25 * (i - j))
    assert worst(forward_here(spec, inputs, right)[0], inputs.attend()[0]) < BUDGET
    wrong = honest(score_mod=local)
    return worst(forward_here(spec, inputs, wrong)[0], inputs.attend()[0]) > BUDGET


def _padded_apart() -> bool:
    """Query heads and KV heads made divisible each by themselves: a head reads another's keys."""
    spec = replace(make_spec("ulysses", ranks=2), sizes=Sizes(4, 2, 4, 3, 1, 8))
    other = make_plan(replace(spec, sizes=Sizes(4, 4, 4, 3, 1, 8)))
    return bool(check_plan(replace(other, spec=spec)).findings)


def _disagreement() -> bool:
    """Ranks whose plans differ: found before anything is sent, as messages that do not fit."""
    plan, other = plan_of(), plan_of(layout="contiguous")
    mixed = replace(plan, programs=(plan.programs[0], *other.programs[1:]))
    return plan.spec.digest != other.spec.digest and bool(check_plan(mixed).findings)


def _mutant(name: str) -> bool:
    options, change, _ = MUTANTS[name]
    return bool(check_plan(change(plan_of(**options))).findings)


FAULTS: dict[str, Callable[[], bool]] = {
    "1 two partial results of no key merge to NaN": lambda: differs(
        make_spec(), faulty(merge=_sigmoid_merge)
    ),
    "2 the merge overflows where a later block dominates": lambda: _overflows(
        faulty(merge=_log1p_merge)
    ),
    "3 offsets of documents divided by the ranks": _divided_offsets,
    "4 padding between documents taken for a tail": _padding_as_tail,
    "5 what does not divide by 2P is left out": _remainder_dropped,
    "6 the backward pass reads the keys of step 0": lambda: _mutant(
        "the keys of step 0 at every step"
    ),
    "7 LSE of one layout read as the other": lambda: differs(
        make_spec(), faulty(attended=lambda out, lse: (out, _as_other_strides(lse)))
    ),
    "8 strides of the LSE ignored by the gradient": lambda: differs(
        make_spec(),
        faulty(given=lambda self, g, kv, part: (g[0], g[1], _as_other_strides(g[2]), g[3])),
    ),
    "9 LSE of the first head of each group alone": lambda: differs(
        make_spec(), faulty(attended=_first_heads_only)
    ),
    "10 K that is not contiguous read as if it were": lambda: differs(
        make_spec(), faulty(seen=_as_other_memory)
    ),
    "11 the sink left out": lambda: _sinks(0),
    "11 the sink put into every rank's part": lambda: _sinks(3),
    "12 the window ignored": lambda: _mutant("the window is ignored"),
    "13 the loss scaled by the ranks": lambda: _scaled_gradients(3.0),
    "14 gradients from the LSE of a step": lambda: differs(make_spec(), faulty(given=_local_lse)),
    "15 positions of the rank, not of the sequence": _local_positions,
    "16 the causal shortcut without a mask": lambda: _mutant("the causal half without a mask"),
    "17 read before it has arrived": lambda: _mutant("a wait is missing"),
    "18 query and KV heads padded apart": _padded_apart,
    "19 ranks disagree about the plan": _disagreement,
    "20 sends and receives in an order that hangs": lambda: _mutant("all send first"),
}


def test_there_are_twenty() -> None:
    """Numbered as in the documentation."""
    assert {int(name.split()[0]) for name in FAULTS} == set(range(1, 21))


@pytest.mark.parametrize("name", FAULTS)
def test_upstream_faults_are_caught(name: str) -> None:
    """Each shows."""
    assert FAULTS[name]()


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    """Otherwise the tests above would say nothing."""
    assert not differs(make_spec(), honest())
    assert not differs(make_spec(), faulty())
    assert not _overflows(honest())
    assert not _sinks(1) and not _scaled_gradients(1.0)


@pytest.mark.parametrize("layout", ["documents", "zigzag", "contiguous", "striped"])
@pytest.mark.parametrize("method", ["ring", "all_gather", "pass_q"])
def test_other_layouts_and_methods_are_not_rejected(layout: str, method: str) -> None:
    """Right variants pass the same comparison."""
    assert not differs(make_spec(method, layout), honest())
