"""Do our kernels compile to the same code before and after a change of their source?

    python -m lab.benchmarks.compare_ptx --store FOLDER  before: keeps PTX and cubin of every kernel
    python -m lab.benchmarks.compare_ptx --against FOLDER  after: what differs

The kernels are those of all_kernels.py. In PTX, names of registers, labels and kernels do
not count: each is replaced by its number in the order of first use. PTX that differs may still be
the same machine code, byte for byte: two instructions that do not depend on each other have changed
places. Exit code 1 if the machine code of a kernel differs.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from fa4.emulator.elf import read_sections
from lab.benchmarks.all_kernels import specs

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


def machine_code(cubin: bytes) -> list[bytes]:
    """The code sections of a cubin, in their order and without their names."""
    sections = [one for one in read_sections(cubin) if one.name.startswith(".text.")]
    return [cubin[one.offset : one.offset + one.size] for one in sections]


def compile_all() -> Iterator[tuple[str, str, bytes]]:
    """(name, PTX, cubin) of each kernel."""
    from fa4.compiled.build import compile_kernel

    os.environ["CUTE_DSL_NO_CACHE"] = "1"
    for name, spec in specs():
        artifacts = compile_kernel(spec, spec.gpu.arch).artifacts
        yield name, artifacts.PTX, artifacts.CUBIN


def store(folder: Path) -> None:
    """Keeps what the kernels compile to."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, ptx, cubin in compile_all():
        (folder / f"{name}.ptx").write_text(ptx, encoding="utf-8")
        (folder / f"{name}.cubin").write_bytes(cubin)
        print(name, flush=True)


def compare(folder: Path) -> bool:
    """Prints what differs from what is kept; is all machine code the same?"""
    kernels = same_ptx = same_code = 0
    for name, ptx, cubin in compile_all():
        kernels += 1
        found = difference((folder / f"{name}.ptx").read_text(encoding="utf-8"), ptx)
        same = machine_code((folder / f"{name}.cubin").read_bytes()) == machine_code(cubin)
        same_ptx, same_code = same_ptx + (not found), same_code + same
        if found:
            what = "the same machine code" if same else "OTHER MACHINE CODE"
            print(f"{name}: {what}; PTX {found}", flush=True)
        elif not same:
            print(f"{name}: OTHER MACHINE CODE of the same PTX", flush=True)
    print(f"the same PTX but for names: {same_ptx} of {kernels} kernels")
    print(f"the same machine code: {same_code} of {kernels}")
    return same_code == kernels


def main() -> None:
    """Stores or compares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--store", type=Path, metavar="FOLDER")
    what.add_argument("--against", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.store:
        store(options.store)
    elif not compare(options.against):
        sys.exit(1)


if __name__ == "__main__":
    main()
