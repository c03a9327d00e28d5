"""The stateful properties: one kind of step each beside those that it needs, then all together.

Listed walks come first, as the cases of a design do; Hypothesis draws others beyond them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fa4.testing.backends import Backend
from fa4.testing.case import Case
from fa4.testing.property import Plan, Property
from fa4.testing.sessions.machines import machine_of, replay
from fa4.testing.walk import Step, Walk

_SIZES: dict[str, Any] = {"heads_k": 2, "group": 2, "head_dim": 16, "head_dim_v": 16}
_PACKED: dict[str, Any] = {"layout": "packed", "lengths": ((1, 1),)}
_CACHE = frozenset({"paged", "causal"})
_GROW: tuple[Step, ...] = (("add", 5), ("append", 0, 2), ("append", 0, 3))
_REPLAYED: tuple[Step, ...] = (
    ("lengths", (2, 5), (1, 17), (3, 4)),
    ("values",),
    ("lengths", (1, 40), (0, 3), (9, 1)),
    ("lengths", (1, 0), (2, 16), (2, 17)),
)
_WINDOW: dict[str, Any] = {"window_size": (5, None)}


def _property(
    name: str,
    description: str,
    session: str,
    steps: Sequence[str],
    walk: tuple[Step, ...],
    needs: frozenset[str] = _CACHE,
    **fields: Any,
) -> Property:
    sizes = _SIZES | ({"page_size": 4} if session == "cache" else {}) | fields

    def cases(dtypes: Sequence[str]) -> list[Case]:
        other = sizes | {"group": 1, "heads_k": 1}
        return [Case(dtype=dtype, **shape) for dtype in dtypes for shape in (sizes, other)]

    def listed(plan: Plan) -> list[Any]:
        return [Walk(session, Case(dtype=dtype, **sizes), walk) for dtype in plan.dtypes[:1]]

    def machine(backend: Backend, dtypes: Sequence[str]) -> Any:
        return machine_of(backend, session, steps, cases(dtypes))

    return Property(
        name, description, replay, listed=listed, machine=machine,  # type: ignore[arg-type]
        needs=needs, dtypes=("bf16", "fp16", "fp32"), levels=(), first_look=1,
    )  # fmt: skip


_BOTH = ("add", "append")
SESSION_PROPERTIES: tuple[Property, ...] = (
    _property("replay_seqused", "the same tensors with other seqused", "replay",
              ("lengths", "values"),
              _REPLAYED,
              frozenset({"seqused", "causal"}), causal=True),
    _property("replay_cu_seqlens", "the same tensors with other cu_seqlens", "replay",
              ("lengths", "values"),
              _REPLAYED,
              frozenset({"varlen", "causal"}), causal=True, **_PACKED),
    _property("cache_append", "keys appended to pages, and new pages", "cache", _BOTH,
              (*_GROW, ("add", 3), ("append", 1, 1), ("append", 0, 4))),
    _property("cache_truncate", "keys that were taken back, and others in their place", "cache",
              (*_BOTH, "truncate"),
              (*_GROW, ("truncate", 0, 3), ("append", 0, 3), ("truncate", 0, 5), ("append", 0, 1))),
    _property("cache_evict", "a sequence without its oldest page", "cache", (*_BOTH, "evict"),
              (*_GROW, ("evict", 0), ("append", 0, 3), ("evict", 0), ("add", 6))),
    _property("cache_window", "pages behind a window, which others have by now", "cache", _BOTH,
              (*_GROW, ("append", 0, 5), ("add", 9), ("append", 0, 4)),
              _CACHE | {"window_size"}, **_WINDOW),
    _property("cache_move", "a page that lies elsewhere", "cache", (*_BOTH, "move"),
              (*_GROW, ("move", 0, 0), ("move", 0, 2), ("append", 0, 1), ("move", 0, 1))),
    _property("cache_fork", "a second sequence of the same pages, then written", "cache",
              (*_BOTH, "fork"),
              (*_GROW, ("fork", 0), ("append", 0, 1), ("append", 1, 3), ("fork", 1))),
    _property("cache_prefix", "a prefix that sequences share, then written behind", "cache",
              (*_BOTH, "share"),
              (*_GROW, ("share", 0, 2, 1), ("append", 1, 4), ("share", 0, 1, 5),
               ("append", 0, 1))),
    _property("cache_free", "pages of a sequence that ended, given to another", "cache",
              (*_BOTH, "free"),
              (*_GROW, ("add", 7), ("free", 0), ("add", 10), ("append", 1, 2), ("free", 1),
               ("add", 10))),
    _property("cache_everything", "all steps of a cache", "cache",
              (*_BOTH, "truncate", "evict", "move", "fork", "share", "free"),
              (*_GROW, ("fork", 0), ("truncate", 1, 3), ("append", 1, 2), ("share", 0, 1, 2),
               ("free", 0), ("evict", 1), ("add", 9))),
    _property("chunked_prefill", "prefill in chunks is one prefill", "chunks", ("chunk",),
              (("chunk", 3), ("chunk", 64), ("chunk", 1), ("chunk", 17)), frozenset({"causal"})),
    _property("speculative_tree", "a tree of drafts, and its accepted branch", "tree",
              ("propose", "accept"),
              (("propose", 7, 2), ("accept", 4), ("propose", 13, 3), ("accept", 12),
               ("propose", 5, 1), ("accept", 2)), frozenset({"mask_mod", "causal"})),
    _property("batch_invariance", "a sequence has the same bits whatever else is in the call",
              "batch", ("together",), (("together", 0, 1), ("together", 2, 0, 4)),
              frozenset({"batch_invariant"}), layout="dense"),
    _property("batch_invariance_varlen", "a packed sequence has the same bits beside others",
              "batch", ("together",), (("together", 0, 1), ("together", 3, 0, 4)),
              frozenset({"batch_invariant", "varlen", "causal"}), causal=True, **_PACKED),
    _property("chunk_invariance", "a row has the same bits in whatever chunk it is", "chunks",
              ("chunk",), (("chunk", 3), ("chunk", 64), ("chunk", 1), ("chunk", 17)),
              frozenset({"causal", "chunk_invariant"})),
)  # fmt: skip
