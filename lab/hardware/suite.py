"""Stored launches: made on any machine, run on a GPU, judged where they were made.

    python3 -m lab.hardware.suite FOLDER RESULTS.npz         # GPU: needs NumPy and the driver

FOLDER holds a file for each case (`store`): kernels, how they are launched, and all the memory that
they see, which moves as a whole to wherever a GPU puts it. Every kernel is launched `repeats` times
on the same memory. RESULTS keeps what the first launch changed of each output, and how many of the
others left other bits; of a timed case the seconds of a launch, and of a copy of as many bytes.
`read_outcomes` gives both files of each case to its judge.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lab.hardware.driver import Array, Geometry, Gpu

LIMIT_S = 20.0  # of one launch
ROUNDS = 7  # of a launch and a copy in turns
FILLING = 0x3C  # bytes of memory that is not stored: small numbers in every format


@dataclass(frozen=True, kw_only=True)
class StoredLaunch:
    """A case.

    base, size: address and bytes of its memory when it was captured. parameters: of each launch,
    one after the other, each parameter in hex. places: name of an output -> at least its start and
    bytes in the memory. timed_bytes: what a launch reads and writes, if it is timed. more: for the
    judge.
    """

    name: str
    kernel: str
    grid: Sequence[int]
    block: Sequence[int]
    smem_bytes: int
    base: int
    size: int
    parameters: Sequence[Sequence[str]]
    places: Mapping[str, Mapping[str, Any]]
    repeats: int = 1
    timed_bytes: int = 0
    more: Mapping[str, Any] = field(default_factory=dict)

    def part(self, memory: Array, output: str) -> Array:
        """The bytes of an output in a memory."""
        place = self.places[output]
        return memory[place["start"] : place["start"] + place["bytes"]]


@dataclass(frozen=True)
class Outcome:
    """A case, what was stored of it, and what a GPU gave."""

    case: StoredLaunch
    given: Mapping[str, Array]
    got: Mapping[str, Array]

    def after(self, image: str, output: str) -> Array:
        """The bytes of an output behind the first launch of a kernel."""
        before = self.case.part(self.given["memory"], output)
        return self.got[f"{self.case.name}/{image}/{output}"] ^ before

    def different(self, image: str) -> dict[str, int]:
        """Output -> how many of the other launches left other bits there."""
        counts = self.got[f"{self.case.name}/{image}/different"].tolist()
        return dict(zip(self.case.places, counts, strict=True))


def store(folder: Path, case: StoredLaunch, images: Mapping[str, bytes], **arrays: Array) -> Path:
    """Writes a case. images: kernels by name. arrays: `memory`, unless its contents do not matter,
    and what the judge needs."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{''.join(x if x.isalnum() else '_' for x in case.name.lower())}.npz"
    kernels = {f"image/{name}": np.frombuffer(image, np.uint8) for name, image in images.items()}
    launch = np.array(json.dumps(asdict(case)))
    with path.open("wb") as stream:
        np.savez_compressed(stream, launch=launch, **kernels, **arrays)
    return path


def read_case(path: Path) -> tuple[StoredLaunch, dict[str, Array]]:
    """A case and its arrays."""
    with np.load(path) as stored:
        arrays = {name: stored[name] for name in stored.files}
    return StoredLaunch(**json.loads(str(arrays.pop("launch")))), arrays


def read_outcomes(folder: Path, results: Path) -> tuple[str, Iterator[Outcome]]:
    """(the GPU's name, each case with what it gave)."""
    with np.load(results) as stored:
        got = {name: stored[name] for name in stored.files}
    return str(got["device"]), (
        Outcome(*read_case(path), got) for path in sorted(folder.glob("*.npz"))
    )


def moved(parameter: bytes, base: int, size: int, target: int) -> bytes:
    """A parameter with the addresses in [base, base + size) as far behind `target`."""
    if len(parameter) % 8:
        return parameter
    words = np.frombuffer(parameter, np.uint64).copy()
    inside = (words >= base) & (words < base + size)
    words[inside] = words[inside] - np.uint64(base) + np.uint64(target)
    return words.tobytes()


def run_case(gpu: Any, case: StoredLaunch, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """What is kept of a case. gpu: a Gpu, or what stands in for one."""
    memory = arrays.get("memory")
    if memory is None:
        memory = np.full(case.size, FILLING, np.uint8)
    pristine, work = gpu.upload(memory), gpu.allocate(case.size)
    geometry = Geometry(case.grid, case.block, case.smem_bytes)
    launches = [
        [moved(bytes.fromhex(part), case.base, case.size, work) for part in parameters]
        for parameters in case.parameters
    ]
    kept: dict[str, Array] = {}
    for name in (key for key in arrays if key.startswith("image/")):
        image = name.removeprefix("image/")
        kernel = gpu.load(arrays[name].tobytes(), case.kernel, case.smem_bytes)

        def launch(kernel: Any = kernel) -> None:
            for parameters in launches:
                gpu.launch(kernel, geometry, parameters)

        gpu.copy(work, pristine, case.size)
        if case.timed_bytes:
            kept[f"{image}/seconds"] = _time(gpu, launch, case.timed_bytes // 2)
            continue
        first: dict[str, Array] = {}
        different = np.zeros(len(case.places), np.int64)
        for _ in range(case.repeats):
            gpu.copy(work, pristine, case.size)
            launch()
            gpu.wait(LIMIT_S)
            found = {
                output: gpu.read(work + place["start"], place["bytes"])
                for output, place in case.places.items()
            }
            first = first or found
            different += [not np.array_equal(first[x], found[x]) for x in found]
        kept |= {f"{image}/{x}": first[x] ^ case.part(memory, x) for x in first}
        kept[f"{image}/different"] = different
    gpu.free(pristine)
    gpu.free(work)
    return {f"{case.name}/{key}": array for key, array in kept.items()}


def _time(gpu: Any, launch: Any, copied_bytes: int) -> Array:
    """(rounds, 2) of seconds: the launch's, and a copy's."""
    source, target = gpu.allocate(copied_bytes), gpu.allocate(copied_bytes)

    def copy() -> None:
        gpu.copy(target, source, copied_bytes)

    rounds = [(gpu.seconds(launch), gpu.seconds(copy)) for _ in range(ROUNDS)]
    gpu.free(source)
    gpu.free(target)
    return np.array(rounds)


def run_folder(gpu: Any, folder: Path, results: Path) -> None:
    """Launches every case; one that does not end raises TimeoutError, and ends the process."""
    kept: dict[str, Array] = {"device": np.array(gpu.name)}
    try:
        for path in sorted(folder.glob("*.npz")):
            case, arrays = read_case(path)
            found = run_case(gpu, case, arrays)
            kept |= found
            other = [array.tolist() for key, array in found.items() if key.endswith("different")]
            print(f"{case.name}: {case.repeats} launches, other bits: {other}", flush=True)
    finally:  # what was done before a case that did not end
        results.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(results, **kept)  # type: ignore[arg-type]


def main() -> None:
    """Runs a folder on GPU 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("results", type=Path)
    arguments = parser.parse_args()
    run_folder(Gpu(), arguments.folder, arguments.results)


if __name__ == "__main__":
    main()
