"""Values cannot be changed, and long ones are not given by position."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator

import pytest

import fa4.designs
import fa4.plan
import fa4.reference
import fa4.search
import fa4.sim
import fa4.testing

# What changes while something runs, or is handed back for good.
MUTABLE = {
    "Counters": "adds up",
    "SearchOutcome": "fills while a search goes on",
    "PiecesState": "the running maximum and sums",
    "RowState": "the running maximum and sum",
    "ForwardResult": "arrays handed to the caller",
    "BackwardResult": "arrays handed to the caller",
    "Layout": "is filled buffer by buffer",
    "EngineRun": "arrays of one execution",
    "Backend": "remembers what it refused",
    "RoleInCta": "goes through its program",
    "Resolver": "counts the turns of rings",
}
# Records that are written out in one line wherever they are made, always in one order.
POSITIONAL = {
    "Arrive", "Axis", "Backend", "BackwardResult", "BudgetReport", "Check", "ChipRun", "Counters",
    "DenseRun", "EngineRun", "Execution", "FailureGroup", "Finding", "ForwardResult", "Generation",
    "HopperTile", "Inputs", "KernelTime", "Layout", "Loop", "MeasuredCta", "MeasuredLane",
    "MeasuredRange", "MemoryRegion", "MemoryUse", "Outputs", "PiecesState", "Place", "Plan",
    "Point", "Property", "PropertyResult", "QuantizedBlocks", "Resolver", "RoleInCta", "RowState",
    "Semaphore", "Skipped", "Sweep", "VerifyReport", "Wait", "Walk", "Work",
}  # fmt: skip


def dataclasses_of(*packages: object) -> Iterator[type]:
    """The public dataclasses of packages."""
    for package in packages:
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name == "fa4.sim.figure":  # needs an optional package
                continue
            loaded = importlib.import_module(module.name)
            for name, value in vars(loaded).items():
                own = isinstance(value, type) and value.__module__ == module.name
                if own and dataclasses.is_dataclass(value) and not name.startswith("_"):
                    yield value


FOUND = {
    value.__name__: value
    for value in dataclasses_of(
        fa4.reference, fa4.designs, fa4.plan, fa4.search, fa4.sim, fa4.testing
    )
}


@pytest.mark.parametrize("name", FOUND)
def test_frozen_and_by_name(name: str) -> None:
    """A config, a plan or a prediction stays what it was checked to be."""
    value = FOUND[name]
    assert value.__dataclass_params__.frozen == (name not in MUTABLE)
    if name not in POSITIONAL:
        assert all(field.kw_only for field in dataclasses.fields(value))


def test_the_lists_name_what_exists() -> None:
    assert (MUTABLE.keys() | POSITIONAL) <= FOUND.keys()
