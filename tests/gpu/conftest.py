"""Tests here need a GPU that a kernel runs on, and skip where it does not.

`make test-gpu` fails where no kernel runs at all, and says at its end whose tests did not run.
`FA4_GUARDED=1 make test-gpu` lets every tensor begin or end at unmapped memory.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import pytest

from fa4.backends import ON_GPU
from fa4.call.choose import MADE_FOR, find_gpu
from lab.hardware.guarded.memory import CudaDriver, GuardedMemory, install_in_torch

if os.environ.get("FA4_GUARDED"):  # before torch looks at a GPU
    install_in_torch(GuardedMemory(CudaDriver()))
FOUND = {impl: find_gpu(impl) for impl in ON_GPU}


class Place(NamedTuple):
    """An implementation and the GPU that it runs on."""

    impl: str
    device: str


def pytest_sessionstart(session: pytest.Session) -> None:
    """Skipped tests must not look like passed ones where hardware was asked for."""
    if os.environ.get("FA4_REQUIRE_GPU") and not any(found.device for found in FOUND.values()):
        pytest.exit(f"make test-gpu needs {needed()}: {find_gpu().why}", returncode=2)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Whose tests ran, and whose did not, and why."""
    for impl, found in FOUND.items():
        ran = f"on {found.device}" if found.device else f"NOT RUN: {found.why}"
        terminalreporter.write_line(f'impl="{impl}": {ran}')


def needed(*impls: str) -> str:
    """The GPUs of some implementations, or of all."""
    return " or ".join(MADE_FOR[impl] for impl in impls or ON_GPU)


def place_of(impl: str) -> Place:
    """Where an implementation runs; skips the test where it does not."""
    if not FOUND[impl].device:
        pytest.skip(f"needs {needed(impl)}: {FOUND[impl].why}")
    return Place(impl, FOUND[impl].device)


@pytest.fixture(params=ON_GPU)
def place(request: pytest.FixtureRequest) -> Place:
    """Each implementation of the forward pass, in turn."""
    return place_of(request.param)


@pytest.fixture
def sm90() -> Place:
    """Hopper's."""
    return place_of("sm90")
