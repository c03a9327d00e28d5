"""Compiles variants of the FP8 forward kernel, checks each, times them beside FlashAttention-3.

    python -m lab.hardware.warpgroup_fp8.measure PLAN.json RESULTS.jsonl

PLAN.json: {"variants": {name: fields of WarpgroupSpec; tau, offset and exp2 are the numerics' own},
"problems": [fields of Problem]}; a problem is timed with the variants of its head dims and mask,
and FlashAttention-3 where `flash_attn_interface` can be imported. A line of results per check and
per timing. Lines that are there already are not measured again, so that a run that a hanging kernel
has ended can be taken up. Needs torch and CuTe-DSL.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from fa4.compiled.artifact import CompiledKernel, compile_artifact, from_bytes, to_bytes
from fa4.compiled.forward import compile_warpgroup
from fa4.config import Exp2Split, ForwardConfig
from fa4.sm90.forward.spec import WarpgroupSpec
from lab.hardware.warpgroup_forward.measure import (
    PAUSE_S,
    Meter,
    Problem,
    Watchdog,
    frame_bytes,
    measured,
)

OFFSET_LOG2 = 8.0  # that P bears
# Batch, queries, keys, query heads, KV heads.
CHECKED = ((1, 300, 417, 2, 2), (2, 640, 1024, 4, 2), (1, 77, 5, 1, 1))
# How far from plain attention with P in 8 bits: root mean square and largest error. Plain attention
# takes the exact maximum, whose P is a power of two and so not rounded.
RMS_LIMIT, LARGEST_LIMIT = 1.25, 4.0
# Of LSE; scores have 14 bits, which factors of up to 1.5 each make coarser.
LSE_LIMIT, LSE_LIMIT_OF_FACTORS = 1e-3, 4e-3
LONG = ((128, 1024), (128, 16384), (128, 131072))  # queries, keys
MEANS = (0.0, 1.0)  # of V


def make_spec(fields: dict[str, Any]) -> WarpgroupSpec:
    """A spec from plain data."""
    fields = {"dtype": "e4m3", "head_dim": 128, "head_dim_v": 128, **fields}
    numerics = ForwardConfig(
        exp2=Exp2Split(**fields.pop("exp2", {})),
        rescale_threshold_log2=fields.pop("tau", 0.0),
        p_offset_log2=fields.pop("offset", OFFSET_LOG2),
    )
    return WarpgroupSpec(numerics=numerics, **fields)


def compiled(item: tuple[str, dict[str, Any]]) -> tuple[str, bytes, str]:
    """A variant's kernel as bytes, or why there is none."""
    name, fields = item
    try:
        return name, to_bytes(compile_artifact(make_spec(fields), "sm_90a", compile_warpgroup)), ""
    except Exception as error:
        return name, b"", f"{type(error).__name__}: {error}"


def of_spec(spec: WarpgroupSpec, factors: list[Any]) -> list[Any]:
    """Those of the factors of q, k and v that a spec's kernel takes, None for the others."""
    return [x if letter in spec.descale else None for letter, x in zip("qkv", factors, strict=True)]


class Inputs:
    """Tensors of one call: random normal values, rounded to 8 bits, and factors of q, k and v."""

    def __init__(
        self, spec: WarpgroupSpec, batch: int, rows: int, keys: int, heads: tuple[int, int],
        *, mean: float = 0.0, spread: float = 1.0,
    ) -> None:  # fmt: skip
        import torch

        torch.manual_seed(0)
        element = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[spec.dtype]

        def draw(length: int, count: int, dim: int, scale: float = 1.0, shift: float = 0.0) -> Any:
            x = torch.randn(batch, length, count, dim, device="cuda") * scale + shift
            return x.to(element)

        self.q = draw(rows, heads[0], spec.head_dim, spread)
        self.k = draw(keys, heads[1], spec.head_dim)
        self.v = draw(keys, heads[1], spec.head_dim_v, shift=mean)
        shape = (batch, rows, heads[0], spec.head_dim_v)
        self.o = torch.full(shape, 7.0, device="cuda", dtype=torch.bfloat16)
        self.lse = torch.full((batch, heads[0], rows), 7.0, device="cuda")
        self.sms = torch.cuda.get_device_properties(0).multi_processor_count
        self.scale = spec.head_dim**-0.5
        self.drawn = [0.5 + torch.rand(batch, heads[1], device="cuda") for _ in "qkv"]
        self.factors = of_spec(spec, self.drawn)

    def launch(self, kernel: CompiledKernel) -> None:
        """The kernel on these tensors."""
        import torch

        lse = self.lse if kernel.spec.lse else None
        drawn = (self.lse.new_zeros(1, dtype=torch.int32),) if kernel.spec.draws_work else ()
        kernel(self.q, self.k, self.v, self.o, lse, self.scale, None, None, None, self.q.shape[1],
               None, None, None, None, None, None, self.sms,
               *of_spec(kernel.spec, self.drawn), *drawn)  # fmt: skip

    def wide(self, x: Any, factor: Any) -> Any:
        """(batch, query heads, rows, dim) in float64, times its factor."""
        x = x.double().transpose(1, 2)
        if factor is not None:
            x = x * factor.double()[:, :, None, None]
        return x.repeat_interleave(self.q.shape[2] // x.shape[1], 1)

    def exact(self, causal: bool) -> tuple[Any, Any, Any]:
        """(O, O with P rounded to 8 bits, LSE) in float64."""
        import torch

        k, v = (self.wide(x, f) for x, f in zip((self.k, self.v), self.factors[1:], strict=True))
        q = self.q.double().transpose(1, 2)
        if self.factors[0] is not None:
            q = q * self.wide(torch.ones_like(self.k[:, :1, :, :1]), self.factors[0])
        s = q @ k.transpose(-1, -2) * self.scale
        if causal:
            rows, keys = s.shape[-2:]
            hidden = torch.ones(rows, keys, dtype=torch.bool, device="cuda").triu(keys - rows + 1)
            s = s.masked_fill(hidden, -torch.inf)
        lse = torch.logsumexp(s, -1)
        peak = s.amax(-1, keepdim=True).nan_to_num(0.0, 0.0, 0.0)
        p = torch.exp(s - peak)
        total = p.sum(-1, keepdim=True).clamp_min(1e-300)
        rounded = (p * 2**OFFSET_LOG2).float().to(self.q.dtype).double() / 2**OFFSET_LOG2
        return p @ v / total, rounded @ v / total, lse


def errors(given: Inputs, causal: bool) -> dict[str, Any]:
    """Of O beside that of plain attention with P in 8 bits, and of LSE."""
    import torch

    exact, plain, lse = given.exact(causal)
    found = given.o.transpose(1, 2).double()
    off, band = found - exact, plain - exact
    band_rms = band.square().mean().sqrt().item() + 2**-9 * exact.square().mean().sqrt().item()
    shown = torch.isfinite(lse)
    lse_error = (given.lse.double() - lse)[shown].abs().max().item() if shown.any() else 0.0
    return {
        "rms": off.square().mean().sqrt().item() / exact.square().mean().sqrt().item(),
        "bias": ((off * exact.sign()).mean() / exact.abs().mean()).item(),
        "rms_of_plain": off.square().mean().sqrt().item() / band_rms,
        "largest_of_plain": off.abs().max().item() / (band.abs().max().item() + 2**-8),
        "lse": lse_error,
        "empty": bool((torch.isneginf(given.lse) == ~shown).all()),
    }


def check(kernel: CompiledKernel) -> dict[str, Any]:
    """The worst of small calls."""
    import torch

    worst: dict[str, Any] = {"rms_of_plain": 0.0, "largest_of_plain": 0.0, "lse": 0.0}
    good = True
    for batch, rows, keys, *heads in CHECKED:
        given = Inputs(kernel.spec, batch, rows, keys, (heads[0], heads[1]))
        given.launch(kernel)
        torch.cuda.synchronize()
        found = errors(given, kernel.spec.causal)
        worst = {name: max(value, found[name]) for name, value in worst.items()}
        limit = LSE_LIMIT_OF_FACTORS if kernel.spec.descale else LSE_LIMIT
        good &= found["empty"] and found["lse"] < limit
        good &= found["rms_of_plain"] < RMS_LIMIT and found["largest_of_plain"] < LARGEST_LIMIT
    return {**worst, "ok": good}


def long_errors(kernel: CompiledKernel) -> list[dict[str, Any]]:
    """Errors over many keys, where the tensor core's sums count."""
    import torch

    found = []
    for rows, keys in LONG:
        for mean in MEANS:
            given = Inputs(kernel.spec, 1, rows, keys, (2, 2), mean=mean)
            given.launch(kernel)
            torch.cuda.synchronize()
            found.append({"keys": keys, "mean": mean, **errors(given, kernel.spec.causal)})
    return found


def peer_errors(kernel: CompiledKernel) -> list[dict[str, Any]]:
    """The same of FlashAttention-3, on the inputs of a kernel's spec; nothing where it is not."""
    import torch

    found = []
    for rows, keys in LONG:
        for mean in MEANS:
            given = Inputs(kernel.spec, 1, rows, keys, (2, 2), mean=mean)
            other = flash3(given, kernel.spec.causal)
            if other is None:
                return []
            out = other()
            given.o = out[0] if isinstance(out, tuple) else out
            torch.cuda.synchronize()
            kept = errors(given, kernel.spec.causal)
            found.append({"keys": keys, "mean": mean, "rms": kept["rms"], "bias": kept["bias"]})
    return found


def flash3(given: Inputs, causal: bool) -> Callable[[], Any] | None:
    """FlashAttention-3 on the same tensors, if it is here."""
    try:
        from flash_attn_interface import flash_attn_func  # type: ignore[import-not-found]
    except Exception as error:
        print(f"FlashAttention-3: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return None
    return partial(flash_attn_func, given.q, given.k, given.v, causal=causal)


def time_problem(
    problem: Problem, kernels: dict[str, CompiledKernel], note: Callable[..., None], meter: Meter
) -> None:
    """One line of the table."""
    fits = {
        name: kernel
        for name, kernel in kernels.items()
        if (kernel.spec.head_dim, kernel.spec.head_dim_v, kernel.spec.causal)
        == (problem.head_dim, problem.head_dim_v, problem.causal)
    }
    if not fits:
        return
    heads = problem.heads, problem.heads
    spec = next(iter(fits.values())).spec
    given = Inputs(spec, problem.batch, problem.seqlen, problem.seqlen, heads,
                   spread=problem.spread)  # fmt: skip
    functions: dict[str, Callable[[], Any]] = {
        name: partial(given.launch, kernel) for name, kernel in fits.items()
    }
    other = flash3(given, problem.causal)
    if other is not None:
        functions["flash-attn-3"] = other
    times, state = measured(functions, meter, PAUSE_S)
    table = {name: problem.flops / statistics.median(ms) / 1e9 for name, ms in times.items()}
    note(f"time {problem}", problem=asdict(problem), ms=times, state=state, tflops=table)
    mask = "causal" if problem.causal else "full"
    best = sorted(table.items(), key=lambda item: -item[1])
    print(
        f"d{problem.head_dim} {mask} {problem.batch}x{problem.seqlen}: "
        + "  ".join(
            f"{name} {rate:.0f}@{statistics.median(s[0] for s in state[name])}"
            for name, rate in best
        ),
        flush=True,
    )


def load_kernels(items: list[tuple[str, dict[str, Any]]], processes: int) -> dict[str, Any]:
    """name -> (kernel or None, why there is none)."""
    if not items:
        return {}
    with multiprocessing.get_context("spawn").Pool(min(processes, len(items))) as pool:
        fields = dict(items)
        return {
            name: (from_bytes(data, make_spec(fields[name])) if data else None, why)
            for name, data, why in pool.imap(compiled, items)
        }


def main() -> int:
    """Writes lines of results; prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    plan = json.loads(arguments.plan.read_text())
    lines = arguments.results.read_text().splitlines() if arguments.results.exists() else []
    seen = {json.loads(line)["what"] for line in lines}
    bad = {what for what in seen if what.startswith("check ")}
    bad -= {what.replace("checked ", "check ") for what in seen}
    begun = time.monotonic()
    items = [item for item in plan["variants"].items() if f"check {item[0]}" not in bad]
    kernels = load_kernels(items, arguments.processes)
    print(f"{len(kernels)} kernels in {time.monotonic() - begun:.1f} s", flush=True)
    watchdog = Watchdog()
    with arguments.results.open("a") as file:

        def note(what: str, **data: Any) -> None:
            file.write(json.dumps({"what": what, **data}) + "\n")
            file.flush()

        good = checked_kernels(kernels, plan, note, watchdog)
        note_peer(good, note)
        meter = Meter()
        for fields in plan["problems"]:
            problem = Problem(**fields)
            if f"time {problem}" in seen:
                continue
            watchdog.alive(f"time {problem}")
            time_problem(problem, good, note, meter)
    return 0


def note_peer(good: dict[str, CompiledKernel], note: Callable[..., None]) -> None:
    """Errors of FlashAttention-3 beside those of one of the kernels without a mask."""
    plain = [kernel for kernel in good.values() if not kernel.spec.causal]
    try:
        found = peer_errors(plain[0]) if plain else []
    except Exception as error:
        print(f"FlashAttention-3: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return
    if found:
        note("peer flash-attn-3", long=found)
        print(f"flash-attn-3: {found}", flush=True)


def checked_kernels(
    kernels: dict[str, Any], plan: dict[str, Any], note: Callable[..., None], watchdog: Watchdog
) -> dict[str, CompiledKernel]:
    """Those that are right."""
    good = {}
    for name, (kernel, why) in kernels.items():
        watchdog.alive(f"check {name}")
        note(f"check {name}", error=why)
        if kernel is None:
            print(f"{name}: {why[:300]}", flush=True)
            continue
        result = check(kernel) | {"frame_bytes": frame_bytes(kernel)}
        if name in plan.get("long", ()):
            result["long"] = long_errors(kernel)
        note(f"checked {name}", fields=plan["variants"][name], **result)
        print(f"{name}: {result}", flush=True)
        if result["ok"]:
            good[name] = kernel
    return good


if __name__ == "__main__":
    raise SystemExit(main())
