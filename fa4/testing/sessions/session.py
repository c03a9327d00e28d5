"""What every session has: buffers that stay, steps that were taken, judgement by the oracle.

The buffers of a session are those of `fa4.testing.guard.KeptGuard`: the same memory in every call,
between canaries. What no sequence uses in them holds large finite numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fa4.dtypes import numpy_dtype, round_to
from fa4.testing.backends import Backend
from fa4.testing.budget import Outputs, assert_within_budget
from fa4.testing.case import Case
from fa4.testing.guard import KeptGuard
from fa4.testing.inputs import Inputs, SequenceInputs, visible_pairs
from fa4.testing.walk import Step, Walk

GARBAGE = 96.0


class ImpossibleStep(Exception):
    """A step that has no meaning where the session is; a walk with it is no walk."""


class SequenceRows(NamedTuple):
    """One sequence of a call: q (Sq, Hq, d), k (Sk, Hk, d), v (Sk, Hk, dv)."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


class CallSession:
    """Calls on the same buffers. Subclasses add the steps, methods with plain arguments.

    case: element type, heads, head dims, seed, window and page size; its lengths say nothing.
    worst: the largest part of the error budget that a call took. Every step raises AssertionError
    for a wrong result, NotCovered for what the back end does not offer, ImpossibleStep.
    """

    name = "session"
    STEPS: tuple[str, ...] = ()

    def __init__(self, backend: Backend, case: Case) -> None:
        self.backend, self.case = backend, case
        self.dtype = numpy_dtype(case.dtype)
        self.steps: list[Step] = []
        self.worst = 0.0
        self.calls = 0
        self.drawn = 0  # how many keys have been drawn: no two are the same
        self._kept = KeptGuard()

    @property
    def walk(self) -> Walk:
        """The steps so far."""
        return Walk(self.name, self.case, tuple(self.steps))

    def do(self, name: str, *arguments: Any) -> None:
        """Take a step by its name, and remember it."""
        if name not in self.STEPS:
            raise ValueError(f"{name!r} is no step of the session {self.name!r}: {self.STEPS}")
        self.steps.append((name, *arguments))
        getattr(self, name)(*arguments)

    def draw_keys(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """k (count, Hk, d) and v (count, Hk, dv) that no other keys of the session are like."""
        self.drawn += 1
        case, rng = self.case, np.random.default_rng([self.case.seed, self.drawn, 8])
        return (
            self.rounded(rng.standard_normal((count, case.heads_k, case.head_dim))),
            self.rounded(rng.standard_normal((count, case.heads_k, case.head_dim_v))),
        )

    def draw_rows(self, count: int, label: int = 0) -> np.ndarray:
        """q (count, Hq, d), others for every number of keys drawn and every label."""
        case = self.case
        rng = np.random.default_rng([case.seed, self.drawn, label, 9])
        return self.rounded(rng.standard_normal((count, case.heads_q, case.head_dim)))

    def rounded(self, x: np.ndarray) -> np.ndarray:
        """In the element type."""
        return round_to(x, self.case.dtype, saturate=True)

    def buffer(self, *shape: int) -> np.ndarray:
        """A buffer of the element type that holds garbage."""
        return np.full(shape, GARBAGE, self.dtype)

    def call(self, inputs: Inputs) -> Outputs:
        """The back end's result on the session's own buffers, within its budget."""
        self.calls += 1
        outputs = self.backend.forward(inputs, self._kept)
        used = assert_within_budget(inputs, outputs, numerics=self.backend.numerics)
        self.worst = max(self.worst, used)
        return outputs


def inputs_of(
    buffers: tuple[np.ndarray, np.ndarray, np.ndarray],
    sequences: Sequence[SequenceRows],
    index: tuple[Iterable[Any], Iterable[Any]],
    options: dict[str, Any],
    longest: tuple[int, int] = (0, 0),
) -> Inputs:
    """The `Inputs` of a call on buffers q, k and v that hold these sequences.

    index: where the rows and the keys of each lie in the buffers. longest: max_seqlen_q and _k.
    """
    q, k, v = buffers
    dense = {name: x for name, x in options.items() if not name.startswith(_LAYOUT)}
    parts = []
    for b, rows in enumerate(sequences):
        count, heads = rows.q.shape[:2]
        visible = visible_pairs(dense, b, heads, (count, len(rows.k)))
        dout = np.zeros((count, heads, v.shape[-1]), q.dtype)
        parts.append(SequenceInputs(*rows, dout, np.zeros((heads, count), np.float32), visible))
    q_index, kv_index = (tuple(x if isinstance(x, tuple) else (x,) for x in at) for at in index)
    lse = np.zeros((*q.shape[:-3], q.shape[-2], q.shape[-3]), np.float32)
    return Inputs(
        q=q, k=k, v=v, dout=np.zeros((*q.shape[:-1], v.shape[-1]), q.dtype), dlse=lse,
        options=options, sequences=tuple(parts), q_index=q_index, kv_index=kv_index,
        hints={"max_seqlen_q": longest[0], "max_seqlen_k": longest[1]} if any(longest) else {},
    )  # fmt: skip


_LAYOUT = ("cu_seqlens", "seqused", "page_table")
