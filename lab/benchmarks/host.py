"""What the host does for a call, from the public function to the launch, beside flash-attn-4.

With its gradient, a call goes on to the launch of the backward kernels. Measured are all of it;
what torch's autograd engine takes for a function that keeps the same tensors and only allocates;
and both passes of ours without the engine, which the bound is on.

    python -m lab.benchmarks.host [--output FILE]

Both compute on CPU tensors that claim to be on a B200, with kernels that are in the process and do
nothing: what is timed is Python, the checks, the outputs and the choice of the kernel. CPU seconds
of this thread, the least of several rounds of each in turn, since the machine is shared. Exit code
1 if a call takes longer than MOST_US microseconds, with its gradient but without the engine longer
than MOST_GRADIENT_US, or longer than flash-attn-4's.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

import fa4
from fa4.backends import Saved, kernel, kernel_backward, on_gpu
from fa4.call.checked import make_call
from fa4.call.choose import run_backward
from lab.benchmarks.common import parse_output, write_record

MOST_US, MOST_GRADIENT_US = 15.0, 40.0
ROUNDS, CALLS = 15, 400
FOREIGN_KERNELS = ("_flash_attn_fwd", "_bwd_preprocess", "_flash_attn_bwd",
                   "_bwd_postprocess_convert")  # fmt: skip
B200 = SimpleNamespace(multi_processor_count=148, name="NVIDIA B200", major=10, minor=0)


class NoKernels(dict[Any, Any]):
    """flash-attn-4's cache of compiled kernels, with one that does nothing for every key."""

    def __contains__(self, key: object) -> bool:
        return True

    def __getitem__(self, key: Any) -> Any:
        hash(key)  # a real one looks it up
        return _do_nothing


def _do_nothing(*arguments: Any) -> None:
    """A launch."""


@contextmanager
def pretended_b200() -> Iterator[Any]:
    """CPU tensors pass for a B200's; yields flash-attn-4's interface, None if not installed."""
    os.environ |= {"FLASH_ATTENTION_ARCH": "sm_100", "FLASH_ATTENTION_NUM_SMS": "148"}
    from lab.foreign import flash_attention, missing

    interface = None if missing() else flash_attention()
    with ExitStack() as stack:
        cuda = mock.patch.multiple(
            torch.cuda,
            get_device_capability=lambda device=None: (10, 0),
            get_device_properties=lambda device=None: B200,
            current_device=lambda: None,
        )
        stack.enter_context(cuda)
        stack.enter_context(mock.patch.object(torch.Tensor, "is_cuda", True))
        for module in (kernel, kernel_backward):
            built = mock.patch.object(module, "build", lambda spec, arch: _do_nothing)
            stack.enter_context(built)
        here = mock.patch.object(
            on_gpu, "find_fault", lambda family, call: "" if call.q.device.type else "-"
        )
        stack.enter_context(here)
        for name in FOREIGN_KERNELS if interface is not None else ():
            function = getattr(interface, name)
            stack.enter_context(mock.patch.object(function, "compile_cache", NoKernels()))
        yield interface


def cases(interface: Any) -> dict[str, tuple[Callable[[], Any], Callable[[], Any] | None]]:
    """For each kind of call: ours and, where installed, flash-attn-4's."""

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16)

    # Few rows: filling an output is the GPU's work, and here would be the CPU's.
    q, k, v = tensor(2, 4, 16, 128), tensor(2, 4, 4, 128), tensor(2, 4, 4, 128)
    offsets = torch.tensor([0, 3, 8], dtype=torch.int32)
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    plain = {"causal": True}
    window = {"window_size": (2, 0), "return_lse": True}
    lengths = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets,
               "max_seqlen_q": 5, "max_seqlen_k": 5, "causal": True}  # fmt: skip

    def ours(function: Any, inputs: Any, options: dict[str, Any]) -> Callable[[], Any]:
        return lambda: function(*inputs, **options, impl="sm100")

    def theirs(name: str, inputs: Any, options: dict[str, Any]) -> Callable[[], Any] | None:
        function = getattr(interface, name, None)
        return None if function is None else lambda: function(*inputs, **options)

    return {
        name: (ours(getattr(fa4, function), inputs, options), theirs(function, inputs, options))
        for name, function, inputs, options in (
            ("causal", "flash_attn_func", (q, k, v), plain),
            ("window, with LSE", "flash_attn_func", (q, k, v), window),
            ("variable lengths", "flash_attn_varlen_func", rows, lengths),
        )
    }


class Empty(torch.autograd.Function):
    """What autograd takes for a call of attention that only keeps its tensors and allocates."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """O and LSE, uninitialised."""
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> tuple[torch.Tensor, ...]:
        """dQ, dK and dV, uninitialised."""
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


def without_autograd(inputs: Any, dout: torch.Tensor, options: Any) -> Callable[[], Any]:
    """Our forward and backward pass, as autograd would call them."""
    call = make_call(*inputs, options, varlen=False)

    def both() -> Any:
        with torch.no_grad():
            result = fa4.flash_attn_func(*inputs, **options, impl="sm100", return_lse=True)
            return run_backward(call, Saved(*result), dout, None, "sm100")

    return both


def gradient_cases(interface: Any) -> dict[str, list[Callable[[], Any] | None]]:
    """A call and its gradients: ours, the empty function's, ours without autograd, flash-attn-4's.

    None for flash-attn-4 where it is not installed.
    """
    # Small, so that the workspaces are not mapped and unmapped by the C library in each call.
    q, k, v = (torch.randn(1, 4, heads, 64, dtype=torch.bfloat16) for heads in (2, 1, 1))
    dout = torch.randn_like(q)
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def run(forward: Callable[..., Any]) -> Callable[[], Any]:
        def both() -> Any:
            with torch.enable_grad():
                result = forward(*inputs)
                out = result[0] if isinstance(result, tuple) else result
                return torch.autograd.grad(out, inputs, dout)

        return both

    found: dict[str, list[Callable[[], Any] | None]] = {}
    for name, options in (("causal", {"causal": True}), ("in any order", {"deterministic": False})):
        theirs = None
        if interface is not None:
            theirs = run(functools.partial(interface.flash_attn_func, **options))
        ours = run(functools.partial(fa4.flash_attn_func, **options, impl="sm100"))
        alone = without_autograd(inputs, dout, options)
        found[f"{name}, with gradient"] = [ours, run(Empty.apply), alone, theirs]
    return found


def least_us(functions: list[Callable[[], Any]]) -> list[float]:
    """CPU microseconds of a call of each."""
    least = [float("inf")] * len(functions)
    for function in functions:
        function()
    for _ in range(ROUNDS):
        for number, function in enumerate(functions):
            start = time.thread_time()
            for _ in range(CALLS):
                function()
            least[number] = min(least[number], (time.thread_time() - start) / CALLS)
    return [seconds * 1e6 for seconds in least]


def measure_gradients(interface: Any) -> tuple[list[dict[str, Any]], bool]:
    """A row for each call with its gradient; and whether all keep the bounds."""
    rows, good = [], True
    for name, functions in gradient_cases(interface).items():
        ours, empty, alone, *peer = least_us([function for function in functions if function])
        rows.append(
            {"call": name, "us": ours, "empty_function_us": empty, "without_autograd_us": alone,
             "flash_attn_4_us": peer[0] if peer else None}
        )  # fmt: skip
        good = good and alone <= MOST_GRADIENT_US and (not peer or ours <= peer[0])
        text = (
            f"{name:28} {ours:6.1f} us, {ours - empty:.1f} more than an empty function's, "
            f"without autograd {alone:.1f}"
        )
        print(text + (f", flash-attn-4 {peer[0]:6.1f} us" if peer else ", no flash-attn-4"))
    return rows, good


def main() -> int:
    """Measure, print, write; the exit code."""
    options = parse_output(__doc__ or "", "host")
    rows, good = [], True
    with pretended_b200() as interface, torch.no_grad():
        for name, (ours, theirs) in cases(interface).items():
            mine, *peer = least_us([ours] if theirs is None else [ours, theirs])
            rows.append({"call": name, "us": mine, "flash_attn_4_us": peer[0] if peer else None})
            text = f"{name:28} {mine:6.1f} us"
            good = good and mine <= MOST_US and (not peer or mine <= peer[0])
            print(text + (f", flash-attn-4 {peer[0]:6.1f} us" if peer else ", no flash-attn-4"))
        more, kept = measure_gradients(interface)
    packages = ("torch",) if interface is None else ("torch", "nvidia-cutlass-dsl")
    report = {"most_us": MOST_US, "most_gradient_us": MOST_GRADIENT_US, "rows": [*rows, *more]}
    write_record(options.output, report, packages)
    return 0 if good and kept else 1


if __name__ == "__main__":
    sys.exit(main())
