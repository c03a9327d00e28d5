"""Is the PTX of our forward kernels the same before and after a change of their source?

    python benchmarks/compare_ptx.py --store FOLDER      before: keeps the PTX of every kernel
    python benchmarks/compare_ptx.py --against FOLDER    after: the first difference of each kernel

The kernels are those of benchmark_features.py. Names of registers, labels and kernels do not count:
each is replaced by its number in the order of first use. Exit code 1 if anything else differs.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from feature_kernels import specs

_COMMENT = re.compile(r"//[^\n]*")
_COUNT = re.compile(r"<\d+>;")  # of registers that are declared
_NAMED = re.compile(r"%[a-zA-Z_]+\d+|\$L_\w+|\bkernel_\w+")
_KIND = re.compile(r"%[a-zA-Z_]+|\$L|kernel")


def without_names(ptx: str) -> list[str]:
    """The lines of a module, its names numbered in the order of their first use."""
    numbers: dict[str, str] = {}
    counts: dict[str, int] = {}

    def number(found: re.Match[str]) -> str:
        name = found[0]
        if name not in numbers:
            match = _KIND.match(name)
            assert match is not None
            counts[match[0]] = counts.get(match[0], -1) + 1
            numbers[name] = f"{match[0]}#{counts[match[0]]}"
        return numbers[name]

    text = _COUNT.sub("<>;", _COMMENT.sub("", ptx))
    lines = (" ".join(line.split()) for line in text.splitlines())
    return [_NAMED.sub(number, line) for line in lines if line]


def difference(before: str, after: str) -> str:
    """The first line that differs, with its number; "" if none does."""
    old, new = without_names(before), without_names(after)
    for number, (was, now) in enumerate(zip(old, new, strict=False), 1):
        if was != now:
            return f"line {number} was {was!r}, is {now!r}"
    return "" if len(old) == len(new) else f"{len(old)} lines before, {len(new)} after"


def compile_all() -> Iterator[tuple[str, str]]:
    """(file name, PTX) of each kernel."""
    from fa4.compiled.forward import compile_forward

    os.environ["CUTE_DSL_NO_CACHE"] = "1"
    for name, spec in specs():
        yield f"{name}.ptx", compile_forward(spec, spec.gpu.arch).artifacts.PTX


def main() -> None:
    """Stores, or compares and says what differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--store", type=Path, metavar="FOLDER")
    what.add_argument("--against", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.store:
        options.store.mkdir(parents=True, exist_ok=True)
        for name, ptx in compile_all():
            (options.store / name).write_text(ptx, encoding="utf-8")
            print(name, flush=True)
        return
    kernels = differing = 0
    for name, ptx in compile_all():
        kernels += 1
        found = difference((options.against / name).read_text(encoding="utf-8"), ptx)
        if found:
            differing += 1
            print(f"{name}: {found}", flush=True)
    print(f"{kernels - differing} of {kernels} kernels equal but for names")
    sys.exit(differing > 0)


if __name__ == "__main__":
    main()
