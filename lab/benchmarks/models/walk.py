"""Walks every class of the installed transformers: `python -m lab.benchmarks.models.walk`.

Each class that builds in small is run by "eager" and by fa4: whole rows, rows padded on the left
and on the right, and with another last token. Takes about ten minutes on two cores.
Usage: python -m lab.benchmarks.models.walk [--output FILE] [--limit N] [--processes N]
"""

from __future__ import annotations

import json
import signal
import warnings
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

import fa4
from lab.benchmarks.models.compare import Finding, compare
from lab.records import record_path, write_record

# Of each family what it is made of, and what reads and writes text.
TASKS = (
    "MODEL_FOR_CAUSAL_LM",
    "MODEL",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "MODEL_FOR_MASKED_LM",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ",
)
LONGEST_S = 30


class TooLongError(BaseException):
    """No Exception, so that nobody in between goes on."""


def class_names() -> list[str]:
    """Names of the classes to walk: one of every family, then the second ones, and so on."""
    families: dict[str, list[str]] = {}
    for task in TASKS:
        for family, names in getattr(modeling_auto, f"{task}_MAPPING_NAMES", {}).items():
            families.setdefault(family, []).extend([names] if isinstance(names, str) else names)
    ranks = {
        name: (rank, name)
        for names in reversed(families.values())
        for rank, name in reversed(list(enumerate(dict.fromkeys(names))))
    }
    return sorted(ranks, key=lambda name: ranks[name])


def walk(
    names: list[str], processes: int = 1, tell: Callable[[Finding], None] = lambda finding: None
) -> list[Finding]:
    """A finding for every class, in the order of the names."""
    found = []
    with get_context("spawn").Pool(processes, torch.set_num_threads, (1,)) as pool:
        for finding in pool.imap(visit, names):
            tell(finding)
            found.append(finding)
    return found


def visit(name: str) -> Finding:
    """One class by its name, in at most LONGEST_S."""
    fa4.transformers.register()
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings(), _at_most(LONGEST_S):
            warnings.simplefilter("ignore")
            cls: Any = getattr(transformers, name)
            return compare(cls)
    except Exception as error:  # a package that a class asks for, or no such class
        return Finding(name, reason=f"{type(error).__name__}: {str(error).strip()[:160]}")
    except TooLongError as error:
        return Finding(name, reason=str(error))
    finally:
        transformers.logging.set_verbosity(level)


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    """TooLongError after so much of the process's time."""

    def stop(*_: Any) -> None:
        raise TooLongError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def main() -> None:
    """Walks, says what it finds, and writes the result file."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=record_path("models"))
    parser.add_argument("--limit", type=int, help="so many classes, the first of families first")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    names = class_names()
    chosen = names[: options.limit]
    found = walk(chosen, options.processes, lambda x: print(json.dumps(x.as_dict()), flush=True))
    counts = Counter(x.status for x in found)
    print(", ".join(f"{count} {status}" for status, count in counts.most_common()))
    packages = ("torch", "transformers")
    report = {"versions": {name: version(name) for name in packages}, "walked": len(found),
              "of": len(names), "counts": dict(counts),
              "classes": [x.as_dict() for x in found]}  # fmt: skip
    write_record(options.output, report, packages)


if __name__ == "__main__":
    main()
