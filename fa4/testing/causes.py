"""Failures by cause: what is wrong, and the features that it takes, whatever property showed it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fa4.testing.case import Case
from fa4.testing.levels import LENGTH_CLASSES, OUTPUTS, length_class

OUTPUT_NAMES = {"out": "O", "lse": "LSE", "dq": "dQ", "dk": "dK", "dv": "dV", "dsink": "dsink"}
FORWARD_OUTPUTS = ("out", "lse")
STATE_PREFIX, LEAST_STATES = "cached_", 4  # names of properties, and how many are one cause
STATE_KEPT = "a call changes the next one"
SESSION = "_session"  # ends what is said of calls in a row
PLAINEST = "on the plainest input"

_WORDS = {
    "window_size": "window",
    "num_splits": "split KV",
    "dropout_p": "dropout",
    "softmax_scale": "given scale",
    "packed": "packed sequences",
    "padded": "padded sequences",
    "paged": "pages",
    "descale": "descales",
    "sparse_block": "block lists",
    "strided": "padded strides",
    "dlse": "gradient of the LSE",
    "shared_prefix": "shared pages",
    "tau": "rescale threshold",
    "tiles": "given tiles",
    "batch": "several batch entries",
    "heads_k": "several KV heads",
    "sequences": "several sequences",
    "head_dim unlike head_dim_v": "unequal head dims",
}


@dataclass(frozen=True, kw_only=True)
class Symptom:
    """One thing that a failing property shows, as plain text.

    what: an output ("dk") or a kind of failure. needs: what the smallest case needs to show it, as
    `fa4.testing.shrink.needed_features` names it; words: the same for people ("GQA 3 x causal").
    example: that case; error: what happens; test: a test to paste; numpy, torch: the case as a
    program.
    """

    what: str
    needs: tuple[str, ...]
    words: str
    example: str
    error: str
    test: str
    numpy: str = ""
    torch: str = ""

    @property
    def is_output(self) -> bool:
        """Is an output wrong, and not something else?"""
        return self.what in OUTPUTS

    @property
    def key(self) -> frozenset[str]:
        """The needs without sizes, but for the class of a length: equal for one cause."""
        return frozenset(_without_size(need) for need in self.needs)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A symptom, the property that showed it, and how that is counted ("failed", "not robust")."""

    name: str
    status: str
    symptom: Symptom


@dataclass(frozen=True)
class FailureGroup:
    """Failures that one cause explains. cause: its name ("dK wrong with GQA 3 x causal"); whats:
    the outputs that are wrong, or a kind of failure; needs: the features that it takes;
    properties: those that show it; smallest: its simplest example."""

    cause: str
    whats: tuple[str, ...]
    needs: tuple[str, ...]
    properties: tuple[str, ...]
    status: str
    name: str
    smallest: Symptom

    @property
    def is_of_a_session(self) -> bool:
        """Does it take calls in a row?"""
        return self.whats[0].endswith(SESSION)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON: `smallest` is the property with the simplest example."""
        first = self.smallest
        return {
            "cause": self.cause,
            "outputs": [what for what in self.whats if what in OUTPUTS],
            "needs": list(self.needs),
            "properties": list(self.properties),
            "status": self.status,
            "smallest": self.name,
            "error": first.error,
            "example": first.example,
            "test": first.test,
            "numpy": first.numpy,
            "torch": first.torch,
        }


def describe_needs(case: Case, needs: Iterable[str]) -> str:
    """The features of a smallest case for people: "GQA 3 x causal x fp16"."""
    words = []
    for need in needs:
        name, _, size = need.partition(" ")
        if name == "group":
            words.append(f"GQA {case.group}")
        elif name == "length":
            words.append(f"length {size}")
        elif name in ("values", "strides", "slack", "score_mod", "mask_mod"):
            value = str(getattr(case, name)).replace("_", " ")
            words.append(name if name.endswith("_mod") else f"{name} {value!r}")
        elif name == "softmax_scale" and (case.softmax_scale or 0.0) <= 0:
            words.append("scale 0" if case.softmax_scale == 0 else "negative scale")
        else:
            words.append(_WORDS.get(need, need.replace("_", " ")))
    return " x ".join(words)


def group_failures(findings: Iterable[Evidence]) -> tuple[FailureGroup, ...]:
    """Findings by cause: failures first, single calls before calls in a row, then the fewest needs.

    One cause is the same features and the same outputs. Outputs of the forward pass and gradients
    with the same features are one cause where dV is wrong as well, which is P dO: P is wrong.
    """
    by_key: dict[tuple[Any, ...], list[Evidence]] = {}
    # What needs nothing comes last: see below.
    for finding in sorted(_with_one_state(list(findings)), key=lambda x: not x.symptom.needs):
        symptom = finding.symptom
        part = "outputs" if symptom.is_output else symptom.what
        key = (finding.status, part, symptom.key)
        if not symptom.is_output and not symptom.needs:
            # A property that compares calls of its own keeps their features to itself.
            key = next((other for other in by_key if other[:2] == key[:2]), key)
        by_key.setdefault(key, []).append(finding)
    groups = [_group(part) for members in by_key.values() for part in _split_by_pass(members)]
    return tuple(
        sorted(groups, key=lambda group: (group.status != "failed", group.is_of_a_session,
                                          len(group.needs), len(group.smallest.example)))
    )  # fmt: skip


def _with_one_state(findings: list[Evidence]) -> list[Evidence]:
    """Where most of what a call may leave behind is found in the next, that is one symptom."""
    kept = [x for x in findings if x.symptom.what.startswith(STATE_PREFIX)]
    if len({x.symptom.what for x in kept}) < LEAST_STATES:
        return findings
    return [
        replace(x, symptom=replace(x.symptom, what=STATE_KEPT, needs=())) if x in kept else x
        for x in findings
    ]


def _split_by_pass(members: list[Evidence]) -> list[list[Evidence]]:
    """The forward pass and gradients apart, unless P is wrong in both."""
    whats = {finding.symptom.what for finding in members}
    if "dv" in whats or not whats & set(FORWARD_OUTPUTS):
        return [members]
    forward = [x for x in members if x.symptom.what in FORWARD_OUTPUTS]
    return [part for part in (forward, [x for x in members if x not in forward]) if part]


def _group(members: Sequence[Evidence]) -> FailureGroup:
    first = min(members, key=lambda finding: len(finding.symptom.example))
    symptom = first.symptom
    names = dict.fromkeys(finding.name for finding in members)
    whats = {finding.symptom.what for finding in members}
    ordered = tuple(x for x in OUTPUTS if x in whats) or tuple(whats)
    # The property that gave the smallest example is named first.
    properties = (first.name, *(name for name in names if name != first.name))
    errors = [finding.symptom.error for finding in members]
    return FailureGroup(
        cause=name_cause(ordered, symptom.words, errors),
        whats=ordered,
        needs=symptom.needs,
        properties=properties,
        status=first.status,
        name=first.name,
        smallest=symptom,
    )


def name_cause(whats: Sequence[str], words: str, errors: Sequence[str]) -> str:
    """ "dK and dV wrong with GQA 3 x causal", "O NaN on the plainest input", or what happened."""
    if whats[0] == STATE_KEPT:
        return STATE_KEPT
    if whats[0] not in OUTPUTS:
        if whats[0].isidentifier():  # the name of a property
            return f"{whats[0]} broken" + (f" with {words}" if words else "")
        text = errors[0].partition("; it printed")[0]
        said = text if len(text) <= 100 else f"{text[:96]} ..."
        return said + (f" (with {words})" if words else "")
    *rest, last = [OUTPUT_NAMES[what] for what in whats]
    listed = f"{', '.join(rest)} and {last}" if rest else last
    nan = all("NaN is never right" in error for error in errors)
    return f"{listed} {'NaN' if nan else 'wrong'} {f'with {words}' if words else PLAINEST}"


def _without_size(need: str) -> str:
    name, _, size = need.partition(" ")
    if name == "length":
        return length_class(int(size))
    return name if name == "head_dim" and size.isdigit() else need


assert set(OUTPUT_NAMES) == set(OUTPUTS) and LENGTH_CLASSES
