"""Runs hand-written PTX on NumPy arrays: the rig of the machine's tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fa4.emulator.execute import Report, run
from fa4.emulator.machine.launch_record import Allocation, Launch
from fa4.emulator.machine.options import Options
from fa4.emulator.ptx.parser import parse
from lab.ptx_module import HEADER, module_text

__all__ = ["HEADER", "aligned", "kinds", "module_text", "name_arrays", "run_ptx"]

Triple = tuple[int, int, int]
Arrays = Mapping[str, np.ndarray] | Sequence[np.ndarray]


def run_ptx(
    body_or_text: str,
    arrays: Arrays = (),
    grid: Triple = (1, 1, 1),
    block: Triple = (32, 1, 1),
    cluster: Triple = (1, 1, 1),
    smem: int = 0,
    collect: bool = False,
    blocks: Sequence[bytes] = (),
    declarations: str = "",
    read_only: Sequence[str] = (),
    **options: Any,
) -> Report:
    """Runs a body of instructions, or a whole module, on arrays that it may read and change.

    arrays: contiguous; array k is the buffer whose address %rd{k + 1} holds. In a whole module
    the kernel's parameters are the addresses, as far as it has such. blocks: bytes of further
    parameters (block0, ...). read_only: names of arrays ("array0" unless named).
    """
    named = dict(arrays) if isinstance(arrays, Mapping) else name_arrays(arrays)
    text = body_or_text
    if ".version" not in text:
        text = module_text(text, len(named), [len(b) for b in blocks], declarations)
    allocations = [
        Allocation(name, array.ctypes.data, array.nbytes, name not in read_only, array)
        for name, array in named.items()
    ]
    kernel = next(iter(parse(text).kernels.values()))
    values = [a.ctypes.data.to_bytes(8, "little") for a in named.values()] + list(blocks)
    values = [
        value.ljust(parameter.size_bytes or 0, b"\0")
        for value, parameter in zip(values, kernel.parameters, strict=True)
    ]
    launch = Launch(kernel.name, text, grid, block, cluster, smem, tuple(values))
    return run([launch], allocations, Options(collect=collect, **options))


def name_arrays(arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """array0, array1, ..."""
    return {f"array{k}": array for k, array in enumerate(arrays)}


def kinds(report: Report) -> set[str]:
    """The kinds of the findings of a report."""
    return {finding.kind for finding in report.findings}


def aligned(values: np.ndarray, alignment_bytes: int = 128) -> np.ndarray:
    """A copy that starts at a multiple of `alignment_bytes`, as device allocations do."""
    raw = np.zeros(values.nbytes + alignment_bytes, np.uint8)
    start = -raw.ctypes.data % alignment_bytes
    copy = raw[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy
