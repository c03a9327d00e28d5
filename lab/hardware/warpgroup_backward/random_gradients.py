"""Gradients of a drawn call through the public functions, held to the definition in float64.

`lab.hardware.guarded.random_calls` draws the calls. Each gradient is within twice the error of the
same with P and dS in the call's own type; the gradients are those of O and of the LSE. Of two
queries and keys that error may be small by chance, so that NumPy's gradients were beyond in 6 of
8,000 draws: it counts as two standard deviations of what rounding does, at least.
"""

from __future__ import annotations

from typing import Any

from lab.hardware.warpgroup_forward.random_launches import (
    Drawn,
    MakeTensors,
    describe,
    hidden_scores,
    make_tensors,
    options_of,
)

SLACK, ROOM = 2.0, 2.0**-8  # of plain gradients' error; of the largest one
FEWEST_DEVIATIONS = 2.0


def run(
    drawn: Drawn, deterministic: bool, seed: int, impl: str, make: MakeTensors = make_tensors
) -> float:
    """The largest error of a gradient as a share of its band; raises AssertionError beyond it.

    The gradients are those of O and of the LSE.
    """
    import torch

    import fa4

    place = "cuda" if impl == "sm90" else "cpu"
    torch.manual_seed(seed)
    call = describe(drawn)
    q, k, v = (x.requires_grad_() for x in make(drawn, call, place))
    options, seen = options_of(drawn, call, place)
    sink = options["learnable_sink"]
    varlen = drawn.packed or drawn.used
    function = fa4.flash_attn_varlen_func if varlen else fa4.flash_attn_func
    found = function(q, k, v, impl=impl, deterministic=deterministic, return_lse=True, **options)
    dout, dlse = torch.randn_like(found.out), torch.randn_like(found.lse)
    grads = torch.autograd.grad((found.out, found.lse), (q, k, v), (dout, dlse))
    worst = 0.0
    starts = [0, 0]
    for b, ((rows, keys), shown) in enumerate(zip(drawn.lengths, seen, strict=True)):
        at = [slice(starts[0], starts[0] + rows), slice(starts[1], starts[1] + shown)]
        starts = [starts[0] + rows, starts[1] + keys]
        if not drawn.packed:
            at = [slice(0, rows), slice(0, shown)]
        row_parts, key_parts = (
            [(x if drawn.packed else x[b])[where].detach() for x in some]
            for some, where in (((q, dout, grads[0]), at[0]), ((k, v, *grads[1:]), at[1]))
        )
        if rows and shown:
            lse_part = dlse[:, slice(starts[0] - rows, starts[0])] if drawn.packed else dlse[b]
            tensors = (row_parts[0], key_parts[0], key_parts[1], row_parts[1], lse_part)
            mine = (row_parts[2], key_parts[2], key_parts[3])
            worst = max(worst, compare_gradients(tensors, mine, drawn, sink))
    return worst


def compare_gradients(
    tensors: tuple[Any, ...], found: tuple[Any, ...], drawn: Drawn, sink: Any
) -> float:
    """The error of one sequence's gradients as a share of their bands."""
    import torch

    kind, group = tensors[0].dtype, drawn.heads[0] // drawn.heads[1]
    q, k, v, dout = (x.transpose(0, 1).double() for x in tensors[:4])
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    scale = drawn.dims[0] ** -0.5
    s = q @ k.transpose(-1, -2) * scale
    capped = drawn.softcap * torch.tanh(s / drawn.softcap) if drawn.softcap else s
    slope = 1 - (capped / drawn.softcap) ** 2 if drawn.softcap else 1.0
    capped = capped.masked_fill(hidden_scores(s, drawn.window), -torch.inf)
    lse = torch.logsumexp(capped, -1)
    if sink is not None:
        lse = torch.logaddexp(lse, sink.double()[:, None])
    p = torch.exp(capped - lse.nan_to_num(neginf=0.0)[..., None])
    dlse = tensors[4].double()[..., None]

    def gradients(kind: Any) -> list[Any]:
        out = (p @ v).to(kind).double()
        d = (dout * out).sum(-1, keepdim=True) - dlse
        ds = (p * (dout @ v.transpose(-1, -2) - d) * slope).to(kind).double()
        of_keys = (ds.transpose(-1, -2) @ q * scale, p.to(kind).double().transpose(-1, -2) @ dout)
        dk, dv = (x.unflatten(0, (-1, group)).sum(1) for x in of_keys)
        return [x.to(kind).double() for x in (ds @ k * scale, dk, dv)]

    # Rounding is off by up to half a unit in the last place, everywhere alike.
    step = torch.finfo(kind).eps / 2 * 3**-0.5

    def deviations() -> list[Any]:
        """Of dQ, dK and dV by rounding dS and P, and what rounding O does to D of a row."""
        out = p @ v
        d = (dout * (out.to(kind).double() - out)).sum(-1, keepdim=True) ** 2
        ds = p * (dout @ v.transpose(-1, -2) - (dout * out).sum(-1, keepdim=True) + dlse) * slope
        of_ds, weights = (ds * step) ** 2, p * slope
        of_q = of_ds @ (k * scale) ** 2 + (weights @ k * scale) ** 2 * d
        of_k = (of_ds + weights**2 * d).transpose(-1, -2) @ (q * scale) ** 2
        of_v = ((p * step) ** 2).transpose(-1, -2) @ dout**2
        of_keys = (x.unflatten(0, (-1, group)).sum(1) for x in (of_k, of_v))
        return [x.sqrt().max() for x in (of_q, *of_keys)]

    names, whole, rounded = ("dQ", "dK", "dV"), gradients(torch.float64), gradients(kind)
    few = [FEWEST_DEVIATIONS * x for x in deviations()]
    checks = []
    for name, mine, exact, plain, least in zip(names, found, whole, rounded, few, strict=True):
        usual = torch.maximum((plain - exact).abs().max(), least)
        band = SLACK * usual + ROOM * exact.abs().max() + 1e-3
        error = (mine.transpose(0, 1).double() - exact).abs().max()
        checks.append((name, float(error), float(band)))
    # Not in the loop: its tensors would be freed with the exception set, which the callback of an
    # allocator in Python (`lab.hardware.guarded.memory`) loses.
    for name, off, limit in checks:
        assert off <= limit, f"{name} is off by {off:.2e} of {limit:.2e}"
    return max(off / limit for _, off, limit in checks)
