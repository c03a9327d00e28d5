"""Compiles variants of the Hopper forward kernel, checks each, and times them beside others.

    python -m lab.hardware.warpgroup_forward.measure PLAN.json RESULTS.jsonl

PLAN.json: {"variants": {name: fields of WarpgroupSpec}, "problems": [fields of Problem], "peers":
["cudnn", "flash-attn-4"]}; a problem is timed with the variants of its head dims and mask. A line
of results per check and per timing. Lines that are there already are not measured again, so that a
run that a hanging kernel has ended can be taken up. Needs torch and CuTe-DSL.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fa4.compiled.artifact import CompiledKernel, compile_artifact, from_bytes, to_bytes
from fa4.compiled.forward import compile_warpgroup
from fa4.config import Exp2Split, ForwardConfig
from fa4.inspect.cubin import read_resources
from fa4.sm90.forward.spec import WarpgroupSpec

HANGS_AFTER_S = 40.0
ROUNDS, BURST_MS, PAUSE_S = 5, 1.5, 0.02
HOST_CYCLES = 3_000_000  # that the GPU sleeps, at least as long as the host needs for a burst
CHECKED = ((1, 300, 417, 2), (2, 640, 1024, 3), (1, 77, 5, 1))  # batch, queries, keys, heads


@dataclass(frozen=True)
class Problem:
    """A call that is timed. spread: standard deviation of Q; that of K and V is 1."""

    head_dim: int
    head_dim_v: int
    causal: bool
    seqlen: int
    batch: int
    heads: int
    spread: float = 1.0

    @property
    def flops(self) -> float:
        """Of both products; of the visible half where causal."""
        pairs = self.seqlen**2 / (2 if self.causal else 1)
        return 2.0 * self.batch * self.heads * pairs * (self.head_dim + self.head_dim_v)


def make_spec(fields: dict[str, Any]) -> WarpgroupSpec:
    """A spec from plain data; exp2 and tau are the numerics' own."""
    fields = dict(fields)
    exp2 = Exp2Split(**fields.pop("exp2", {}))
    tau = fields.pop("tau", 8.0)
    return WarpgroupSpec(numerics=ForwardConfig(exp2=exp2, rescale_threshold_log2=tau), **fields)


def frame_bytes(kernel: CompiledKernel) -> int:
    """Local memory of a thread: 0 if nothing was spilled."""
    return max(resources.frame_bytes for resources in read_resources(kernel.cubin))


def compiled(item: tuple[str, dict[str, Any]]) -> tuple[str, bytes, str]:
    """A variant's kernel as bytes, or why there is none."""
    name, fields = item
    try:
        artifact = compile_artifact(make_spec(fields), "sm_90a", compile_warpgroup)
        return name, to_bytes(artifact), ""
    except Exception as error:
        return name, b"", f"{type(error).__name__}: {error}"


class Inputs:
    """Tensors of one call, random normal values."""

    def __init__(self, spec: WarpgroupSpec, batch: int, rows: int, keys: int, heads: int) -> None:
        import torch

        torch.manual_seed(0)
        element = {"bf16": torch.bfloat16, "fp16": torch.float16}[spec.dtype]

        def draw(length: int, dim: int) -> Any:
            return torch.randn(batch, length, heads, dim, device="cuda", dtype=element)

        self.q, self.k = draw(rows, spec.head_dim), draw(keys, spec.head_dim)
        self.v = draw(keys, spec.head_dim_v)
        self.o = torch.full((batch, rows, heads, spec.head_dim_v), 7.0, device="cuda",
                            dtype=element)  # fmt: skip
        self.lse = torch.full((batch, heads, rows), 7.0, device="cuda")
        self.counter = torch.int32
        self.sms = torch.cuda.get_device_properties(0).multi_processor_count
        self.scale = spec.head_dim**-0.5

    def launch(self, kernel: CompiledKernel) -> None:
        """The kernel on these tensors."""
        nones = (None,) * 3
        lse = self.lse if kernel.spec.lse else None
        drawn = (self.lse.new_zeros(1, dtype=self.counter),) if kernel.spec.draws_work else ()
        kernel(self.q, self.k, self.v, self.o, lse, self.scale, *nones, self.q.shape[1],
               None, None, None, None, None, None, self.sms, *drawn)  # fmt: skip


def check(kernel: CompiledKernel) -> dict[str, Any]:
    """The largest errors of O and LSE over small calls; O's as a share of its band.

    That is twice plain attention's, and half an ulp of the largest element: where plain attention
    happens to round well, twice its error is less than what rounding alone may cost.
    """
    import torch

    worst: dict[str, Any] = {"o": 0.0, "lse": 0.0, "ok": True}
    for batch, rows, keys, heads in CHECKED:
        given = Inputs(kernel.spec, batch, rows, keys, heads)
        given.launch(kernel)
        torch.cuda.synchronize()
        q, k, v = (x.double().transpose(1, 2) for x in (given.q, given.k, given.v))
        s = q @ k.transpose(-1, -2) * given.scale
        hidden = torch.zeros(rows, keys, dtype=torch.bool, device="cuda")
        if kernel.spec.causal:
            hidden = torch.ones_like(hidden).triu(keys - rows + 1)
        s = s.masked_fill(hidden, -torch.inf)
        lse = torch.logsumexp(s, -1)
        p = torch.nan_to_num(torch.exp(s - lse.nan_to_num(0, 0, 0)[..., None]), 0.0)
        exact = p @ v
        plain = (p.to(given.q.dtype) @ v.to(given.q.dtype)).double()
        half_ulp = torch.finfo(given.q.dtype).eps / 2 * exact.abs().max().item()
        band = 2 * (plain - exact).abs().max().item() + half_ulp + 1e-5
        error = (given.o.transpose(1, 2).double() - exact).abs().max().item()
        shown = torch.isfinite(lse)
        lse_error = (given.lse.double() - lse)[shown].abs().max().item() if shown.any() else 0.0
        same_empty = bool((torch.isneginf(given.lse) == ~shown).all())
        worst["o"] = max(worst["o"], error / band)
        worst["lse"] = max(worst["lse"], lse_error)
        worst["ok"] &= error <= band and lse_error < 1e-3 and same_empty
    return worst


def peers(names: list[str], given: Inputs, causal: bool) -> dict[str, Callable[[], Any]]:
    """Other implementations on the same tensors."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def cudnn() -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            q, k, v = (x.transpose(1, 2) for x in (given.q, given.k, given.v))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def flash() -> Any:
        from flash_attn.cute.interface import flash_attn_func

        return flash_attn_func(given.q, given.k, given.v, causal=causal)

    known = {"cudnn": cudnn, "flash-attn-4": flash}
    return {name: known[name] for name in names}


class Meter:
    """The GPU's clock and power, as the driver tells them."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._library.nvmlInit_v2()
        self._device = ctypes.c_void_p()
        self._library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self._device))

    def read(self) -> tuple[int, float]:
        """MHz of the multiprocessors, watts."""
        clock, power = ctypes.c_uint(), ctypes.c_uint()
        self._library.nvmlDeviceGetClockInfo(self._device, 1, ctypes.byref(clock))
        self._library.nvmlDeviceGetPowerUsage(self._device, ctypes.byref(power))
        return clock.value, power.value / 1000


def warm_flash(kind: tuple[int, int, bool]) -> None:
    """Has flash-attn-4 compile a kernel into its cache."""
    import torch
    from flash_attn.cute.interface import flash_attn_func

    q, v = (torch.zeros(1, 256, 1, d, device="cuda", dtype=torch.bfloat16) for d in kind[:2])
    flash_attn_func(q, q, v, causal=kind[2])


def burst_ms(function: Callable[[], Any], calls: int) -> float:
    """Milliseconds of a call, in a burst of them that the GPU does not wait for."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HOST_CYCLES)
    function()
    start.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def calls_of_burst(name: str, function: Callable[[], Any]) -> int:
    """How often it is called in a burst; 0 if it cannot be, which is said."""
    import torch

    try:
        function()
        torch.cuda.synchronize()
        return max(1, min(100, round(BURST_MS / burst_ms(function, 2))))
    except Exception as error:
        print(f"  {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return 0


def measured(
    functions: dict[str, Callable[[], Any]], meter: Meter, pause_s: float
) -> tuple[dict[str, list[float]], dict[str, list[tuple[int, float]]]]:
    """Milliseconds per call of each, in bursts that take turns; clocks and power behind them."""

    calls = {name: calls_of_burst(name, function) for name, function in functions.items()}
    working = {name: function for name, function in functions.items() if calls[name]}
    found: dict[str, list[float]] = {name: [] for name in working}
    state: dict[str, list[tuple[int, float]]] = {name: [] for name in working}
    for _ in range(ROUNDS):
        for name, function in working.items():
            time.sleep(pause_s)
            found[name].append(burst_ms(function, calls[name]))
            state[name].append(meter.read())
    return found, state


class Watchdog:
    """Ends the process when nothing was done for long: a kernel hangs."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.doing = ""
        threading.Thread(target=self._watch, daemon=True).start()

    def alive(self, doing: str) -> None:
        """Something new is begun."""
        self.doing, self._last = doing, time.monotonic()

    def _watch(self) -> None:
        while time.monotonic() - self._last < HANGS_AFTER_S:
            time.sleep(0.5)
        print(f"HANGS: {self.doing}", flush=True)
        os._exit(3)


def main() -> int:
    """Writes lines of results; prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    plan = json.loads(arguments.plan.read_text())
    lines = arguments.results.read_text().splitlines() if arguments.results.exists() else []
    seen = {json.loads(line)["what"] for line in lines}
    begun = time.monotonic()
    if "flash-attn-4" in plan["peers"]:
        os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "1"
    items = [item for item in plan["variants"].items() if f"check {item[0]}" not in seen]
    with multiprocessing.get_context("spawn").Pool(min(arguments.processes, len(items))) as pool:
        kinds = {(p["head_dim"], p["head_dim_v"], p["causal"]) for p in plan["problems"]}
        warmed = pool.map_async(
            warm_flash, sorted(kinds) if "flash-attn-4" in plan["peers"] else []
        )
        kernels = {
            name: (from_bytes(data, make_spec(plan["variants"][name])) if data else None, why)
            for name, data, why in pool.imap(compiled, items)
        }
        warmed.wait()
    print(f"{len(kernels)} kernels in {time.monotonic() - begun:.1f} s", flush=True)
    watchdog = Watchdog()
    with arguments.results.open("a") as file:

        def note(what: str, **data: Any) -> None:
            file.write(json.dumps({"what": what, **data}) + "\n")
            file.flush()

        good = {}
        for name, (kernel, why) in kernels.items():
            watchdog.alive(f"check {name}")
            if kernel is None:
                note(f"check {name}", error=why)
                print(f"{name}: {why[:300]}", flush=True)
                continue
            note(f"check {name}", begun=True)
            result = check(kernel) | {"frame_bytes": frame_bytes(kernel)}
            note(f"checked {name}", **result)
            print(f"{name}: {result}", flush=True)
            if result["ok"] or plan.get("time_wrong"):
                good[name] = kernel
        for fields in plan["problems"]:
            only, pause_s = fields.pop("only", None), fields.pop("pause_s", PAUSE_S)
            time_problem(Problem(**fields), only, pause_s, good, plan["peers"], note, watchdog)
    return 0


def time_problem(
    problem: Problem, only: list[str] | None, pause_s: float, kernels: dict[str, CompiledKernel],
    peer_names: list[str], note: Callable[..., None], watchdog: Watchdog,
) -> None:  # fmt: skip
    """One line of the table."""
    fits = {
        name: kernel
        for name, kernel in kernels.items()
        if (kernel.spec.head_dim, kernel.spec.head_dim_v, kernel.spec.causal)
        == (problem.head_dim, problem.head_dim_v, problem.causal)
        and (only is None or name in only)
    }
    if not fits:
        return
    spec = next(iter(fits.values())).spec
    given = Inputs(spec, problem.batch, problem.seqlen, problem.seqlen, problem.heads)
    given.q *= problem.spread
    functions = {name: (lambda k=k: given.launch(k)) for name, k in fits.items()}
    functions.update(peers(peer_names, given, problem.causal))
    watchdog.alive(f"time {problem}")
    times, state = measured(functions, Meter(), pause_s)
    table = {name: problem.flops / statistics.median(ms) / 1e9 for name, ms in times.items()}
    note(f"time {problem}", problem=asdict(problem), ms=times, state=state, tflops=table)
    mask = "causal" if problem.causal else "full"
    title = f"d{problem.head_dim},{problem.head_dim_v} {mask} {problem.batch}x{problem.seqlen}"
    best = sorted(table.items(), key=lambda item: -item[1])
    print(
        f"{title}: "
        + "  ".join(
            f"{name} {rate:.0f}@{statistics.median(s[0] for s in state[name])}"
            for name, rate in best
        ),
        flush=True,
    )


if __name__ == "__main__":
    raise SystemExit(main())
