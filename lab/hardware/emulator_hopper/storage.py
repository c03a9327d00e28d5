"""The suite in one file, and digests of results: NumPy alone, for both machines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from lab.hardware.emulator_hopper.programs import Array, Closeness, Program, Result, TensorMapAt

BLOCK = 1024  # values of a result that have one digest


def digest_of(data: bytes) -> int:
    """64 bits of BLAKE2."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def block_digests(values: Array) -> Array:
    """(blocks,) uint64, of `BLOCK` values each."""
    starts = range(0, len(values), BLOCK)
    return np.array([digest_of(values[k : k + BLOCK].tobytes()) for k in starts], np.uint64)


def identity(program: Program) -> str:
    """Changes whenever the program, its inputs or its launch do."""
    parts = [program.text, repr(program.results), repr(program.maps)]
    parts += [repr((program.grid, program.block, program.cluster, program.smem_bytes))]
    parts += [hex(digest_of(array.tobytes())) for array in program.arrays]
    return f"{digest_of(chr(10).join(parts).encode()):016x}"


def save(path: Path, programs: Iterable[Program], extra: Mapping[str, Mapping[str, Array]]) -> None:
    """Writes the programs; extra: program name -> further arrays (a cubin, expected digests)."""
    stored: dict[str, Array] = {}
    records = []
    for program in programs:
        names = []
        for array in program.arrays:
            name = f"array-{digest_of(array.tobytes()):016x}-{array.dtype.itemsize}"
            stored[name] = array
            names.append(name)
        record = asdict(program) | {"arrays": names, "identity": identity(program)}
        record["maps"] = [asdict(m) | {"raw": m.raw.hex()} for m in program.maps]
        records.append(record)
        for key, array in extra.get(program.name, {}).items():
            stored[f"{key}/{program.name}"] = array
    stored["programs"] = np.frombuffer(json.dumps(records).encode(), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **stored)  # type: ignore[arg-type]


class Suite:
    """A stored suite; arrays are read when they are asked for."""

    def __init__(self, path: Path) -> None:
        """Opens the file."""
        self._file = np.load(path)
        records = json.loads(self._file["programs"].tobytes())
        self._records: dict[str, dict[str, Any]] = {r["name"]: r for r in records}

    @property
    def names(self) -> list[str]:
        """Of the programs, in order."""
        return list(self._records)

    def family(self, name: str) -> str:
        """Of a program."""
        return str(self._records[name]["family"])

    def identity(self, name: str) -> str:
        """Of a program when it was stored."""
        return str(self._records[name]["identity"])

    def program(self, name: str) -> Program:
        """A program with its arrays."""
        record = {k: v for k, v in self._records[name].items() if k != "identity"}
        results = []
        for result in record["results"]:
            closeness = result["closeness"]
            result = result | {"closeness": Closeness(**closeness) if closeness else None}
            results.append(Result(**result))
        maps = [TensorMapAt(**(m | {"raw": bytes.fromhex(m["raw"])})) for m in record["maps"]]
        shapes = {key: tuple(record[key]) for key in ("grid", "block", "cluster")}
        arrays = tuple(self._file[array] for array in record["arrays"])
        changed = {"arrays": arrays, "results": tuple(results), "maps": tuple(maps)}
        return Program(**(record | changed | shapes))

    def extra(self, key: str, name: str) -> Array | None:
        """What `save` was given for a program, or None."""
        full = f"{key}/{name}"
        return self._file[full] if full in self._file.files else None


def digests_of(program: Program, arrays: Sequence[Array]) -> Array:
    """The block digests of all results, one after the other."""
    return np.concatenate([block_digests(result.of(arrays)) for result in program.results])


def head_of(program: Program, digests: Array) -> str:
    """One digest of the first blocks of all results that are compared bit for bit."""
    first, chosen = 0, []
    for result in program.results:
        if result.closeness is None:
            chosen.append(digests[first])
        first += -(-result.count // BLOCK)
    return f"{digest_of(np.array(chosen, np.uint64).tobytes()):016x}"


def head(program: Program, arrays: Sequence[Array]) -> str:
    """As `head_of`, from arrays of which the first block of each result is enough."""
    exact = [result for result in program.results if result.closeness is None]
    chosen = [digest_of(result.of(arrays)[:BLOCK].tobytes()) for result in exact]
    return f"{digest_of(np.array(chosen, np.uint64).tobytes()):016x}"
