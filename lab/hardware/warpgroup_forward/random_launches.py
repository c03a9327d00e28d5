"""Random calls of the Hopper kernel on a GPU: do all of them end, and are they right?

    python -m lab.hardware.warpgroup_forward.random_launches OUT.json [--launches 1000] [--seed 0]

Sizes, masks, layouts and features are drawn; what each call computes is compared with float32
attention in torch, within twice the error of the same in the call's own type. The kernels are
compiled first, in parallel. A launch that does not end in 40 s ends the program with exit code 3.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fa4.compiled.build import build
from fa4.compiled.support import ForwardCall
from fa4.compiled.variants import choose_sm90_spec
from lab.hardware.there import describe_machine

HANGS_AFTER_S = 40.0
FORMS = 32
SLACK, LSE_LIMIT = 2.0, 1e-3  # of plain attention's error; natural logarithm
# Of 8-bit types: plain attention's maximum is exact. A product of 32 columns cuts the sum of a
# score off at so much of it (lab/hardware/wgmma_sums).
NARROW_SLACK, OFFSET_LOG2 = 4.0, 8.0
CUT_OFF, COLUMNS_OF_PRODUCT = 2.0**-13, 32
DIMS = ((64, 64), (128, 128), (128, 128), (96, 96), (192, 128), (256, 256), (72, 40), (64, 256))
HEADS = ((4, 4), (8, 2), (6, 2), (8, 1), (16, 16))
WINDOWS = ((None, None), (None, 0), (None, 0), (40, 0), (100, 30), (None, 25), (0, 0))


MakeTensors = Callable[["Drawn", ForwardCall, str], tuple[Any, Any, Any]]


class Drawn(NamedTuple):
    """A call. lengths: queries and keys of each sequence. used: half of the keys are seen."""

    dims: tuple[int, int]
    heads: tuple[int, int]
    window: tuple[int | None, int | None]
    lengths: tuple[tuple[int, int], ...]
    packed: bool
    used: bool
    sink: bool
    softcap: float
    dtype: str


def draw_all(seed: int, launches: int) -> list[Drawn]:
    """Calls of some forms, each with sequences of its own: short and long, of one length or many.

    Forms are few, as a kernel is compiled for each, and for its tiles.
    """
    rng = np.random.default_rng(seed)
    forms = [draw_form(rng) for _ in range(FORMS)]
    return [with_lengths(forms[rng.integers(FORMS)], rng) for _ in range(launches)]


def draw_form(rng: np.random.Generator) -> Drawn:
    """What selects the kernel, without sequences; half of the forms have no special feature."""
    plain = rng.random() < 0.5
    return Drawn(
        dims=DIMS[rng.integers(len(DIMS))],
        heads=HEADS[rng.integers(len(HEADS))],
        window=WINDOWS[rng.integers(2 if plain else len(WINDOWS))],
        lengths=(),
        packed=bool(rng.random() < 0.4),
        used=bool(not plain and rng.random() < 0.3),
        sink=bool(not plain and rng.random() < 0.2),
        softcap=20.0 if not plain and rng.random() < 0.2 else 0.0,
        dtype="fp16" if not plain and rng.random() < 0.3 else "bf16",
    )


def with_lengths(form: Drawn, rng: np.random.Generator) -> Drawn:
    """The form with 1 to 4 sequences; packed ones may be empty."""
    most, count = int(rng.choice([4, 70, 300, 1100])), int(rng.integers(1, 5))
    lengths = [(int(rng.integers(0, most)), int(rng.integers(0, most))) for _ in range(count)]
    if not form.packed:
        lengths = [(1 + lengths[0][0], 1 + lengths[0][1])] * count
    return form._replace(lengths=tuple(lengths))


def describe(drawn: Drawn) -> ForwardCall:
    """As the kernel's choice sees it."""
    rows = [sum(pair[i] for pair in drawn.lengths) for i in range(2)]
    if not drawn.packed:
        rows = list(drawn.lengths[0])
    return ForwardCall(
        dtype=drawn.dtype, head_dim=drawn.dims[0], head_dim_v=drawn.dims[1],
        heads_q=drawn.heads[0], heads_k=drawn.heads[1], batch=len(drawn.lengths), rows_q=rows[0],
        rows_k=rows[1], max_seqlen_q=max(q for q, _ in drawn.lengths) if drawn.packed else None,
        softmax_scale=drawn.dims[0] ** -0.5, window=drawn.window, sink=drawn.sink,
        softcap=drawn.softcap, packed_q=drawn.packed, packed_k=drawn.packed, used_k=drawn.used,
        num_splits=0,
    )  # fmt: skip


def compile_one(call: ForwardCall) -> str:
    """Into the cache; the key."""
    return build(choose_sm90_spec(call), "sm_90a").key


def compile_all(calls: list[ForwardCall], processes: int) -> int:
    """How many kernels there are, each compiled by one of the processes."""
    chosen = {choose_sm90_spec(call): call for call in calls if not call.is_empty}
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        return len(set(pool.map(compile_one, chosen.values())))


def element_type(dtype: str) -> Any:
    """In torch."""
    import torch

    names = {"bf16": "bfloat16", "fp16": "float16", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
    return getattr(torch, names[dtype])


def make_tensors(drawn: Drawn, call: ForwardCall, place: str) -> tuple[Any, Any, Any]:
    """Q, K and V of a call, contiguous."""
    import torch

    kind = element_type(drawn.dtype)

    def tensor(rows: int, heads: int, dim: int) -> torch.Tensor:
        shape = (rows, heads, dim) if drawn.packed else (call.batch, rows, heads, dim)
        return torch.randn(shape, device=place).to(kind)

    return (
        tensor(call.rows_q, call.heads_q, call.head_dim),
        tensor(call.rows_k, call.heads_k, call.head_dim),
        tensor(call.rows_k, call.heads_k, call.head_dim_v),
    )


def run(
    drawn: Drawn, seed: int, impl: str, make: MakeTensors = make_tensors, *, parts: int = 0,
    descale: str = "",
) -> float:  # fmt: skip
    """The call's largest error as a share of its band; raises AssertionError beyond it.

    parts: of the keys. descale: which of q, k and v have factors.
    """
    import torch

    import fa4

    place = "cuda" if impl == "sm90" else "cpu"
    torch.manual_seed(seed)
    call = describe(drawn)
    q, k, v = make(drawn, call, place)
    options, seen = options_of(drawn, call, place)
    shape = (call.batch, call.heads_k)
    factors = {x: 0.5 + torch.rand(shape, device=place) for x in descale}
    options |= {f"{x}_descale": factor for x, factor in factors.items()}
    varlen = drawn.packed or drawn.used
    function = fa4.flash_attn_varlen_func if varlen else fa4.flash_attn_func
    found = function(q, k, v, num_splits=parts, impl=impl, return_lse=True, **options)
    worst = 0.0
    start_q = start_k = 0
    for b, ((rows, keys), shown) in enumerate(zip(drawn.lengths, seen, strict=True)):
        if drawn.packed:
            mine = (q[start_q:][:rows], k[start_k:][:shown], v[start_k:][:shown])
            out, lse = found.out[start_q:][:rows], found.lse[:, start_q:][:, :rows]
        else:
            mine = q[b], k[b, :shown], v[b, :shown]
            out, lse = found.out[b], found.lse[b]
        start_q, start_k = start_q + rows, start_k + keys
        if rows:
            scales = {x: factor[b] for x, factor in factors.items()}
            sink = options["learnable_sink"]
            worst = max(worst, compare(mine, (out, lse), drawn, sink, scales))
    return worst


def options_of(drawn: Drawn, call: ForwardCall, place: str) -> tuple[dict[str, Any], list[int]]:
    """Keywords of the public functions; of each sequence, how many keys are seen."""
    import torch

    options: dict[str, Any] = {"window_size": drawn.window, "softcap": drawn.softcap}
    seen = [(keys + 1) // 2 if drawn.used else keys for _, keys in drawn.lengths]
    if drawn.used:
        options["seqused_k"] = torch.tensor(seen, dtype=torch.int32, device=place)
    sink = torch.randn(call.heads_q, device=place) if drawn.sink else None
    options["learnable_sink"] = sink
    if drawn.packed:
        for i, name in enumerate("qk"):
            ends = np.cumsum([0, *(pair[i] for pair in drawn.lengths)])
            options[f"cu_seqlens_{name}"] = torch.tensor(ends, dtype=torch.int32, device=place)
        options["max_seqlen_q"] = call.max_seqlen_q
    return options, seen


def compare(
    tensors: tuple[Any, Any, Any], found: tuple[Any, Any], drawn: Drawn, sink: Any,
    scales: Mapping[str, Any] = MappingProxyType({}),
) -> float:  # fmt: skip
    """The error of one sequence as a share of its band. Raises AssertionError beyond it.

    scales: of tensors, a factor for each KV head.
    """
    import torch

    group, kind = drawn.heads[0] // drawn.heads[1], tensors[0].dtype
    q, k, v = (x.transpose(0, 1).double() for x in tensors)
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    wide = {
        x: scale.double().repeat_interleave(group)[:, None, None] for x, scale in scales.items()
    }
    q, k, v = (x * wide.get(name, 1.0) for name, x in zip("qkv", (q, k, v), strict=True))
    s = q @ k.transpose(-1, -2) * drawn.dims[0] ** -0.5
    if drawn.softcap:
        s = drawn.softcap * torch.tanh(s / drawn.softcap)
    s = s.masked_fill(hidden_scores(s, drawn.window), -torch.inf)
    sinks = torch.full((s.shape[0], 1), -torch.inf, dtype=s.dtype, device=s.device)
    if sink is not None:
        sinks = sink.double()[:, None]
    lse = torch.logaddexp(torch.logsumexp(s, -1), sinks)
    p = torch.exp(s - lse.nan_to_num(neginf=0.0)[..., None])
    out, made = p @ v, found[0].dtype
    narrow = kind != made  # P in 8 bits; O in 16
    plain = (rounded(p, kind, narrow) @ v).to(made).double()
    largest = s[torch.isfinite(s)].abs().max().item() if torch.isfinite(s).any() else 0.0
    cut_off = narrow * CUT_OFF * largest * drawn.dims[0] / COLUMNS_OF_PRODUCT
    slack, lse_limit = NARROW_SLACK if narrow else SLACK, LSE_LIMIT + cut_off
    band = slack * (plain - out).abs().max().item() + 1e-3
    band += narrow * 2**-8 * out.abs().max().item()
    assert torch.equal(torch.isneginf(found[1]), torch.isneginf(lse)), "rows without keys"
    shown = torch.isfinite(lse)
    lse_error = (found[1].double() - lse)[shown].abs().max().item() if shown.any() else 0.0
    error = (found[0].transpose(0, 1).double() - out).abs()
    allowed = torch.full_like(error, band)
    if not narrow:  # where one element is larger than all others, plain attention may be lucky
        rounding = torch.finfo(made).eps / 2
        allowed = torch.maximum(allowed, rounding * (out.abs() + p @ v.abs()))
    share = max((error / allowed).max().item(), lse_error / lse_limit)
    assert share <= 1, f"O is off by {error.max():.2e} of {band:.2e}, LSE by {lse_error:.2e}"
    return share


def hidden_scores(s: Any, window: tuple[int | None, int | None]) -> Any:
    """(rows, keys): which a window hides."""
    import torch

    rows, keys = s.shape[-2:]
    place = torch.arange(keys, device=s.device) - torch.arange(rows, device=s.device)[:, None]
    left, right = window
    hidden = torch.zeros_like(place, dtype=torch.bool)
    if left is not None:
        hidden |= place < keys - rows - left
    if right is not None:
        hidden |= place > keys - rows + right
    return hidden


def rounded(p: Any, kind: Any, narrow: bool) -> Any:
    """P as a product takes it: of 8 bits each row by its own power of two."""
    import torch

    if not narrow or not p.numel():
        return p.to(kind).double()
    peak = p.amax(-1, keepdim=True).clamp_min(1e-300)
    factor = 2.0 ** (OFFSET_LOG2 - torch.ceil(torch.log2(peak)))
    return (p * factor).float().to(kind).double() / factor


def watch(state: dict[str, Any]) -> None:
    """Ends the process when a launch does not."""
    while True:
        time.sleep(0.5)
        if time.monotonic() - state["since"] > HANGS_AFTER_S:
            print(f"HANGS: {state['doing']}", flush=True)
            os._exit(3)


def main() -> int:
    """Compiles, launches, writes what was found; exit code 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--launches", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--impl", default="sm90")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only-compile", action="store_true")
    arguments = parser.parse_args()
    drawn = draw_all(arguments.seed, arguments.launches)
    start = time.perf_counter()
    kernels = compile_all([describe(one) for one in drawn], arguments.processes)
    report: dict[str, Any] = {"launches": len(drawn), "seed": arguments.seed, "kernels": kernels,
                              "compile_seconds": time.perf_counter() - start}  # fmt: skip
    print(report, flush=True)
    if arguments.only_compile:
        return 0
    state: dict[str, Any] = {"since": time.monotonic(), "doing": ""}
    threading.Thread(target=watch, args=(state,), daemon=True).start()
    start, worst, wrong = time.perf_counter(), 0.0, []
    for number, one in enumerate(drawn):
        state.update(since=time.monotonic(), doing=f"{number}: {one}")
        try:
            worst = max(worst, run(one, number, arguments.impl))
        except Exception as error:  # a wrong result does not end the search
            wrong.append({"number": number, "call": str(one), "error": str(error)[:300]})
            print(f"WRONG {number}: {one}: {error}", flush=True)
    report |= describe_machine() | {
        "seconds": time.perf_counter() - start, "worst_share": worst, "wrong": wrong,
        "drawn": {
            "packed": sum(one.packed for one in drawn), "used": sum(one.used for one in drawn),
            "dims": {str(dims): count for dims, count in Counter(x.dims for x in drawn).items()},
        },
    }  # fmt: skip
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report)[:2000], flush=True)
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
