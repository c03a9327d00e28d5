"""Steps that follow one another: honest back ends take them, a failure is few of them, as code."""

from __future__ import annotations

import inspect
import unittest
from contextlib import suppress
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fa4.reference import SeqlenInfo
from fa4.testing import Case, Walk, isolate, load_backend, open_session, session_test, verify
from fa4.testing.contract import Backend
from fa4.testing.guard import KeptGuard, copies_of
from fa4.testing.inputs import Inputs
from fa4.testing.property import Plan
from fa4.testing.refusals import NotCovered
from fa4.testing.sessions.cache import MOST_ROWS as CACHE_ROWS
from fa4.testing.sessions.cache import NOBODY, SLOTS, CacheSession
from fa4.testing.sessions.calls import (
    MOST_KEYS,
    MOST_ROWS,
    SEQUENCES,
    BatchSession,
    ReplaySession,
)
from fa4.testing.sessions.machines import ARGUMENTS, SESSIONS, replay
from fa4.testing.sessions.properties import SESSION_PROPERTIES
from fa4.testing.sessions.session import GARBAGE, ImpossibleStep
from fa4.testing.sessions.tree import MOST_NODES, WIDTHS
from tests.testing.planted.fault import Fault
from tests.testing.planted.sessions import INVARIANT

HERE = "tests.testing.planted"
STEPS = ["replay_*", "cache_*", "chunked_prefill", "speculative_tree"]


def run_test(test: type[unittest.TestCase]) -> unittest.TestResult:
    """The result of all tests of a TestCase."""
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(test).run(result)
    return result


def test_an_honest_back_end_takes_all_steps() -> None:
    """Every kind, listed and drawn."""
    report = verify(f"{HERE}:honest", only=STEPS, seed=3, max_examples=8)
    assert {result.status for result in report.results} == {"passed"}
    assert all(result.cases == 3 for result in report.results)


def row_by_row(q, k, v, *, causal=False):
    """Each row in a call of its own, with the keys that it sees."""
    honest, hidden = load_backend(f"{HERE}:honest").function, k.shape[1] - q.shape[1] + 1
    stops = [min(hidden + row, k.shape[1]) if causal else k.shape[1] for row in range(q.shape[1])]
    rows = [honest(q[:, n : n + 1], k[:, :stop], v[:, :stop]) for n, stop in enumerate(stops)]
    return np.concatenate(rows, axis=1)


def test_what_is_claimed_and_kept_passes() -> None:
    """Bits that depend on a row and its keys alone; without the claim it is not asked for."""
    keeps = Fault("keeps", "", "", (), kernel=INVARIANT, declares={"claims": {"batch_invariant"}})
    report = verify(keeps.attention(), only=["batch_invariance*"], max_examples=8)
    assert [(row.status, row.cases) for row in report.results] == [("passed", 3)] * 2
    alone = load_backend(row_by_row)
    for claims, status in ((frozenset({"chunk_invariant"}), "passed"), (set(), "not covered")):
        (row,) = verify(replace(alone, claims=claims), only=["chunk_invariance"]).results
        assert row.status == status and bool(row.cases) == bool(claims), row.error


@pytest.mark.parametrize("least", [2, 1000])
@pytest.mark.parametrize("prop", STEPS)
def test_refused_steps_are_no_error_of_the_kit(prop: str, least: int) -> None:
    """Of a function that takes no single row, or nothing at all: not covered, or judged without."""
    honest = load_backend(f"{HERE}:honest").function

    def choosy(q, k, v, **options):
        if q.shape[1] < least:
            raise NotImplementedError(f"fewer than {least} rows")
        return honest(q, k, v, **options)

    def choosy_varlen(q, k, v, **options):
        if len(q) < least:
            raise NotImplementedError(f"fewer than {least} rows")
        return honest.varlen(q, k, v, **options)

    choosy.varlen = choosy_varlen  # type: ignore[attr-defined]
    choosy.__signature__ = inspect.signature(honest)  # type: ignore[attr-defined]
    report = verify(choosy, only=[prop], seed=3, max_examples=8)
    wanted = {"not covered"} if least > 2 else {"passed", "not covered"}
    assert {result.status for result in report.results} <= wanted


@pytest.mark.parametrize(
    ("name", "prop", "steps"),
    [("prefix_taken_whole", "cache_fork", 3), ("keys_converted_once", "cache_truncate", 3),
     ("table_by_number", "cache_evict", 3)],
)  # fmt: skip
def test_a_failure_is_few_steps(name: str, prop: str, steps: int) -> None:
    """The smallest sequence, as a test that fails when it is pasted."""
    (result,) = verify(f"{HERE}:{name}", only=[prop]).results
    walk = eval(result.example, {"Walk": Walk, "Case": Case})
    assert result.status == "failed" and len(walk.steps) == steps
    assert result.test.count("    session.") == steps
    namespace: dict = {}
    exec(compile(result.test, "pasted", "exec"), namespace)
    with pytest.raises(AssertionError):
        namespace[f"test_{prop}"]()


def test_drawn_steps_find_what_no_list_holds() -> None:
    """Without the listed walk, Hypothesis finds the fault; more steps may be asked for."""
    from fa4.testing import VerifyOptions, find_properties
    from fa4.testing.runner import run_property

    (prop,) = find_properties(["cache_truncate"])
    backend = load_backend(f"{HERE}:keys_converted_once")
    options = VerifyOptions(max_examples=60, steps=20)
    result = run_property(replace(prop, listed=None), backend, options)
    assert result.status == "failed" and "truncate" in result.needs, result


def test_a_test_case_for_a_suite_of_ones_own() -> None:
    """Hypothesis' own, which passes and fails as the property does."""
    how = {"max_examples": 5, "stateful_step_count": 8, "phases": [Phase.generate]}
    assert run_test(session_test("cache_fork", f"{HERE}:honest", **how)).wasSuccessful()
    found = run_test(session_test("cache_fork", f"{HERE}:table_by_address", **how))
    assert len(found.failures) + len(found.errors) == 1
    with pytest.raises(ValueError, match="with steps"):
        session_test("plain", "reference")
    with pytest.raises(NotCovered, match="batch_invariant"):
        session_test("batch_invariance", "reference")


def test_the_memory_stays_in_a_process_of_its_own() -> None:
    """There, too, a fault of what is kept by address shows."""
    backend = isolate(f"{HERE}:seqused_by_address")
    try:
        (result,) = verify(backend, only=["replay_seqused"]).results
    finally:
        backend.close()
    assert result.status == "failed"


def test_kept_arguments_are_one_array() -> None:
    """New elements, the same memory, with what a framework made of it; a write is seen."""
    guard, x = KeptGuard(), np.arange(6.0).reshape(2, 3)
    first = guard.place("q", x)
    assert copies_of(first) == {} and copies_of(x) is None
    x += 1
    again = guard.place("q", x)
    assert again is first and (again == x).all()
    guard.remember()
    guard.check()
    first[0, 0] = -1
    with pytest.raises(AssertionError, match="q was changed in place"):
        guard.check()


@pytest.mark.parametrize("prop", SESSION_PROPERTIES, ids=lambda prop: prop.name)
def test_the_inputs_of_a_call_are_whole(prop) -> None:
    """Gradients of O and the LSE have their shapes, in the buffers and in every sequence."""
    seen: list[Inputs] = []
    oracle = load_backend("oracle")

    class Noting(Backend):
        def forward(self, inputs, kept_guard=None):
            seen.append(inputs)
            return oracle.forward(inputs, kept_guard)

    backend = Noting("noting", oracle.function, oracle.varlen, oracle.backward)
    (walk,) = prop.listed(Plan(("fp32",), 1, 0))[:1]
    replay(backend, replace(walk, case=replace(walk.case, head_dim=8, head_dim_v=16)))
    for inputs in seen:
        heads, wide = inputs.q.shape[-2], inputs.v.shape[-1]
        assert wide == 16 and inputs.dout.shape == (*inputs.q.shape[:-1], wide)
        assert inputs.dlse.shape[-2:] == (heads, inputs.q.shape[-3])
        for rows, part in zip(inputs.split_rows(inputs.dout), inputs.sequences, strict=True):
            assert part.dout.shape == rows.shape == (*part.q.shape[:-1], wide)
            assert part.dlse.shape == (heads, len(part.q))
    assert seen


def test_steps_that_have_no_meaning() -> None:
    """They end a walk, and are no failure."""
    session = open_session("cache", load_backend("oracle"), Case(page_size=4))
    session.do("add", 3)
    for step in (("fork", 2), ("truncate", 0, 3), ("evict", 0), ("append", 0, 99), ("move", 0, 3)):
        with pytest.raises(ImpossibleStep):
            session.do(*step)
    with pytest.raises(ValueError, match="no step of the session"):
        session.do("attend")


@given(
    st.lists(
        st.tuples(st.sampled_from(CacheSession.STEPS), *(st.integers(0, x) for x in (3, 6, 9))),
        max_size=25,
    ),
    st.sampled_from(((None, None), (1, 0), (6, 0))),
    st.sampled_from((1, 4)),
)
@settings(max_examples=60)
def test_no_page_is_lost(steps: list[tuple[str, int, int, int]], window: tuple, size: int) -> None:
    """Each is free, or of a sequence with keys in it that a row may see; when all have ended, all
    are free."""
    case = Case(page_size=size, head_dim=8, head_dim_v=8, window_size=window)
    session = open_session("cache", load_backend("oracle"), case)
    assert isinstance(session, CacheSession)
    pages = set(session.free_pages)
    for name, *values in [("add", min(9, 6 * size), 0, 0), ("add", 3, 0, 0), *steps]:
        taken = len(inspect.signature(getattr(session, name)).parameters)
        with suppress(ImpossibleStep):
            session.do(name, *values[:taken])
        used = {page for one in session.sequences.values() for page in one.pages} - {NOBODY}
        assert used.isdisjoint(session.free_pages) and used | set(session.free_pages) == pages
        assert len(session.free_pages) == len(pages) - len(used)
        for one in session.sequences.values():
            assert len(one.pages) == -(-one.length // size)
            unseen = 0 if window[0] is None else max(0, one.length - CACHE_ROWS - window[0])
            assert [page == NOBODY for page in one.pages] == [
                at < unseen // size for at in range(len(one.pages))
            ]
    for slot in list(session.sequences):
        session.do("free", slot)
    assert sorted(session.free_pages) == sorted(pages)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_replay_fills_its_buffers(layout: str, monkeypatch) -> None:
    """At the most rows and keys no row of a buffer is left over, in front, between or behind."""
    seen: list[Inputs] = []
    case = Case(layout=layout, lengths=((2, 5),) * SEQUENCES)
    session = ReplaySession(load_backend(f"{HERE}:honest"), case)
    monkeypatch.setattr(session, "call", seen.append)
    session.do("lengths", *((MOST_ROWS, MOST_KEYS),) * SEQUENCES)
    for buffer, most in ((seen[0].q, MOST_ROWS), (seen[0].k, MOST_KEYS), (seen[0].v, MOST_KEYS)):
        assert buffer.size == SEQUENCES * most * buffer.shape[-2] * buffer.shape[-1]
        assert (buffer != GARBAGE).all()


def drawn(session: str, step: str) -> list[tuple]:
    """Arguments of a step, as many walks draw them."""
    found: list[tuple] = []

    @given(st.tuples(*ARGUMENTS[session][step]))
    @settings(max_examples=300, database=None, derandomize=True, phases=[Phase.generate])
    def note(arguments: tuple) -> None:
        found.append(arguments)

    note()
    return found


def test_steps_are_drawn_to_their_edges() -> None:
    """Every slot, width, node and sequence; lengths from none to all that a buffer takes."""
    assert {name: set(steps) for name, steps in ARGUMENTS.items()} == {
        name: set(session.STEPS) for name, session in SESSIONS.items()
    }
    lengths = [one for step in drawn("replay", "lengths") for one in step]
    for side, most in zip(zip(*lengths, strict=True), (MOST_ROWS, MOST_KEYS), strict=True):
        assert (min(side), max(side)) == (0, most)
    nodes, widths = zip(*drawn("tree", "propose"), strict=True)
    assert set(nodes) == set(range(1, MOST_NODES + 1)) and set(widths) == set(WIDTHS)
    assert {node for (node,) in drawn("tree", "accept")} == set(range(MOST_NODES))
    batch = {n for step in drawn("batch", "together") for n in step}
    assert batch == set(range(len(BatchSession.LENGTHS)))
    for step, strategies in ARGUMENTS["cache"].items():
        first = {arguments[0] for arguments in drawn("cache", step)}
        assert step == "add" or first == set(range(SLOTS)), (step, strategies)
    assert min(count for *_, count in drawn("cache", "append")) == 1


@pytest.mark.parametrize("width", WIDTHS)
def test_a_node_sees_the_prefix_and_its_way_to_the_root(width: int) -> None:
    """And nothing else: no brother, no child."""
    from fa4.testing.sessions.tree import _MASKS

    prefix, rows = 3, np.arange(MOST_NODES)
    info = SeqlenInfo(MOST_NODES, prefix + MOST_NODES)
    seen = _MASKS[width](0, 0, rows[:, None], np.arange(prefix + MOST_NODES), info, None)
    children = iter(range(1, MOST_NODES))
    ways: dict[int, set[int]] = {0: {0}}
    for parent in range(MOST_NODES):
        for child in islice(children, width):
            ways[child] = ways[parent] | {child}
    for node in range(MOST_NODES):
        wanted = {*range(prefix), *(prefix + n for n in ways[node])}
        assert set(np.flatnonzero(seen[node]).tolist()) == wanted, node


LESS = st.one_of(st.integers(0, 9), st.tuples(st.integers(0, 9), st.integers(0, 9)))


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), LESS, st.integers(0, 40)), min_size=1))
def test_a_smaller_walk_is_part_of_it_or_one_number_less(steps: list[tuple]) -> None:
    """Steps left out, or the same steps with one number nearer to 0, whatever the arguments."""

    def numbers(step: tuple) -> list[int]:
        return [*(step[1] if isinstance(step[1], tuple) else step[1:2]), step[2]]

    walk = Walk("cache", Case(), tuple(steps))
    found = list(walk.simpler())
    for smaller in found:
        assert smaller.steps
        if len(smaller.steps) < len(steps):
            rest = iter(steps)
            assert all(step in rest for step in smaller.steps)
            continue
        (changed,) = [(a, b) for a, b in zip(steps, smaller.steps, strict=True) if a != b]
        before, after = map(numbers, changed)
        assert type(changed[1][1]) is type(changed[0][1]) and changed[0][0] == changed[1][0]
        (pair,) = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
        assert 0 <= pair[1] < pair[0]
    lengths = {len(smaller.steps) for smaller in found}
    assert len(steps) == 1 or {len(steps) - 1, len(steps) - len(steps) // 2} <= lengths
    less = {at for at, step in enumerate(steps) if any(numbers(step))}
    shrunk = {
        at for x in found if len(x.steps) == len(steps)
        for at, (a, b) in enumerate(zip(steps, x.steps, strict=True)) if a != b
    }  # fmt: skip
    assert shrunk == less


def test_walks_get_smaller() -> None:
    """Fewer steps first, then smaller arguments, then a simpler case."""
    walk = Walk("replay", Case(dtype="bf16"), (("lengths", (2, 0), (1, 1), (0, 0)), ("values",)))
    found = list(walk.simpler())
    assert [x.steps for x in found[:2]] == [(("values",),), walk.steps[:1]]
    assert walk.steps[1:] == found[2].steps[1:] and found[2].steps[0][1] == (0, 0)
    less = [x.steps[0][1][0] for x in Walk("replay", Case(), (("lengths", (9, 0)),)).simpler()]
    assert less[:4] == [0, 1, 4, 8]
    assert found[-1].case == Case() and walk.needs == ("values",)
    assert eval(repr(walk), {"Walk": Walk, "Case": Case}) == walk
