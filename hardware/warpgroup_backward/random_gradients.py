"""Random gradients of the Hopper kernels on guarded memory of a GPU: do they end, are they right?

    python -m hardware.warpgroup_backward.random_launches OUT.json [--wide] [--launches 500]

Calls are drawn as `hardware.warpgroup_forward.random_launches` draws them, of head dims which the
backward kernel has; every tensor of torch begins or ends at unmapped memory
(`hardware.guarded.memory`). Each gradient is compared with the definition's in float64, within
twice the error of the same with P and dS in the call's own type. A launch that does not end in 40 s
ends the program with exit code 3.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from fa4.compiled.build import build
from fa4.compiled.support import BackwardCall, ForwardCall
from fa4.compiled.variants import choose_backward_spec, choose_sm90_spec
from fa4.hardware import H200
from hardware.warpgroup_forward.random_launches import (
    Drawn,
    MakeTensors,
    compile_one,
    describe,
    describe_machine,
    draw_form,
    hidden_scores,
    make_tensors,
    options_of,
    watch,
    with_lengths,
)

FORMS = 16
SLACK, ROOM = 2.0, 2.0**-8  # of plain gradients' error; of the largest one
DIMS = ((64, 64), (128, 128), (128, 128), (96, 96), (72, 40), (64, 128), (128, 64), (80, 80))
WIDE = (
    (192, 128), (256, 256), (136, 136), (160, 160), (192, 192), (256, 64), (64, 256), (256, 256),
)  # fmt: skip


def draw_gradients(
    seed: int, launches: int, dims: tuple[tuple[int, int], ...] = DIMS, count: int = FORMS
) -> list[tuple[Drawn, bool]]:
    """Calls of some forms, each with sequences of its own; and is the order of sums fixed?"""
    rng = np.random.default_rng(seed)
    forms = [draw_form(rng)._replace(dims=dims[i % len(dims)]) for i in range(count)]
    chosen = [int(rng.integers(count)) for _ in range(launches)]
    return [(with_lengths(forms[i], rng), bool(i // len(dims))) for i in chosen]


def spec_of(call: ForwardCall, deterministic: bool) -> Any:
    """The backward kernels of a call."""
    return choose_backward_spec(
        BackwardCall(**vars(call), deterministic=deterministic, lse_gradient=True), H200
    )


def compile_gradient(item: tuple[ForwardCall, bool]) -> str:
    """The backward kernels of a call into the cache; the key."""
    return build(spec_of(*item), "sm_90a").key


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

    worst = 0.0
    for name, mine, exact, plain in zip(
        ("dQ", "dK", "dV"), found, gradients(torch.float64), gradients(kind), strict=True
    ):
        band = SLACK * (plain - exact).abs().max() + ROOM * exact.abs().max() + 1e-3
        error = (mine.transpose(0, 1).double() - exact).abs().max()
        assert error <= band, f"{name} is off by {error:.2e} of {band:.2e}"
        worst = max(worst, float(error / band))
    return worst


def main() -> int:
    """Compiles, launches, writes what was found; exit code 1 if a gradient is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--launches", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--forms", type=int, default=FORMS, help="a kernel is compiled for each")
    parser.add_argument("--wide", action="store_true", help="head dims above 128")
    parser.add_argument("--seconds", type=float, default=60.0, help="no launch begins later")
    parser.add_argument("--impl", default="sm90", choices=("sm90", "emulator_sm90"))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    print("compiling", flush=True)
    dims = WIDE if arguments.wide else DIMS
    drawn = draw_gradients(arguments.seed, arguments.launches, dims, arguments.forms)
    calls = [(describe(one), fixed) for one, fixed in drawn]
    calls = [item for item in calls if not item[0].is_empty]
    gradients = {spec_of(call, fixed): (call, fixed) for call, fixed in calls}
    forward = {choose_sm90_spec(call): call for call, _ in calls}
    with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
        keys = [pool.submit(compile_gradient, item) for item in gradients.values()]
        keys += [pool.submit(compile_one, call) for call in forward.values()]
        kernels = len({key.result() for key in keys})
    print(f"{kernels} kernels", flush=True)
    if arguments.impl == "sm90":
        from hardware.guarded.memory import CudaDriver, GuardedMemory, install_in_torch

        install_in_torch(GuardedMemory(CudaDriver(), at_end=bool(arguments.seed % 2)))
    report = launch_all(drawn, arguments) | {"kernels": kernels}
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report)[:2000], flush=True)
    os._exit(bool(report["wrong"]))  # not the allocator's end, which comes after its driver's


def launch_all(drawn: list[tuple[Drawn, bool]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Every call, as long as there is time."""
    state: dict[str, Any] = {"since": time.monotonic(), "doing": ""}
    threading.Thread(target=watch, args=(state,), daemon=True).start()
    begun, worst, done, wrong = time.monotonic(), 0.0, 0, []
    for number, (one, fixed) in enumerate(drawn):
        if time.monotonic() - begun > arguments.seconds:
            break
        state.update(since=time.monotonic(), doing=f"{number}: {one}")
        try:
            worst = max(worst, run(one, fixed, number, arguments.impl))
        except Exception as error:  # a wrong result does not end the search
            text = f"{type(error).__name__}: {error}"[:300]
            wrong.append({"number": number, "call": str(one), "error": text})
            print(f"WRONG {number}: {one}: {text}", flush=True)
        done += 1
    return describe_machine() | {
        "launches": done, "seed": arguments.seed, "worst_share": worst, "wrong": wrong,
        "seconds": time.monotonic() - begun,
        "packed": sum(one.packed for one, _ in drawn[:done]),
        "fixed_order": sum(fixed for _, fixed in drawn[:done]),
    }  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
