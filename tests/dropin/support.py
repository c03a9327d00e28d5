"""What the tests of drop-in functions share: signatures as text, and a rule for closeness."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

PLAIN_FACTOR = 2.0  # as in fa4.testing.budget


def signature(text: str) -> inspect.Signature:
    """Of "q, k, softcap=0.0"."""
    return inspect.signature(eval(f"lambda {text}: None"))


def differences(ours: Callable[..., Any], theirs: inspect.Signature) -> list[str]:
    """What a call written for `theirs` would find otherwise: name, place or default.

    Parameters that only we have are allowed by keyword and with a default.
    """
    mine = inspect.signature(ours).parameters.values()
    added = [p for p in mine if p.kind is p.KEYWORD_ONLY]
    found = [f"{p.name} has no default" for p in added if p.default is p.empty]
    common = [(p.name, p.default) for p in mine if p.kind is p.POSITIONAL_OR_KEYWORD]
    wanted = [(p.name, p.default) for p in theirs.parameters.values()]
    if len(common) != len(wanted):
        found.append(f"{len(common)} parameters, wanted {len(wanted)}")
    found += [f"{a}, wanted {b}" for a, b in zip(common, wanted, strict=False) if a != b]
    return found


def assert_within(ours: Any, plain: Any, exact: Any, size: float = 0.0) -> None:
    """Each element within twice the largest error of plain attention, and a band of roundings.

    ours, plain: in a narrow type; exact: the same in float64. The band is 16 roundings of the
    largest value, or of `size`, the largest term of sums that cancel; it carries tensors in which
    plain is exact by luck. dP - D of a row with one key is all rounding: both are sums of as many
    products as there are channels, in another order; 8.6 roundings were seen.
    """
    assert ours.shape == exact.shape and ours.dtype == plain.dtype
    exact = exact.double()
    if not exact.numel():
        return
    error, allowed = (ours.double() - exact).abs(), (plain.double() - exact).abs().max().item()
    band = 16 * torch.finfo(ours.dtype).eps * max(exact.abs().max().item(), size)
    worst = error.max().item()
    assert worst <= PLAIN_FACTOR * allowed + band, (worst, allowed, band)


def term_size(inputs: Any, upstream: Any) -> float:
    """The largest term dP k (or q) of a gradient: |dO| |v| max(|q|, |k|, 1), by largest rows."""
    q, k, v = (x.detach().double() for x in inputs[:3])
    rows = [x.norm(dim=-1).max().item() if x.numel() else 0.0 for x in (upstream.double(), v)]
    return rows[0] * rows[1] * max(1.0, q.abs().max().item(), k.abs().max().item())
