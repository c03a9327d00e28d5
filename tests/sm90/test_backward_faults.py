"""Faults planted in the Hopper backward kernels are caught in the emulator."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cutlass")

from tests.sm90 import backward_faults, wide_faults
from tests.sm90.faults import find

KERNELS = {"narrow": backward_faults, "wide": wide_faults}
FEW = [(kernel, name) for kernel, of in KERNELS.items() for name in of.FEW]
OTHERS = [
    (kernel, name)
    for kernel, of in KERNELS.items()
    for name in sorted(set(of.FAULTS) - set(of.FEW))
]


def check(kernel: str, name: str, folder: Path) -> None:
    """A fault is caught by the kind of finding that stands beside it."""
    of = KERNELS[kernel]
    edit, kind = of.FAULTS[name]
    assert kind in find(edit, folder, of.compiled, of.CASE)


@pytest.mark.parametrize(("kernel", "name"), FEW)
def test_fault_is_caught(kernel: str, name: str, tmp_path: Path) -> None:
    check(kernel, name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "name"), OTHERS)
def test_other_fault_is_caught(kernel: str, name: str, tmp_path: Path) -> None:
    check(kernel, name, tmp_path)


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_is_found_without_a_fault(kernel: str, tmp_path: Path) -> None:
    """An unaltered copy in the same place: it is the edits that are caught."""
    of = KERNELS[kernel]
    assert find(of.SAME, tmp_path, of.compiled, of.CASE) == set()
