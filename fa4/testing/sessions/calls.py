"""Sessions without pages: lengths that change, prefill in chunks, and others in the same call."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from fa4.testing.backends import Backend
from fa4.testing.budget import Outputs
from fa4.testing.case import Case
from fa4.testing.sessions.session import (
    GARBAGE,
    CallSession,
    ImpossibleStep,
    SequenceRows,
    inputs_of,
)

SEQUENCES = 3
MOST_ROWS, MOST_KEYS = 9, 40  # of a sequence
CHUNKED_KEYS = 160  # more than a tile of 128
Lengths = tuple[int, int]


class ReplaySession(CallSession):
    """The same tensors with other lengths, as a captured graph is replayed: layout "padded"
    (seqused_q, seqused_k) or "packed" (cu_seqlens_q, cu_seqlens_k, longest lengths that stay)."""

    name = "replay"
    STEPS = ("lengths", "values")

    def __init__(self, backend: Backend, case: Case) -> None:
        super().__init__(backend, case)
        self.packed = case.layout == "packed"
        sides = ((SEQUENCES * MOST_ROWS,), (SEQUENCES * MOST_KEYS,))
        if not self.packed:
            sides = ((SEQUENCES, MOST_ROWS), (SEQUENCES, MOST_KEYS))  # type: ignore[assignment]
        self.q = self.buffer(*sides[0], case.heads_q, case.head_dim)
        self.k = self.buffer(*sides[1], case.heads_k, case.head_dim)
        self.v = self.buffer(*sides[1], case.heads_k, case.head_dim_v)
        self.counts = [np.zeros(SEQUENCES + self.packed, np.int32) for _ in range(2)]
        self.now: tuple[Lengths, ...] = ((2, 5),) * SEQUENCES

    def lengths(self, *lengths: Lengths) -> None:
        """(rows, keys) of each sequence; 0 of either is a length like others."""
        if len(lengths) != SEQUENCES or any(
            not (0 <= rows <= MOST_ROWS and 0 <= keys <= MOST_KEYS) for rows, keys in lengths
        ):
            raise ImpossibleStep(f"lengths {lengths}")
        self.now = lengths
        self._call()

    def values(self) -> None:
        """Other values at the same lengths."""
        self._call()

    def _call(self) -> None:
        for buffer in (self.q, self.k, self.v):
            buffer[...] = GARBAGE
        parts, index, first = [], ([], []), [0, 0]  # type: ignore[var-annotated]
        for b, lengths in enumerate(self.now):
            parts.append(SequenceRows(self.draw_rows(lengths[0], b), *self.draw_keys(lengths[1])))
            for side, count in enumerate(lengths):
                at = slice(first[side], first[side] + count) if self.packed else slice(count)
                index[side].append((at,) if self.packed else (b, at))
                first[side] += count
                self.counts[side][b + self.packed] = first[side] if self.packed else count
            self.q[index[0][b]] = parts[b].q
            self.k[index[1][b]], self.v[index[1][b]] = parts[b].k, parts[b].v
        names = "cu_seqlens" if self.packed else "seqused"
        options: dict[str, Any] = {
            f"{names}_{side}": count for side, count in zip("qk", self.counts, strict=True)
        }
        if self.case.causal:
            options["causal"] = True
        longest = (MOST_ROWS, MOST_KEYS) if self.packed else (0, 0)
        self.call(inputs_of((self.q, self.k, self.v), parts, index, options, longest))


class ChunkSession(CallSession):
    """Causal prefill of one sequence, a chunk of rows after the other, against one prefill.

    Where the back end claims to be "chunk_invariant", each row has the bits of the one prefill.
    """

    name = "chunks"
    STEPS = ("chunk",)

    def __init__(self, backend: Backend, case: Case) -> None:
        super().__init__(backend, case)
        self.q = self.draw_rows(CHUNKED_KEYS)
        self.k, self.v = self.draw_keys(CHUNKED_KEYS)
        self.done = 0
        self._whole: Outputs | None = None

    def chunk(self, count: int) -> None:
        """The next rows; the keys so far."""
        stop = self.done + count
        if not 0 < count <= CHUNKED_KEYS - self.done:
            raise ImpossibleStep(f"{count} rows behind {self.done}")
        if self._whole is None:
            self._whole = self._rows(0, CHUNKED_KEYS)
        part = self._rows(self.done, stop)
        if "chunk_invariant" in self.backend.claims:
            whole = self._whole.out[0, self.done : stop]
            _same_rows(whole, part.out[0], f"rows {self.done} to {stop} apart")
        self.done = stop

    def _rows(self, start: int, stop: int) -> Outputs:
        rows = SequenceRows(self.q[start:stop], self.k[:stop], self.v[:stop])
        arrays = tuple(x[None].copy() for x in rows)
        return self.call(inputs_of(arrays, [rows], ([0], [0]), {"causal": True}))  # type: ignore[arg-type]


class BatchSession(CallSession):
    """Sequences in one call have the bits that each has alone, whatever their order and number.

    layout "dense" (all of one length) or "packed".
    """

    name = "batch"
    STEPS = ("together",)
    LENGTHS = ((3, 33), (1, 129), (7, 20), (2, 257), (5, 64))

    def __init__(self, backend: Backend, case: Case) -> None:
        super().__init__(backend, case)
        lengths = [(5, 129)] * 5 if case.layout == "dense" else list(self.LENGTHS)
        self.parts = [
            SequenceRows(self.draw_rows(rows, b), *self.draw_keys(keys))
            for b, (rows, keys) in enumerate(lengths)
        ]
        self._alone: dict[int, np.ndarray] = {}

    def together(self, *numbers: int) -> None:
        """One call of the sequences of these numbers, in this order."""
        if not numbers or any(n >= len(self.parts) for n in numbers):
            raise ImpossibleStep(f"sequences {numbers}")
        for n in numbers:
            if n not in self._alone:
                (self._alone[n],) = self._outputs((n,))
        for n, out in zip(numbers, self._outputs(numbers), strict=True):
            _same_rows(self._alone[n], out, f"sequence {n} among {numbers}")

    def _outputs(self, numbers: tuple[int, ...]) -> list[np.ndarray]:
        parts = [self.parts[n] for n in numbers]
        options: dict[str, Any] = {"causal": True} if self.case.causal else {}
        if self.case.layout == "dense":
            arrays = tuple(np.stack([getattr(x, name) for x in parts]) for name in "qkv")
            index: tuple[Any, Any] = (list(range(len(parts))),) * 2
        else:
            arrays = tuple(np.concatenate([getattr(x, name) for x in parts]) for name in "qkv")
            index = ([], [])
            for side, name in enumerate("qk"):
                stops = np.cumsum([0, *(len(getattr(x, name)) for x in parts)]).astype(np.int32)
                options[f"cu_seqlens_{name}"] = stops
                index[side].extend(slice(a, b) for a, b in pairwise(stops.tolist()))
        longest = (0, 0)
        if self.case.layout != "dense":
            longest = max(len(x.q) for x in parts), max(len(x.k) for x in parts)
        inputs = inputs_of(arrays, parts, index, options, longest)  # type: ignore[arg-type]
        return inputs.split_rows(self.call(inputs).out)


def _same_rows(before: np.ndarray, now: np.ndarray, what: str) -> None:
    """AssertionError unless two outputs have the same bits."""
    a, b = (x.astype(np.float64) for x in (before, now))
    if not np.array_equal(a, b, equal_nan=True):
        at = tuple(int(i) for i in np.argwhere(a != b)[0])
        raise AssertionError(f"{what}: out{list(at)} = {b[at]:.9g}, and {a[at]:.9g} alone")
