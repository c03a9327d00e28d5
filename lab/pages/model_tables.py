"""The tables of docs/drop-in.md: which models of transformers are served, and which are not.

`python -m lab.benchmarks.models.walk` walks the classes; `python -m lab.pages.model_tables` writes
what it found between the markers in that page.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from fa4.plan.render import markdown_table
from lab.pages import DOCS
from lab.pages.marked_tables import MarkedTables
from lab.records import read_record

PAGE = DOCS / "drop-in.md"
MEANINGS = {
    "equal": 'equal to "eager" within 1e-5, with at least one call of fa4',
    "refused": "one line that names the model",
    "not buildable": "nothing was compared: no tiny model, or no inputs for it",
    "equal without a call": "equal, and fa4 was not called",
    "raised": "another error",
    "wrong": 'not equal to "eager"',
}
HEADS = r"(For[A-Z]\w+|LMHead\w*|WithLMHead\w*|Model)$"


def record() -> dict[str, Any]:
    """What the walk found."""
    found: dict[str, Any] = read_record("models")
    return found


def render_counts() -> str:
    """How many classes came out how."""
    found = record()
    rows = [(name, str(found["counts"].get(name, 0)), text) for name, text in MEANINGS.items()]
    table = markdown_table(("result", "classes", "meaning"), rows)
    versions = found["versions"]
    walked = "All" if found["walked"] == found["of"] else f"{found['walked']} of the"
    return (
        f"{walked} {found['of']} classes of transformers "
        f"{versions['transformers']} (torch {versions['torch']}, on a CPU, float32):\n\n{table}"
    )


def render_refused() -> str:
    """The reason of every refusal, and the models."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for row in record()["classes"]:
        if row["status"] == "refused":
            reasons[row["reason"].split(": it ")[1].split(";")[0]].append(row["name"])
    rows = [(why, families(names)) for why, names in sorted(reasons.items())]
    return markdown_table(("it ...", "models"), rows)


def render_additive() -> str:
    """Models that are served under the masks of "eager"."""
    served = [r["name"] for r in record()["classes"] if r.get("masks") and r["status"] == "equal"]
    return families(served)


def render_not_buildable() -> str:
    """What kept the walk from comparing, by how often."""
    counts: Counter[str] = Counter()
    for row in record()["classes"]:
        if row["status"] == "not buildable":
            counts[_kind(row["reason"])] += 1
    rows = [(why, str(count)) for why, count in sorted(counts.items(), key=lambda x: (-x[1], x[0]))]
    return markdown_table(("reason", "classes"), rows)


def families(names: Iterable[str]) -> str:
    """Classes without what heads add to their names, sorted."""
    return ", ".join(sorted({re.sub(HEADS, "", name) or name for name in names}, key=str.lower))


def _kind(reason: str) -> str:
    """One of a few reasons."""
    for pattern, kind in (
        (r"ImportError|ModuleNotFoundError", "a package that is not installed"),
        (r"module transformers has no attribute", "no class that transformers offers"),
        (r"forward needs", "inputs that the walk does not make"),
        (r"million parameters$", "more than 60 million parameters in every way"),
        (r"longer than", "longer than 30 s"),
        (r"no finite output", "no finite output"),
    ):
        if re.search(pattern, reason):
            return kind
    return "sizes that do not fit one another, or inputs that do not fit the model"


TABLES = MarkedTables(
    "python -m lab.pages.model_tables",
    {
        "walk": render_counts,
        "refused": render_refused,
        "eager masks": render_additive,
        "not buildable": render_not_buildable,
    },
)

if __name__ == "__main__":
    TABLES.write(PAGE)
