"""Speculative decoding with a tree of drafts: a mask of ancestors, then the accepted branch.

Node n of a tree of width w has the parent (n - 1) // w; a node sees the prefix, its ancestors and
itself. Width 1 is a chain. When a node is accepted, the keys of its branch are put behind the
prefix, the others are dropped, and the branch is attended to again, as a chain under the causal
mask: its rows must be what the tree gave, within the budgets of both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fa4.testing.backends import Backend
from fa4.testing.budget import Outputs, expect_forward
from fa4.testing.case import Case
from fa4.testing.inputs import Inputs
from fa4.testing.metamorphic import agree
from fa4.testing.sessions.session import CallSession, ImpossibleStep, SequenceRows, inputs_of

FIRST_KEYS, MOST_KEYS = 30, 150
MOST_NODES = 13


def _ancestors(width: int, i: Any, j: Any, info: Any) -> Any:
    """May node i see key j? Written with operators alone, for NumPy and torch."""
    node = j - (info.seqlen_k - info.seqlen_q)
    seen = node < 0
    for _ in range(MOST_NODES + 1):
        seen = seen | (node == i)
        i = (i - 1) // width
    return seen


def chain_mask(b: Any, h: Any, i: Any, j: Any, info: Any, aux: Any) -> Any:
    """Drafts one behind the other."""
    return _ancestors(1, i, j, info)


def tree_mask_2(b: Any, h: Any, i: Any, j: Any, info: Any, aux: Any) -> Any:
    """Two drafts behind each."""
    return _ancestors(2, i, j, info)


def tree_mask_3(b: Any, h: Any, i: Any, j: Any, info: Any, aux: Any) -> Any:
    """Three drafts behind each."""
    return _ancestors(3, i, j, info)


_MASKS: dict[int, Callable[..., Any]] = {1: chain_mask, 2: tree_mask_2, 3: tree_mask_3}
WIDTHS = tuple(_MASKS)


class TreeSession(CallSession):
    """A prefix that grows by accepted branches."""

    name = "tree"
    STEPS = ("propose", "accept")

    def __init__(self, backend: Backend, case: Case) -> None:
        super().__init__(backend, case)
        self.k, self.v = self.draw_keys(FIRST_KEYS)
        self._draft: tuple[int, SequenceRows, Inputs, Outputs] | None = None

    def propose(self, nodes: int, width: int) -> None:
        """A tree of drafts behind the prefix, all in one call."""
        if width not in _MASKS or not 0 < nodes <= min(MOST_NODES, MOST_KEYS - len(self.k)):
            raise ImpossibleStep(f"{nodes} nodes of width {width}")
        keys, values = self.draw_keys(nodes)
        draft = SequenceRows(self.draw_rows(nodes), keys, values)
        inputs, outputs = self._attend(draft, {"mask_mod": _MASKS[width]})
        self._draft = width, draft, inputs, outputs

    def accept(self, node: int) -> None:
        """The branch from the root to a node joins the prefix."""
        if self._draft is None or node >= len(self._draft[1].q):
            raise ImpossibleStep(f"no node {node}")
        width, draft, inputs, outputs = self._draft
        branch = [node]
        while branch[0] > 0:
            branch.insert(0, (branch[0] - 1) // width)
        rows = SequenceRows(*(x[branch] for x in draft))
        again, chain = self._attend(rows, {"causal": True})
        allowed = [
            expect_forward(x, numerics=self.backend.numerics)["out"].allowed[0]
            for x in (inputs, again)
        ]
        tree = outputs.out[0, branch].astype(np.float64)
        agree("out", chain.out[0].astype(np.float64), tree, allowed[0][branch] + allowed[1])
        self.k, self.v = np.concatenate([self.k, rows.k]), np.concatenate([self.v, rows.v])
        self._draft = None

    def _attend(self, draft: SequenceRows, options: dict[str, Any]) -> tuple[Inputs, Outputs]:
        """SequenceRows of the draft against the prefix and the draft."""
        keys, values = np.concatenate([self.k, draft.k]), np.concatenate([self.v, draft.v])
        part = SequenceRows(draft.q, keys, values)
        arrays = draft.q[None], keys[None], values[None]
        inputs = inputs_of(arrays, [part], ([0], [0]), options)
        return inputs, self.call(inputs)
