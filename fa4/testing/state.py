"""Properties of what calls do to memory and keep from one another.

The guard around every call (`fa4.testing.guard`) looks at arguments and padding whatever is asked
for; here it is asked for in every layout, forward and backward, so that a fault of memory is found
under its own name. The rest compares calls: the same one again, with another one between, in
another thread, and two that differ in one thing, which the second must not take from the first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fa4.testing.backends import Backend, NotCovered
from fa4.testing.budget import (
    Outputs,
    assert_within_budget,
    expect_gradients,
    split_outputs,
)
from fa4.testing.case import Case
from fa4.testing.checks import differentiate, gradient_inputs, same_bits, saved_by
from fa4.testing.layouts import build_inputs
from fa4.testing.metamorphic import agree
from fa4.testing.property import Plan, Property
from fa4.testing.shrink import SIZES
from fa4.testing.turns import ThreadTurns, count_calls

_SHAPE: dict[str, Any] = {"heads_k": 2, "head_dim": 32, "head_dim_v": 32}
_DENSE = _SHAPE | {"batch": 2, "seqlen_q": 5, "seqlen_k": 33}
_SEQUENCES = _SHAPE | {"lengths": ((3, 20), (0, 4), (5, 33))}
# What a layout needs, and a small case of it.
_LAYOUTS: tuple[tuple[frozenset[str], dict[str, Any]], ...] = (
    (frozenset(), _DENSE),
    (frozenset(), _DENSE | {"strides": "fused", "group": 2}),
    (frozenset(), _DENSE | {"seqlen_q": 130, "seqlen_k": 129, "batch": 1}),
    (frozenset({"varlen"}), _SEQUENCES | {"layout": "packed"}),
    (frozenset({"seqused"}), _SEQUENCES | {"layout": "padded"}),
    (frozenset({"paged"}), _SEQUENCES | {"layout": "paged"}),
    (frozenset({"varlen"}), _SEQUENCES | {"layout": "packed", "slack": "buffer"}),
)
_THREAD_CALLS = 3  # of each thread, as they come, and so many more in turns
_TURNS = 12  # of a call


def _in_layouts(*, padded: bool = False) -> Callable[[Plan], list[Case]]:
    """A `Property.listed`: a case of each layout offered in turn of element types.

    All properties have the same case of a layout: what a call keeps for later ones of its shapes
    has a property of its own.
    """

    def listed(plan: Plan) -> list[Case]:
        fields = [fields for needs, fields in _LAYOUTS if needs <= plan.offered]
        return [
            Case(dtype=plan.dtypes[n % len(plan.dtypes)], seed=plan.seed + n, **chosen)
            for n, chosen in enumerate(fields)
            if not padded or chosen.get("layout") in ("padded", "paged") or "slack" in chosen
        ]

    return listed


def inputs_unchanged(backend: Backend, case: Case) -> float:
    """A call leaves its arguments, and what lies next to them, as they were."""
    backend.forward(build_inputs(case))
    return 0.0


def gradient_inputs_unchanged(backend: Backend, case: Case) -> float:
    """So does a backward pass."""
    inputs = gradient_inputs(case)
    backend.gradients(inputs, saved_by(backend, inputs), with_dlse=case.dlse)
    return 0.0


def padded_gradients(backend: Backend, case: Case) -> float:
    """What no sequence uses has a gradient of 0, whatever lies there."""
    differentiate(backend, case, gradient_inputs(case))
    return 0.0


def padded_outputs(backend: Backend, case: Case) -> float:
    """O of rows that no sequence uses is finite: the next layer multiplies it by 0."""
    inputs = build_inputs(case)
    unused = inputs.unused(backend.forward(inputs).out, rows=True).astype(np.float64)
    if not np.isfinite(unused).all():
        raise AssertionError(
            f"out holds {unused[~np.isfinite(unused)][0]} in rows that no sequence uses"
        )
    return 0.0


def repeated_call(backend: Backend, case: Case) -> float:
    """The same call gives the same result again, and a second call leaves the first's alone."""
    return _repeated(backend.forward, build_inputs, case)


def repeated_gradients(backend: Backend, case: Case) -> float:
    """So do gradients: the same bits where the back end claims to be deterministic, else within
    both budgets."""

    def run(inputs: Any) -> Outputs:
        return backend.gradients(inputs, saved_by(backend, inputs), with_dlse=case.dlse)

    if "deterministic" in backend.claims:
        return _repeated(run, gradient_inputs, case)
    inputs, other = gradient_inputs(case), gradient_inputs(replace(case, seed=case.seed + 1))
    first = run(inputs)
    kept = _copied(first)
    run(other)
    same_bits(kept, first, "after another call: one buffer for both")
    again = split_outputs(inputs, run(inputs))
    expected = expect_gradients(inputs, numerics=backend.numerics)
    share = 0.0
    for name, parts in split_outputs(inputs, first).items():
        for n, part in enumerate(parts if name in expected else ()):
            first_part, second = (x.astype(np.float64) for x in (part, again[name][n]))
            allowed = 2 * expected[name].allowed[n]
            share = max(share, agree(name, first_part, second, allowed))
    return share


def _repeated(run: Callable[[Any], Outputs], build: Callable[[Case], Any], case: Case) -> float:
    inputs, other = build(case), build(replace(case, seed=case.seed + 1))
    first = run(inputs)
    kept = _copied(first)
    run(other)
    same_bits(kept, first, "a second call changed the result of the first")
    same_bits(kept, run(inputs), "the same call again")
    return 0.0


def _copied(outputs: Outputs) -> Outputs:
    return Outputs(*(None if x is None else np.array(x) for x in vars(outputs).values()))  # type: ignore[arg-type]


def second_thread(backend: Backend, case: Case) -> float:
    """Two threads that call at the same time get what one alone gets.

    NotCovered where the function is in another process: its calls come there one after another.
    """
    if backend.isolated:
        raise backend.missing("threads", "not reached: a worker process takes one call at a time")
    inputs = [build_inputs(replace(case, seed=case.seed + n)) for n in range(2)]
    alone = [backend.forward(x) for x in inputs]

    calls = count_calls(lambda: backend.forward(inputs[0]))
    turns = [ThreadTurns(max(1, calls // _TURNS)) for _ in range(_THREAD_CALLS)]

    def call(n: int) -> Outputs:
        return backend.forward(inputs[n])

    def work(n: int) -> None:
        try:
            for _ in range(_THREAD_CALLS):
                same_bits(alone[n], call(n), "the same call in a second thread")
            for turn in turns:
                found = turn.run(n, partial(call, n))
                same_bits(alone[n], found, "the same call in a second thread")
        finally:
            for turn in turns:
                turn.leave()

    with _hasty_threads(), ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(work, n) for n in range(2)]:
            done.result()
    return 0.0


@contextmanager
def _hasty_threads() -> Iterator[None]:
    """Threads take turns every 10 microseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def visible_nan(backend: Backend, case: Case) -> float:
    """NaN in q, in k or in v, at a pair that is visible, is NaN in the rows that see it."""
    for name in "qkv":
        inputs = build_inputs(case)
        array = getattr(inputs, name).copy()
        head, row, key = (int(i) for i in np.argwhere(inputs.sequences[0].visible)[-1])
        at = (0, row, head) if name == "q" else (0, key, head // case.group)
        array[(*at, 0)] = np.nan
        out = backend.forward(replace(inputs, **{name: array})).out[0, row, head]
        if not np.isnan(out[:1].astype(np.float64)).all():
            where = ", ".join(map(str, (*at, 0)))
            raise AssertionError(
                f"{name}[{where}] is NaN and row {row} of head {head} sees it, but out is {out[0]}"
            )
    return 0.0


def _after_another(
    first: Mapping[str, Any], second: Mapping[str, Any], *, gradients: bool
) -> Callable[..., float]:
    """A check: a call with `second` right after the same with `first`, and the first again.

    The first is judged, too: an earlier call of these shapes may have had what the second has.
    """

    def check(backend: Backend, case: Case) -> float:
        cases = [replace(case, **fields) for fields in (first, second)]
        inputs = [build_inputs(x) for x in cases]
        before = backend.forward(inputs[0])
        own: dict[str, Any] = {"numerics": backend.numerics}
        share = max(
            assert_within_budget(inputs[0], before, **own),
            assert_within_budget(inputs[1], backend.forward(inputs[1]), **own),
        )
        same_bits(before, backend.forward(inputs[0]), "the same call again")
        if not gradients or backend.reason_missing("gradients") is not None:
            return share
        try:
            differentiate(backend, cases[0], gradient_inputs(cases[0]))
            given = gradient_inputs(cases[1])
            grads = differentiate(backend, cases[1], given)
        except NotCovered:
            return share
        return max(share, assert_within_budget(given, grads, gradients_alone=True, **own))

    return check


# What differs between two calls of the same shapes: (name, needs, first, second).
_CHANGES: tuple[tuple[str, tuple[str, ...], dict[str, Any], dict[str, Any]], ...] = (
    ("values", (), {"seed": 3}, {"seed": 4}),
    ("window", ("window_size",), {"window_size": (9, None)}, {"window_size": (2, None)}),
    ("causal", ("causal",), {"causal": True}, {"causal": False}),
    ("scale", ("softmax_scale",), {"softmax_scale": 0.3}, {"softmax_scale": 0.11}),
    ("softcap", ("softcap",), {"softcap": 5.0}, {"softcap": 0.5}),
    ("sink", ("learnable_sink",), {"sink": 0.0}, {"sink": 2.5}),
    ("strides", (), {"strides": "heads_first"}, {"strides": "fused"}),
    ("dtype", (), {"dtype": "bf16"}, {"dtype": "fp16"}),
    ("heads", (), {"heads_k": 2, "group": 1}, {"heads_k": 1, "group": 2}),
    ("score_mod", ("score_mod",), {"score_mod": "alibi"}, {"score_mod": "temper"}),
    ("mask_mod", ("mask_mod",), {"mask_mod": "stripes"}, {"mask_mod": "documents"}),
    ("seed", ("dropout",), {"dropout_p": 0.5, "seed": 3}, {"dropout_p": 0.5, "seed": 4}),
    (
        "lengths",
        ("varlen",),
        {"layout": "packed", "lengths": ((3, 30), (14, 10))},
        {"layout": "packed", "lengths": ((14, 10), (3, 30))},
    ),
    (
        "seqused",
        ("seqused",),
        {"layout": "padded", "lengths": ((3, 30), (14, 10))},
        {"layout": "padded", "lengths": ((14, 10), (3, 30))},
    ),
    (
        "pages",
        ("paged",),
        {"layout": "paged", "lengths": ((3, 30), (14, 40)), "seed": 3},
        {"layout": "paged", "lengths": ((3, 30), (14, 40)), "seed": 9},
    ),
)


# They come right behind what is plain: forward alone, so that no fault of gradients is found there.
_ON_PLAIN_CALLS = ("values", "dtype", "heads")


def _cached(
    name: str, needs: tuple[str, ...], first: dict[str, Any], second: dict[str, Any]
) -> Property:
    def listed(plan: Plan) -> list[Case]:
        kinds = [x for x in plan.dtypes if name != "dtype" or x in ("bf16", "fp16")]
        shape = _DENSE | {"seqlen_q": 17, "seqlen_k": 40}
        return [Case(dtype=dtype, seed=3, **shape) for dtype in kinds[:2]]

    return Property(
        f"cached_{name}",
        f"nothing of a call of the same shapes with another {name.replace('_', ' ')} is used again",
        _after_another(first, second, gradients=name not in _ON_PLAIN_CALLS),
        listed=listed,
        needs=frozenset(needs),
        dtypes=("bf16", "fp16") if name == "dtype" else ("fp32", "bf16", "fp16", "fp64"),
        shrinks=SIZES - {"dtype", "seed", "group", "heads_k"},
        variants=(first, second),
        first_look=1,
    )


def _memory(
    name: str, description: str, check: Callable[[Backend, Case], float], **more: Any
) -> Property:
    given: dict[str, Any] = {"listed": _in_layouts(), "shrinks": SIZES, "first_look": len(_LAYOUTS)}
    return Property(name, description, check, **(given | more))


_BACKWARD = frozenset({"gradients"})
MEMORY: tuple[Property, ...] = (
    _memory("inputs_unchanged", "nothing but the results is written to", inputs_unchanged),
    _memory(
        "gradient_inputs_unchanged",
        "nothing but the gradients is written to, dO and O neither",
        gradient_inputs_unchanged,
        needs=_BACKWARD,
    ),
    _memory(
        "repeated_call",
        "the same call gives the same bits again, and its result stays",
        repeated_call,
    ),
    _memory(
        "repeated_gradients",
        "the same backward pass gives the same again, and its result stays",
        repeated_gradients,
        needs=_BACKWARD,
    ),
    _memory(
        "padded_gradients",
        "gradients of rows and keys that no sequence uses are 0",
        padded_gradients,
        listed=_in_layouts(padded=True),
        needs=_BACKWARD,
    ),
)
PLAIN_STATE = tuple(_cached(*change) for change in _CHANGES if change[0] in _ON_PLAIN_CALLS)
STATE: tuple[Property, ...] = (
    *(_cached(*change) for change in _CHANGES if change[0] not in _ON_PLAIN_CALLS),
    Property(
        "second_thread",
        "two threads at the same time get what one alone gets",
        second_thread,
        listed=lambda plan: [Case(dtype=plan.dtypes[0], **(_DENSE | {"seqlen_k": 257}))],
        shrinks=frozenset(),
        first_look=1,
    ),
    _memory(
        "padded_outputs",
        "O of rows that no sequence uses is finite",
        padded_outputs,
        listed=_in_layouts(padded=True),
        group="robustness",
    ),
    Property(
        "visible_nan",
        "NaN that a row sees is not dropped",
        visible_nan,
        listed=lambda plan: [
            Case(dtype=dtype, seqlen_q=7, seqlen_k=keys, group=2, head_dim=32, head_dim_v=32)
            for keys in (33, 300)
            for dtype in plan.dtypes
        ],
        group="robustness",
        shrinks=SIZES - {"head_dim", "head_dim_v"},
        first_look=2,
    ),
)
