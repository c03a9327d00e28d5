"""What the keys of a JSON report mean: `fa4 verify --json`, `VerifyReport.as_dict`.

A key keeps its meaning within a `schema_version`; new keys may come without a new version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Keys below a list are written with "[]", those below names that vary with "{}".
FIELDS: dict[str, str] = {
    "schema_version": "3; raised when a key goes away or changes its meaning",
    "backend": "name of the function under test",
    "max_examples": "cases that Hypothesis drew per property",
    "seed": "seed of the cases",
    "words": "options of the command that draws the same",
    "seconds": "wall time of the run",
    "passed": "nothing failed, and something was judged",
    "counts": "properties by status: passed, failed, not_covered, not_robust",
    "cases": "cases that were judged",
    "properties[].name": "the property",
    "properties[].description": "what must hold",
    "properties[].status": '"passed", "failed", "not covered" or "not robust"',
    "properties[].cases": "cases of it that were judged",
    "properties[].worst_share": "largest error as a fraction of its budget; null if none",
    "properties[].reason": "why it, or some of its cases, are not covered",
    "properties[].error": "what happened, for a failure",
    "properties[].example": "the smallest case found, as the expression that makes it",
    "properties[].needs": "features that this case needs to fail",
    "properties[].test": "source of a test that fails",
    "properties[].seconds": "wall time",
    "failures[].cause": 'a name: "dK wrong with GQA 3 x causal"',
    "failures[].outputs": "the outputs that are wrong: out, lse, dq, dk, dv, dsink; or none",
    "failures[].needs": "features that it takes",
    "failures[].properties": "the properties that show it",
    "failures[].status": '"failed" or "not robust"',
    "failures[].smallest": "the property of the smallest example, and with it:",
    "failures[].error": "what happens",
    "failures[].example": "the case",
    "failures[].test": "source of a test",
    "failures[].numpy": "the case as a program on NumPy arrays; empty for calls in a row",
    "failures[].torch": "and on torch tensors",
    "skipped": "properties that did not run, as the run ended at the first failure",
    "not_covered": "feature to the reason why it is not covered",
    "levels.pairs": '"a x b" to the number of judged cases with both levels',
    "levels.triples": "the same for mask, layout and modification or grouped heads",
    "coverage{}.output": "an output, and of it:",
    "coverage{}.pairs": "pairs of levels of two features that have a meaning",
    "coverage{}.least": "judged cases of the rarest pair",
    "coverage{}.few": "pairs that fewer than three cases judged",
    "printed": "lines that the function wrote to standard output, and the first (command only)",
    "files": "files of the report by kind (command only)",
}
_OPAQUE = frozenset(("counts", "not_covered", "levels.pairs", "levels.triples", "printed", "files"))
_NAMED = frozenset(("coverage",))


def fields_of(report: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The keys of a report as `FIELDS` writes them."""
    for key, value in report.items():
        name = f"{prefix}{key}"
        if name in _OPAQUE:
            yield name
        elif isinstance(value, Mapping) and name in _NAMED:
            for item in value.values():
                yield from fields_of(item, f"{name}{{}}.")
        elif isinstance(value, Mapping):
            yield from fields_of(value, f"{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for item in value:
                yield from fields_of(item, f"{name}[].")
        else:
            yield name
