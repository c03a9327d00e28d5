"""What makes the cases of `suite` and judges them: for a machine with the package and its compiler.

A suite is a module with `SUITE`, whose `main` has two steps; the third, between them, is a GPU's:

    python -m lab.hardware.warpgroup_bits.suite make FOLDER --ptxas PTXAS
    python3 -m lab.hardware.suite FOLDER RESULTS.npz                                   # GPU
    python -m lab.hardware.warpgroup_bits.suite compare FOLDER RESULTS.npz
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from fa4.emulator import Allocation, Launch, Options, Session, run
from lab.hardware.driver import Array
from lab.hardware.suite import Outcome, StoredLaunch, read_outcomes, store
from lab.records import record_path, write_record

ARCH = "sm_90a"
SLACK_BYTES = 1 << 22  # around the tensors: TMA views of ragged tensors start before them
ALIGN_BYTES = 256
DTYPES = {"bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Made:
    """A case, its kernels by name, its memory and what its judge needs."""

    case: StoredLaunch
    images: Mapping[str, bytes]
    arrays: Mapping[str, Array]


def cases_report(device: str, rows: dict[str, Any], wrong: list[str]) -> dict[str, Any]:
    """A record of rows."""
    named = {name: {"device": device} | row for name, row in rows.items()}
    return {"cases": named, "wrong": wrong}


@dataclass(frozen=True)
class Suite:
    """Cases that `lab.hardware.suite` runs, and their judge.

    record: the name of its result file. make: the path of ptxas -> its cases. judge: what came of a
    case -> its row. is_wrong: of a name and its row. report: (the GPU, rows, names of the wrong
    ones) -> the record.
    """

    record: str
    make: Callable[[str], Iterator[Made]]
    judge: Callable[[Outcome], dict[str, Any]]
    is_wrong: Callable[[str, dict[str, Any]], bool]
    report: Callable[[str, dict[str, Any], list[str]], dict[str, Any]] = cases_report

    def store(self, folder: Path, ptxas: str) -> None:
        """Writes its cases. Raises ValueError for two that would share a file."""
        paths: set[Path] = set()
        for made in self.make(ptxas):
            path = store(folder, made.case, made.images, **made.arrays)
            if path in paths:
                raise ValueError(f"two cases have the file {path.name}")
            paths.add(path)
            print(f"{made.case.name}: {path.stat().st_size} bytes", flush=True)

    def compare(self, folder: Path, results: Path) -> int:
        """Prints a line per case and writes the record; 1 if anything is wrong."""
        device, outcomes = read_outcomes(folder, results)
        rows: dict[str, Any] = {}
        for outcome in outcomes:
            name = outcome.case.name
            rows[name] = self.judge(outcome)
            wrong = self.is_wrong(name, rows[name])
            print(f"{name}: {rows[name]}{' WRONG' if wrong else ''}", flush=True)
        wrong_ones = [name for name, row in rows.items() if self.is_wrong(name, row)]
        write_record(
            record_path(self.record), self.report(device, rows, wrong_ones),
            ("numpy", "nvidia-cutlass-dsl"), machine=device,
        )  # fmt: skip
        print(f"wrong: {', '.join(wrong_ones) or 'none'}")
        return int(bool(wrong_ones))

    def main(self, text: str | None) -> int:
        """One of both steps, as the command line says."""
        parser = argparse.ArgumentParser(description=(text or "").splitlines()[0])
        steps = parser.add_subparsers(dest="step", required=True)
        make = steps.add_parser("make", help="compile, draw inputs, run the emulator")
        make.add_argument("folder", type=Path)
        make.add_argument("--ptxas", default="ptxas")
        compare = steps.add_parser("compare", help="judge what a GPU gave, and write the record")
        compare.add_argument("folder", type=Path)
        compare.add_argument("results", type=Path)
        given = parser.parse_args()
        if given.step == "compare":
            return self.compare(given.folder, given.results)
        self.store(given.folder, given.ptxas)
        return 0


@dataclass(frozen=True)
class Arena:
    """Tensors in one buffer, which can move as a whole. What lies around them is NaN in every type.

    tensors: by name, as views of the buffer. places: name -> start, bytes, shape, strides, dtype.
    """

    memory: Array
    tensors: Mapping[str, Any]
    places: Mapping[str, dict[str, Any]]

    def outputs(self, *names: str) -> dict[str, dict[str, Any]]:
        """The places of those of these names that it has."""
        return {name: self.places[name] for name in names if name in self.places}


def lay_out(tensors: Mapping[str, Any]) -> Arena:
    """Copies of tensors (torch's), with their strides."""
    import torch

    sizes = {name: _extent(x) * x.element_size() for name, x in tensors.items()}
    room = 2 * SLACK_BYTES + sum(_rounded(size) for size in sizes.values())
    raw = torch.full((room + ALIGN_BYTES,), 0xFF, dtype=torch.uint8)
    buffer = raw[-raw.data_ptr() % ALIGN_BYTES :][:room]
    used, views, places = SLACK_BYTES, {}, {}
    for name, x in tensors.items():
        part = buffer[used : used + sizes[name]].view(x.dtype)
        views[name] = part.as_strided(x.shape, x.stride())
        views[name].copy_(x)
        places[name] = {
            "start": used, "bytes": sizes[name], "shape": list(x.shape),
            "strides": list(x.stride()), "dtype": str(x.dtype).removeprefix("torch."),
        }  # fmt: skip
        used += _rounded(sizes[name])
    return Arena(buffer.numpy(), views, places)


def _extent(x: Any) -> int:
    """Elements from the first to the last."""
    spans = [(n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)]
    return 1 + sum(spans) if x.numel() else 0


def _rounded(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


def view_of(raw: Array, place: Mapping[str, Any]) -> Any:
    """A tensor of an arena, from its bytes."""
    dtype = np.dtype(DTYPES.get(place["dtype"], place["dtype"]))
    strides = [step * dtype.itemsize for step in place["strides"]]
    flat = np.frombuffer(raw.tobytes(), dtype)
    return np.lib.stride_tricks.as_strided(flat, place["shape"], strides)


def capture(kernel: Any, arguments: Sequence[Any]) -> tuple[Launch, Sequence[Allocation]]:
    """What the host function of a compiled kernel launches, and the memory of its tensors."""
    found: list[Any] = []
    session = Session(lambda launches, memory, options: found.append((launches, memory)), (), {})
    session.call(kernel, arguments, {})
    ((launch,), memory), = found  # fmt: skip
    return launch, memory


def stored(name: str, launches: Sequence[Launch], memory: Array, **fields: Any) -> StoredLaunch:
    """The case of launches of one kernel that see nothing but a buffer."""
    first = launches[0]
    return StoredLaunch(
        name=name, kernel=first.kernel, grid=first.grid, block=first.block,
        smem_bytes=first.dynamic_smem_bytes, base=memory.ctypes.data, size=memory.size,
        parameters=[[part.hex() for part in launch.parameters] for launch in launches], **fields,
    )  # fmt: skip


def emulate(
    launches: Sequence[Launch], memory: Array, places: Mapping[str, Mapping[str, Any]],
    allocations: Sequence[Allocation] = (), **options: Any,
) -> tuple[dict[str, Array], list[str]]:  # fmt: skip
    """(bytes of the outputs, kinds of the findings) of launches; the memory is left as it was.

    allocations: of the memory; one that holds all of it, if not given.
    """
    before = memory.copy()
    whole = Allocation("memory", memory.ctypes.data, memory.nbytes, True, memory)
    reports = [run([launch], allocations or [whole], Options(**options)) for launch in launches]
    found = {
        name: memory[at["start"] : at["start"] + at["bytes"]].copy() for name, at in places.items()
    }
    memory[:] = before
    return found, [finding.kind for report in reports for finding in report.findings]


def with_text(launch: Launch, ptx: str) -> Launch:
    """The launch of other PTX."""
    return replace(launch, ptx=ptx)


def assemble(ptx: str, ptxas: str = "ptxas") -> bytes:
    """The cubin of PTX for a Hopper GPU. Raises CalledProcessError if ptxas refuses it."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        subprocess.run([ptxas, f"-arch={ARCH}", "-o", target, source], check=True)
        return target.read_bytes()
