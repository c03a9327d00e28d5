"""`fa4.flash_attn.cute` has the parameters of flash-attn-4 itself, one by one."""

from __future__ import annotations

import inspect

import pytest

from lab.foreign import flash_attention, missing
from tests.dropin.support import differences

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.filterwarnings("ignore"),  # those of other people's code
    pytest.mark.skipif(bool(missing()), reason=missing()),
]


@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_func"])
def test_signature_of_the_installed_package(name: str) -> None:
    """Names, order and defaults; what we add is by keyword."""
    from fa4.flash_attn import cute

    real = inspect.signature(getattr(flash_attention(), name))
    assert len(real.parameters) > 20
    assert differences(getattr(cute, name), real) == []
