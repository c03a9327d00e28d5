"""What the suite asks of a back end by default, as digests: `python -m tests.testing.suite_record`.

The run that `fa4 verify` makes without options is a contract with those who publish its result: the
cases of each property, the kit's own mask and score functions, and the values of each regime. Any
change of the tables behind them is a change of that contract, to be recorded on purpose by running
this module. What Hypothesis draws is recorded with its version, since another one draws others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis.strategies import SearchStrategy, tuples

from fa4.reference import SeqlenInfo
from fa4.testing import PROPERTIES, Case, Outputs, build_inputs, load_backend, strategies
from fa4.testing.atlas import BUGS
from fa4.testing.case import AUX_WIDTH, MASK_MODS, SCORE_MODS
from fa4.testing.contract import Backend
from fa4.testing.coverage import DECLARED
from fa4.testing.inputs import Inputs
from fa4.testing.property import Plan, Property
from fa4.testing.runner import run_property
from fa4.testing.sessions import machines
from fa4.testing.sessions.properties import SESSION_PROPERTIES
from fa4.testing.values import REGIMES

FILE = Path(__file__).with_name("suite.json")
DRAWS = 60  # of a strategy alone
BUILT = 2  # cases of a property that are built
LISTED = [prop for prop in PROPERTIES if prop.listed and not prop.machine]
HEADS, ROWS, KEYS = np.ix_(np.arange(3), np.arange(80), np.arange(90))


def digest(lines: Iterable[object]) -> str:
    """Sixteen hexadecimal digits of the lines' text."""
    return hashlib.sha256("\n".join(map(str, lines)).encode()).hexdigest()[:16]


def run_of(prop: Property) -> tuple[list[Case], dict[str, Any]]:
    """The cases that a back end without gaps is asked for by default, and the levels counted."""
    cases: list[Case] = []
    backend = load_backend("reference")
    noted = replace(prop, check=lambda _, case: float(bool(cases.append(case))), machine=None,
                    needs=prop.needs - DECLARED)  # fmt: skip
    result = run_property(noted, backend)
    assert result.status == "passed" and result.cases == len(cases), result
    return cases, result.levels


def asked_by(prop: Property) -> dict[str, Any]:
    """What a property is stated for, and the cases of its design with their levels."""
    if prop.listed is None:
        cases, levels = [], {}
    else:
        cases, levels = run_of(replace(prop, strategy=None))
    stated = (sorted(prop.needs), prop.dtypes, prop.group, prop.levels, sorted(prop.shrinks))
    return {
        "stated": digest([*stated, prop.first_look]),
        "listed": digest(map(repr, cases)),
        "levels": digest(sorted((name, sorted(counts.items())) for name, counts in levels.items())),
    }


def told(inputs: Inputs) -> Iterator[object]:
    """A call in figures: how its arrays lie, what they add up to, its options, its sequences."""
    arrays = {name: getattr(inputs, name) for name in ("q", "k", "v", "dout", "dlse")}
    for name, value in sorted((arrays | inputs.options | inputs.hints).items()):
        parts = value if isinstance(value, tuple) else (value,)
        for part in parts:
            if isinstance(part, np.ndarray):
                yield name, part.shape, part.strides, str(part.dtype), *figures_of(part)
            else:
                yield name, getattr(part, "__name__", None) or repr(part).partition(" at 0x")[0]
    found = inputs.split_rows(inputs.q), inputs.split_keys(inputs.k)
    for part, *lies in zip(inputs.sequences, *found, strict=True):
        yield part.q.shape, part.k.shape, int(part.visible.sum())
        yield from (figure for x in lies for figure in figures_of(x))
    yield inputs.shared


def figures_of(x: np.ndarray) -> Iterator[str]:
    """Size and two means, weighted by place: six digits, which do not hang on how they are added
    up."""
    wide = x.astype(np.float64).ravel()
    with np.errstate(all="ignore"):
        size = np.abs(wide).sum()
        yield f"{size:.6g}"
        for places in (97, 89):
            mean = (wide * (np.arange(wide.size) % places - places // 2)).sum() / size / places
            yield f"{mean:.6f}".replace("-0.000000", "0.000000")


def arrays_of(prop: Property) -> str:
    """What the first cases of a property are built to: a failure that somebody has published shows
    with every later version of the kit."""
    cases, _ = run_of(replace(prop, strategy=None))
    return digest(line for case in cases[:BUILT] for line in told(build_inputs(case)))


def calls_of(prop: Property) -> str:
    """The calls of the first walk of a property."""
    lines: list[object] = []
    oracle = load_backend("oracle")

    class Noting(Backend):
        def forward(self, inputs: Inputs, kept_guard: Any = None) -> Outputs:
            lines.extend(told(inputs))
            return oracle.forward(inputs, kept_guard)

    assert prop.listed is not None
    (walk,) = prop.listed(Plan(("fp32",), 1, 0))[:1]
    machines.replay(Noting("noting", oracle.function, oracle.varlen, oracle.backward), walk)
    return digest(lines)


def drawn_by(prop: Property) -> str:
    """What Hypothesis draws beyond the design, and the levels of that."""
    cases, levels = run_of(replace(prop, listed=None))
    return digest([*map(repr, cases), json.dumps(levels, sort_keys=True)])


def public_strategies() -> dict[str, Callable[..., SearchStrategy[Any]]]:
    """Those of `fa4.testing.strategies`, with windows of some lengths."""
    found = {
        name: function
        for name, function in vars(strategies).items()
        if getattr(function, "__module__", "") == strategies.__name__ and name != "windows"
    }
    return found | {"windows": partial(strategies.windows, 200, 300)}


def session_steps() -> dict[str, SearchStrategy[Any]]:
    """The arguments of each step of each session, as Hypothesis draws them for a walk."""
    return {
        f"{session} {step}": tuples(*arguments)
        for session, steps in machines.ARGUMENTS.items()
        for step, arguments in steps.items()
    }


def drawn_from(strategy: SearchStrategy[Any]) -> str:
    """What one seed draws from a strategy."""
    values: list[str] = []

    @seed(0)
    @settings(
        max_examples=DRAWS, database=None, deadline=None, derandomize=False,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck), verbosity=Verbosity.quiet,
    )  # fmt: skip
    @given(strategy)
    def draw(value: Any) -> None:
        values.append(repr(value))

    draw()
    return digest(values)


def mods() -> dict[str, str]:
    """Each mask and score function, and each derivative, over a grid with rectangular lengths."""
    info = SeqlenInfo(80, 90)
    table = np.arange(2 * 3 * AUX_WIDTH).reshape(2, 3, AUX_WIDTH)
    aux = (table / 8.0, (table % 3) - 1.0)
    where = (1, HEADS, ROWS, KEYS, info, aux)
    scores = (ROWS - KEYS) / 16.0 + HEADS
    found = {name: function(*where) for name, function in MASK_MODS.items()}
    for name, (forward, backward) in SCORE_MODS.items():
        found[name] = forward(scores, *where)
        found[f"{name} backward"] = backward(scores, scores, *where)
    return {
        name: digest(np.broadcast_to(value, (3, 80, 90)).astype(float).round(9).ravel().tolist())
        for name, value in found.items()
    }


def values() -> dict[str, dict[str, list[float]]]:
    """Mean, root mean square, least and largest of q, k and v of each regime, in two types."""
    found: dict[str, dict[str, list[float]]] = {}
    for name in REGIMES:
        for dtype in ("fp32", "fp16"):
            case = Case(seqlen_q=40, seqlen_k=300, heads_k=2, head_dim=32, head_dim_v=24,
                        dtype=dtype, values=name, seed=4)  # fmt: skip
            inputs = build_inputs(case)
            found[f"{name} {dtype}"] = {
                letter: [
                    float(f"{figure:.6g}")
                    for figure in (x.mean(), np.hypot.reduce(x) / x.size**0.5, x.min(), x.max())
                ]
                for letter in "qkv"
                for x in [getattr(inputs, letter).astype(np.float64).ravel()]
            }
    return found


def atlas() -> dict[str, str]:
    """What `fa4 verify --corpus` asks: the cases of each bug, and how they are judged."""
    return {
        name: digest([bug.probe, bug.arrangement, bug.needs, bug.group, *map(repr, bug.cases)])
        for name, bug in BUGS.items()
    }


def record() -> dict[str, Any]:
    """Everything that the file holds."""
    return {
        "hypothesis": hypothesis.__version__,
        "properties": {
            prop.name: asked_by(prop) | ({"drawn": drawn_by(prop)} if prop.strategy else {})
            for prop in PROPERTIES
        },
        "strategies": {name: drawn_from(make()) for name, make in public_strategies().items()},
        "sessions": {name: drawn_from(steps) for name, steps in session_steps().items()},
        "arrays": {prop.name: arrays_of(prop) for prop in LISTED},
        "calls": {prop.name: calls_of(prop) for prop in SESSION_PROPERTIES},
        "mods": mods(),
        "values": values(),
        "atlas": atlas(),
    }


def write() -> None:
    """The file, with an entry a line, so that a change of it can be read."""
    parts = []
    for title, content in record().items():
        text = json.dumps(content)
        if isinstance(content, dict):
            rows = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in content.items()]
            text = "{\n" + ",\n".join(rows) + "\n}"
        parts.append(f"{json.dumps(title)}: {text}")
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    write()
