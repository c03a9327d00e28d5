"""One rule for causal=True with a window: the right side is 0, whatever was given, everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fa4
from fa4.call.checked import make_call
from fa4.commands.compile import window_features
from fa4.config import normalize_window
from fa4.dtypes import round_to
from fa4.sim.options import build
from fa4.testing.inputs import visible_pairs

WINDOWS = ((3, 5), (3, -2), (0, 1), (None, 4), (None, -3), (2, None))
ROWS, KEYS = 11, 14


def arrays(dim: int = 64) -> list[np.ndarray]:
    """q, k, v (1, S, 1, d) in bf16."""
    rng = np.random.default_rng(0)
    return [round_to(rng.standard_normal((1, n, 1, dim)), "bf16") for n in (ROWS, KEYS, KEYS)]


def both(window: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The call with causal and the window, and the one that it has to equal."""
    return {"causal": True, "window_size": window}, {"window_size": (window[0], 0)}


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("impl", ["reference", "oracle"])
def test_in_numpy_and_torch(impl: str, window: Any) -> None:
    """Forward, variable lengths, and gradients."""
    given, meant = both(window)
    q, k, v = arrays(8)
    results = []
    for options in (given, meant):
        out, lse = fa4.flash_attn_func(q, k, v, **options, impl=impl, return_lse=True)
        packed = fa4.flash_attn_varlen_func(q, k, v, **options, impl=impl, return_lse=True)
        gradients = fa4.flash_attn_backward(out, q, k, v, out, lse, **options, impl=impl)
        tensors = [torch.tensor(x.astype(np.float32)) for x in (q, k, v)]
        torch_out = fa4.flash_attn_func(*tensors, **options, impl=impl)
        results.append([out, lse, *packed, *gradients[:3], torch_out.numpy()])
    for one, other in zip(*results, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("window", [(3, 5), (3, -2)], ids=str)
def test_in_the_kernel(window: Any) -> None:
    """The compiled kernel in the emulator; and what it is asked for, of every window."""
    given, meant = both(window)
    q, k, v = arrays()
    one, other = (fa4.flash_attn_func(q, k, v, **x, impl="emulator") for x in (given, meant))
    assert np.array_equal(one, other)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_everywhere_else(window: Any) -> None:
    """The kernel's front, the test kit, the simulator and `fa4 compile`."""
    given, meant = both(window)
    q, k, v = arrays(8)
    right = (window[0], 0)
    assert normalize_window(window, causal=True) == right
    fronts = [make_call(q, k, v, x, varlen=False) for x in (given, meant)]
    assert fronts[0].window == fronts[1].window == right
    seen = [visible_pairs(options, 0, 1, (ROWS, KEYS)) for options in (given, meant)]
    assert np.array_equal(*seen)
    text = ",".join("none" if side is None else str(side) for side in window)
    assert build({"causal": "yes", "window": text}).problem.window_size == right
    assert window_features("both", causal=True) == {"window_left": True}
