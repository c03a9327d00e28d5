"""Compiles the Hopper backward kernels, checks each, and times them beside others on a GPU.

    python -m lab.hardware.warpgroup_backward.measure OUT.json [--wide] [--plan PLAN.json]

Without a plan: the paper's grid (16k tokens, 2,048 columns of heads; d 64 and 128, with and without
a causal mask, 1k to 16k) with the kernels that fa4 chooses, in any and in a fixed order of sums,
beside cuDNN and FlashAttention-2 by torch and flash-attn-4; --wide: the same of (d, dv) =
(192, 128), 192 and 256. PLAN.json: {"variants": {name: fields of the backward spec}, "problems":
[fields of GradientProblem], "peers": [names]}. Gradients of small calls are compared with torch's
in float32, within twice the error of the same in the call's own type. Needs torch and CuTe-DSL.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fa4.compiled.artifact import CompiledKernel, compile_artifact, from_bytes, to_bytes
from fa4.compiled.build import compile_kernel
from fa4.compiled.launch import COUNTS, WORKSPACE, BackwardArguments, workspace_shapes
from fa4.compiled.variants import find_tuned_backward
from fa4.hardware import H200
from fa4.kit.features import BackwardFeatures
from fa4.sm100.backward.workspace import tiles_of
from lab.hardware.there import describe_machine
from lab.hardware.warpgroup_forward.measure import Meter, Watchdog, frame_bytes, measured

PEERS = ("cudnn", "flash-attn-2", "flash-attn-4")
CHECKED = ((1, 300, 417, 2, 2), (2, 640, 1024, 4, 2), (1, 77, 5, 3, 1), (1, 64, 1, 1, 1))
TOKENS, COLUMNS = 16384, 2048
FLOPS_PER_PAIR = 2.0  # of each column of each of the five products
LENGTHS = (1024, 2048, 4096, 8192, 16384)
SUMS: list[tuple[str, dict[str, Any]]] = [("", {}), (" deterministic", {"deterministic": True})]
PAPER, WIDE = ((64, 64), (128, 128)), ((192, 128), (192, 192), (256, 256))  # (d, dv)


@dataclass(frozen=True)
class GradientProblem:
    """A call that is timed."""

    head_dim: int
    causal: bool
    seqlen: int
    batch: int
    heads: int
    head_dim_v: int | None = None

    @property
    def dims(self) -> tuple[int, int]:
        """d and dv."""
        return self.head_dim, self.head_dim_v or self.head_dim

    @property
    def flops(self) -> float:
        """Of the five products; of the visible half where causal."""
        pairs = self.seqlen**2 / (2 if self.causal else 1)
        columns = 3 * self.dims[0] + 2 * self.dims[1]
        return FLOPS_PER_PAIR * self.batch * self.heads * pairs * columns


def default_plan(wide: bool = False) -> dict[str, Any]:
    """The grid of the paper; wide: of wider heads, with fewer peers."""
    dims = WIDE if wide else PAPER
    kinds = [(d, dv, causal) for d, dv in dims for causal in (False, True)]
    choices = SUMS[:1] if wide else SUMS  # of wide heads all sums have one order
    return {
        "variants": {
            f"d{d if d == dv else (d, dv)}{' causal' * causal}{name}": {
                "head_dim": d, "head_dim_v": dv, "causal": causal, **fields
            }
            for d, dv, causal in kinds for name, fields in choices
        },
        "problems": [
            {"head_dim": d, "causal": causal, "seqlen": n, "batch": TOKENS // n,
             "heads": COLUMNS // d} | ({} if d == dv else {"head_dim_v": dv})
            for n in LENGTHS for d, dv, causal in kinds
        ],
        "peers": [peer for peer in PEERS if not (wide and peer == "flash-attn-2")],
    }  # fmt: skip


def spec_of(fields: dict[str, Any]) -> Any:
    """The backward spec of its head dims."""
    return find_tuned_backward(gpu=H200, **fields)


def compiled(item: tuple[str, dict[str, Any]]) -> tuple[str, bytes, str]:
    """A variant's kernels as bytes, or why there are none."""
    name, fields = item
    try:
        return name, to_bytes(compile_artifact(spec_of(fields), "sm_90a", compile_kernel)), ""
    except Exception as error:
        return name, b"", f"{type(error).__name__}: {error}"


class GradientInputs:
    """Tensors of one call, random normal values; O and the LSE by torch."""

    def __init__(
        self, spec: BackwardFeatures, batch: int, rows: int, keys: int, heads: int,
        heads_k: int, device: str = "cuda",
    ) -> None:  # fmt: skip
        import torch

        torch.manual_seed(0)
        kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[spec.dtype]

        def draw(length: int, heads: int, dim: int) -> Any:
            return torch.randn(batch, length, heads, dim, device=device, dtype=kind)

        self.spec, d, dv = spec, spec.head_dim, spec.head_dim_v
        self.q, self.k = draw(rows, heads, d), draw(keys, heads_k, d)
        self.v, self.dout = draw(keys, heads_k, dv), draw(rows, heads, dv)
        self.scale = d**-0.5
        self.out, self.lse = draw(rows, heads, dv), torch.randn(batch, heads, rows, device=device)
        self.grads = [torch.empty_like(x) for x in (self.q, self.k, self.v)]
        self.spaces: dict[tuple[Any, ...], dict[str, Any]] = {}

    def forward(self) -> None:
        """O and the LSE of the call, by fa4's own kernel."""
        import fa4

        self.out, self.lse = fa4.flash_attn_func(
            self.q, self.k, self.v, causal=self.spec.causal, return_lse=True, impl="sm90"
        )

    def space_of(self, spec: BackwardFeatures) -> dict[str, Any]:
        """The workspace of a kernel, by name; those of the same shapes share it."""
        import torch

        batch, rows = self.q.shape[:2]
        tiles = tiles_of(rows, batch, packed=False, block_rows=spec.block_rows)
        shapes = workspace_shapes(spec, self.q.shape[2], tiles)
        key = tuple(shapes.items())
        if key not in self.spaces:
            self.spaces[key] = {
                name: torch.empty(shapes[name], device=self.q.device,
                                  dtype=torch.int32 if name in COUNTS else torch.float32)
                for name in WORKSPACE if name in shapes
            }  # fmt: skip
        return self.spaces[key]

    def launch(self, kernel: CompiledKernel) -> None:
        """The three kernels on these tensors."""
        dq, dk, dv = self.grads
        given = self.space_of(kernel.spec) | {
            "q": self.q, "k": self.k, "v": self.v, "out": self.out, "dout": self.dout,
            "lse": self.lse, "dq": dq, "dk": dk, "dv": dv, "softmax_scale": self.scale,
            "max_seqlen_q": self.q.shape[1], "max_seqlen_k": self.k.shape[1],
        }  # fmt: skip
        kernel(*BackwardArguments(**dict.fromkeys(BackwardArguments._fields) | given))


def exact(given: GradientInputs, kind: Any) -> list[Any]:
    """O, LSE and the gradients by torch, computed in a type."""
    import torch

    spec = given.spec
    q, k, v, dout = (x.detach().to(kind).transpose(1, 2) for x in
                     (given.q, given.k, given.v, given.dout))  # fmt: skip
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    wide_k, wide_v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = (q @ wide_k.transpose(-1, -2)).float() * given.scale
    if spec.causal:
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device)
        s = s.masked_fill(hidden.triu(s.shape[-1] - s.shape[-2] + 1), -torch.inf)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - torch.where(torch.isinf(lse), 0.0, lse)[..., None])
    out = p.to(kind) @ wide_v
    grads = torch.autograd.grad(out, (q, k, v), dout)
    return [x.detach().transpose(1, 2) for x in (out, *grads)] + [lse.detach()]


def check(kernel: CompiledKernel) -> dict[str, Any]:
    """The largest error of each gradient over small calls, as a share of its band."""
    import torch

    worst: dict[str, Any] = {"dq": 0.0, "dk": 0.0, "dv": 0.0, "ok": True}
    for sizes in CHECKED:
        given = GradientInputs(kernel.spec, *sizes)
        wanted, plain = exact(given, torch.float32), exact(given, given.q.dtype)
        given.out, given.lse = wanted[0].to(given.q.dtype).contiguous(), wanted[4].contiguous()
        for grad in given.grads:
            grad.fill_(torch.nan)
        given.launch(kernel)
        torch.cuda.synchronize()
        for i, name in enumerate(("dq", "dk", "dv")):
            target = wanted[i + 1].double()
            band = 2 * (plain[i + 1].double() - target).abs().max().item()
            band += 2**-7 * target.abs().max().item() + 1e-5
            error = (given.grads[i].double() - target).abs().max().item()
            worst[name] = max(worst[name], error / band if error == error else float("inf"))
            worst["ok"] &= bool(error <= band)
    return worst


def peer_functions(names: list[str], given: GradientInputs) -> dict[str, Callable[[], Any]]:
    """Gradients by other implementations on the same tensors."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    causal = given.spec.causal

    def of_torch(backend: Any) -> Callable[[], Any]:
        q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in
                   (given.q, given.k, given.v))  # fmt: skip
        with sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        dout = given.dout.transpose(1, 2)
        return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    def of_flash() -> Callable[[], Any]:
        from flash_attn.cute.interface import _flash_attn_bwd

        return lambda: _flash_attn_bwd(
            given.q, given.k, given.v, given.out, given.dout, given.lse, causal=causal
        )

    makers = {
        "cudnn": lambda: of_torch(SDPBackend.CUDNN_ATTENTION),
        "flash-attn-2": lambda: of_torch(SDPBackend.FLASH_ATTENTION),
        "flash-attn-4": of_flash,
    }

    def make(name: str) -> Callable[[], Any]:
        function = makers[name]()
        function()  # what cannot do the call says so here
        torch.cuda.synchronize()
        return function

    found = {name: attempt(name, partial(make, name)) for name in names}
    return {name: function for name, function in found.items() if function}


def warm_flash(kind: tuple[int, int, bool]) -> None:
    """Has flash-attn-4 compile its kernels into its cache."""
    import torch
    from flash_attn.cute.interface import _flash_attn_bwd

    d, dv, causal = kind
    q, k, v, out, dout = (
        torch.zeros(1, 256, 1, dim, device="cuda", dtype=torch.bfloat16)
        for dim in (d, d, dv, dv, dv)
    )
    lse = torch.zeros(1, 1, 256, device="cuda")
    _flash_attn_bwd(q, k, v, out, dout, lse, causal=causal)


def kernel_times(function: Callable[[], Any]) -> dict[str, float]:
    """Microseconds of each kernel of a call, by torch's profiler."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            function()
        torch.cuda.synchronize()
    return {
        event.key[:60] + event.key[-12:]: event.device_time
        for event in profile.key_averages()
        if event.device_time > 0
    }


def attempt(what: str, function: Callable[[], Any]) -> Any:
    """What a function returns; None, and why is said, if it fails."""
    try:
        return function()
    except Exception as error:
        print(f"{what}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return None


def run(
    plan: dict[str, Any], kernels: dict[str, CompiledKernel], seconds: float, out: Path
) -> bool:
    """Checks, then timings until the time is over; what is found is written as it is found."""
    begun, watchdog, meter = time.monotonic(), Watchdog(), Meter()
    found: dict[str, Any] = describe_machine() | {"checks": {}, "rows": []}
    checks, good = found["checks"], {}
    for name, kernel in kernels.items():
        watchdog.alive(f"check {name}")
        checks[name] = {"ok": False, "frame_bytes": frame_bytes(kernel)}
        checks[name] |= attempt(name, lambda kernel=kernel: check(kernel)) or {}
        print(f"{name}: {checks[name]}", flush=True)
        if checks[name]["ok"]:
            good[name] = kernel
        out.write_text(json.dumps(found, indent=1) + "\n")
    for fields in plan["problems"]:
        if time.monotonic() - begun > seconds:
            print("the time is over", flush=True)
            break
        problem = GradientProblem(**fields)
        watchdog.alive(f"time {problem}")
        fits = {
            name: kernel for name, kernel in good.items()
            if kernel.spec.causal == problem.causal
            and (kernel.spec.head_dim, kernel.spec.head_dim_v) == problem.dims
        }  # fmt: skip
        time_it = partial(time_problem, problem, fits, plan["peers"], meter)
        row = attempt(str(problem), time_it) if fits else None
        if row:
            found["rows"].append(row)
            found["seconds"] = time.monotonic() - begun
            out.write_text(json.dumps(found, indent=1) + "\n")
    return all(one["ok"] for one in checks.values())


def time_problem(
    problem: GradientProblem, kernels: dict[str, CompiledKernel], names: list[str], meter: Meter
) -> dict[str, Any]:
    """One line of the table."""
    spec = next(iter(kernels.values())).spec
    sizes = (problem.batch, problem.seqlen, problem.seqlen, problem.heads, problem.heads)
    given = GradientInputs(spec, *sizes)
    given.forward()
    functions: dict[str, Callable[[], Any]] = {
        name: (lambda kernel=kernel: given.launch(kernel)) for name, kernel in kernels.items()
    }
    parts = {
        name: attempt(name, partial(kernel_times, function)) or {}
        for name, function in functions.items()
    }
    functions |= peer_functions(names, given)
    times, state = measured(functions, meter, 0.02)
    table = {name: problem.flops / statistics.median(ms) / 1e9 for name, ms in times.items()}
    title = f"d{problem.dims} {'causal' if problem.causal else 'full'} {problem.seqlen}"
    clocks = {name: statistics.median(s[0] for s in some) for name, some in state.items()}
    listed = sorted(table.items(), key=lambda item: -item[1])
    print(f"{title}: " + "  ".join(f"{n} {rate:.0f}@{clocks[n]}" for n, rate in listed), flush=True)
    for name, found in parts.items():
        print(f"    {name}: " + ", ".join(f"{us:.0f} us" for us in found.values()), flush=True)
    return {"problem": asdict(problem), "tflops": table, "ms": times, "clocks_mhz": clocks,
            "kernels_us": parts}  # fmt: skip


def launch_once(variants: dict[str, dict[str, Any]]) -> None:
    """Each variant twice on a call of 4k tokens, and nothing else on the GPU."""
    import torch

    for name, fields in variants.items():
        spec = spec_of(fields)
        kernel = compile_artifact(spec, "sm_90a", compile_kernel)
        given = GradientInputs(
            spec, 2, 4096, 4096, COLUMNS // spec.head_dim, COLUMNS // spec.head_dim
        )
        for _ in range(2):
            given.launch(kernel)
        torch.cuda.synchronize()
        print(name, flush=True)


def main() -> int:
    """Writes what was found; prints a table. Exit code 1 if a kernel is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--wide", action="store_true", help="head dims above 128")
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--once", nargs="*", help="only launch these variants, for a profiler")
    arguments = parser.parse_args()
    plan = default_plan(arguments.wide)
    if arguments.plan:
        plan = json.loads(arguments.plan.read_text())
    if arguments.once:
        launch_once({name: plan["variants"][name] for name in arguments.once})
        return 0
    os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "1"
    begun = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        problems = [GradientProblem(**fields) for fields in plan["problems"]]
        kinds = sorted({(*problem.dims, problem.causal) for problem in problems})
        warmed = pool.map_async(warm_flash, kinds if "flash-attn-4" in plan["peers"] else [])
        kernels = {}
        for name, data, why in pool.imap(compiled, plan["variants"].items()):
            if why:
                print(f"{name}: {why[:300]}", flush=True)
            else:
                kernels[name] = from_bytes(data, spec_of(plan["variants"][name]))
        try:
            warmed.get(150)
        except Exception as error:
            print(f"flash-attn-4: {type(error).__name__}: {str(error)[:200]}", flush=True)
    print(f"{len(kernels)} kernels in {time.monotonic() - begun:.1f} s", flush=True)
    return int(not run(plan, kernels, arguments.seconds, arguments.out))


if __name__ == "__main__":
    raise SystemExit(main())
