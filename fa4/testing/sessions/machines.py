"""Hypothesis draws the steps of a session: a `RuleBasedStateMachine` whose rules are its methods.

`machine_of` makes one for `fa4 verify`, and for a TestCase of one's own (`sessions.own_tests`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from fa4.testing.backends import Backend, NotCovered
from fa4.testing.case import Case
from fa4.testing.sessions.cache import SLOTS, CacheSession
from fa4.testing.sessions.calls import BatchSession, ChunkSession, ReplaySession
from fa4.testing.sessions.session import CallSession, ImpossibleStep
from fa4.testing.sessions.tree import WIDTHS, TreeSession
from fa4.testing.walk import Walk

SESSIONS: dict[str, type[CallSession]] = {
    session.name: session
    for session in (CacheSession, ReplaySession, ChunkSession, TreeSession, BatchSession)
}

_slots, _small = st.integers(0, SLOTS - 1), st.integers(1, 5)
_rows, _keys = st.sampled_from((1, 0, 2, 3, 9)), st.sampled_from((5, 0, 1, 16, 17, 40))
_lengths = st.tuples(_rows, _keys)
# Of each session, each step: the strategies of its arguments.
ARGUMENTS: dict[str, dict[str, tuple[st.SearchStrategy[Any], ...]]] = {
    "cache": {
        "add": (st.integers(1, 12),),
        "append": (_slots, _small),
        "truncate": (_slots, _small),
        "evict": (_slots,),
        "move": (_slots, st.integers(0, 3)),
        "fork": (_slots,),
        "share": (_slots, st.integers(1, 3), _small),
        "free": (_slots,),
    },
    "replay": {"lengths": (_lengths, _lengths, _lengths), "values": ()},
    "chunks": {"chunk": (st.sampled_from((1, 3, 16, 17, 64)),)},
    "tree": {"propose": (st.integers(1, 13), st.sampled_from(WIDTHS)),
             "accept": (st.integers(0, 12),)},
    "batch": {"together": (st.integers(0, 4), st.integers(0, 4), st.integers(0, 4))},
}  # fmt: skip


def open_session(name: str, backend: Backend, case: Case) -> CallSession:
    """A session by its name, as a pasted test opens it."""
    return SESSIONS[name](backend, case)


def replay(backend: Backend, walk: Walk) -> float:
    """Take all steps of a walk; the largest share of the budget that was used."""
    session = open_session(walk.session, backend, walk.case)
    for name, *arguments in walk.steps:
        session.do(name, *arguments)
    return session.worst


class SessionMachine(RuleBasedStateMachine):
    """One walk: a session on the `backend` of one of the `cases`, and what it came to.

    finished is called with the machine at its end, whether or not a step failed: `error` holds what
    it raised. A step without a meaning is left out.
    """

    backend: Backend
    session_name: str
    cases: Sequence[Case]
    finished: Callable[[SessionMachine], None] | None = None
    session: CallSession | None = None
    error: Exception | None = None

    def open(self, number: int, seed: int) -> None:
        """Open the session."""
        fields = {**vars(self.cases[number % len(self.cases)]), "seed": seed}
        self.session = open_session(self.session_name, self.backend, Case(**fields))

    def take(self, name: str, *arguments: Any) -> None:
        """One step of the session; it raises what the step raises. None after a refused one."""
        assert self.session is not None
        if self.error is not None:
            return
        before = list(self.session.steps)
        try:
            self.session.do(name, *arguments)
        except ImpossibleStep:
            self.session.steps = before
        except Exception as error:
            self.error = error
            note("\n".join(self.session.walk.source("backend")))
            if not isinstance(error, NotCovered):
                raise

    def teardown(self) -> None:
        """Tell who waits for it."""
        if self.finished is not None:
            self.finished(self)


def machine_of(
    backend: Backend, session: str, steps: Sequence[str], cases: Sequence[Case]
) -> type[SessionMachine]:
    """A machine that takes these steps; `cases`: sizes and types, one of which each walk has."""
    rules = {step: _rule_of(step, ARGUMENTS[session][step]) for step in steps}

    @initialize(number=st.integers(0, len(cases) - 1), seed=st.integers(0, 99))
    def start(self: SessionMachine, number: int, seed: int) -> None:
        self.open(number, seed)

    given: dict[str, Any] = {"backend": backend, "session_name": session, "cases": tuple(cases)}
    name = f"{session.capitalize()}Machine"
    return type(name, (SessionMachine,), rules | given | {"start": start, "__doc__": "See base."})


def _rule_of(name: str, arguments: tuple[st.SearchStrategy[Any], ...]) -> Any:
    """A rule that takes a step; always open, as Hypothesis refuses a machine where none is."""

    def step(self: SessionMachine, **drawn: Any) -> None:
        self.take(name, *drawn.values())

    step.__name__ = name
    drawn = {f"argument_{n}": strategy for n, strategy in enumerate(arguments)}
    return rule(**drawn)(step)
