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
    largest value, or of `size`, of sums that cancel (see `sum_sizes`); it carries tensors in which
    plain is exact by luck.
    """
    assert ours.shape == exact.shape and ours.dtype == plain.dtype
    exact = exact.double()
    if not exact.numel():
        return
    error, allowed = (ours.double() - exact).abs(), (plain.double() - exact).abs().max().item()
    band = 16 * torch.finfo(ours.dtype).eps * max(exact.abs().max().item(), size)
    worst = error.max().item()
    assert worst <= PLAIN_FACTOR * allowed + band, (worst, allowed, band)


def sum_sizes(inputs: Any, upstream: Any, sequence: int = -2) -> list[float]:
    """What the roundings of (out, dq, dk, dv, dbias) are relative to, where all terms cancel.

    inputs: q, k, v with their rows in dimension `sequence`; upstream: dO. With one key dP - D is
    all rounding: both are sums of as many products as there are channels, in another order. Its
    size is |dO| |v| by largest rows. dq adds such terms times k, weighted with P: no more than
    one. dk adds one times q for each row, dbias one for each row of all heads; their roundings are
    independent, so they grow with the root of that number.
    """
    q, k, v = (x.detach().double() for x in inputs[:3])
    if not (q.numel() and k.numel() and v.numel()):
        return [0.0] * 5
    term = upstream.double().norm(dim=-1).max().item() * v.norm(dim=-1).max().item()
    all_rows = q.numel() / q.shape[-1]
    rows_of_a_key = all_rows * k.shape[sequence] * k.shape[-1] / k.numel()
    grown = rows_of_a_key**0.5
    key, query = (max(1.0, x.abs().max().item()) for x in (k, q))
    return [0.0, term * key, term * query * grown, term * grown, term * all_rows**0.5]
