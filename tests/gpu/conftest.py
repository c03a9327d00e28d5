"""Tests here need a B200 or B300. `make test-gpu` fails where there is none; others skip them."""

from __future__ import annotations

import os

import pytest

from fa4.choose import find_gpu

DEVICE, WHY = find_gpu()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Skipped tests must not look like passed ones where hardware was asked for."""
    if os.environ.get("FA4_REQUIRE_GPU") and not DEVICE:
        pytest.exit(f"make test-gpu needs a B200 or B300: {WHY}", returncode=2)


@pytest.fixture
def device() -> str:
    """The GPU to use."""
    if not DEVICE:
        pytest.skip(f"needs a B200 or B300: {WHY}")
    return DEVICE
