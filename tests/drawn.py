"""Seeds for tests that draw without Hypothesis."""

from __future__ import annotations

import secrets

from hypothesis import settings


def draw_seed() -> int:
    """New in every run; always 0 where Hypothesis repeats its draws, too."""
    assert settings.default is not None
    return 0 if settings.default.derandomize else secrets.randbits(32)
