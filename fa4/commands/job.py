"""One call measured: by any implementation, with its time and what the emulator found."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fa4.api import flash_attn_backward, flash_attn_func
from fa4.backends import EMULATED, KERNELS, ON_GPU, Saved
from fa4.call.arrays import like, to_numpy
from fa4.call.call import Call
from fa4.call.checked import make_call
from fa4.call.choose import MADE_FOR, check_impl, choose, find_gpu

TIMED_CALLS, WARM_UP_CALLS = 20, 5


class Job:
    """One call. outputs: (out, lse) as arrays, None if the emulator's checks stopped the kernel.

    impl: what really runs; on_gpu: is it the compiled kernel on a GPU? gradient: will it be
    differentiated? gradients: (dq, dk, dv) once it was.
    """

    def __init__(
        self,
        arrays: tuple[np.ndarray, np.ndarray, np.ndarray],
        options: Mapping[str, Any],
        impl: str,
        emulator: Mapping[str, Any],
        say: Callable[[str], None] = lambda line: None,
        *,
        gradient: bool = False,
    ) -> None:
        check_impl(impl)
        self.arrays, self.options, self.emulator = arrays, dict(options), dict(emulator)
        self._say = say
        self.device = ""
        if impl == "auto" or impl in ON_GPU:
            found = find_gpu("" if impl == "auto" else impl)
            self.device = found.device
            if impl != "auto" and not found.device:
                raise ValueError(f"--impl {impl} needs {MADE_FOR[impl]}: {found.why}")
        if impl == "auto":
            q, k, v = self._on_gpu() if self.device else arrays
            impl = choose(make_call(q, k, v, self.options, varlen=False), gradient=gradient)
        if impl in KERNELS:
            refuse(make_call(*arrays, self.options, varlen=False), KERNELS[impl], gradient)
        self.impl = impl
        self.on_gpu = impl in ON_GPU
        self.outputs: tuple[np.ndarray, np.ndarray] | None = None
        self.gradients: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def execute(self) -> dict[str, Any]:
        """Runs it: implementation, seconds of the call (of the kernel on a GPU), findings."""
        report: dict[str, Any] = {"impl": self.impl, "compile_seconds": None, "findings": []}
        if self.impl in KERNELS:
            report["compile_seconds"] = self._compile()
        self._say(f"running {self.impl}")
        if self.on_gpu:
            return report | {"seconds": self._run_on_gpu()}
        start = time.perf_counter()
        if self.impl in EMULATED:
            report |= self._emulate()
        else:
            result = flash_attn_func(*self.arrays, **self.options, impl=self.impl, return_lse=True)
            self.outputs = (result.out, result.lse)
        return report | {"seconds": time.perf_counter() - start}

    def differentiate(self, dout: np.ndarray) -> dict[str, Any]:
        """The gradients of the call, which was executed: as `execute`, of the backward pass."""
        assert self.outputs is not None
        out, lse = self.outputs
        report: dict[str, Any] = {"compile_seconds": None, "findings": []}
        if self.impl in KERNELS:
            report["compile_seconds"] = self._compile(backward=True)
        self._say(f"running {self.impl}, backward")
        start = time.perf_counter()
        given = (dout, *self.arrays, out, lse)
        if self.on_gpu:
            template = self._on_gpu()[0]
            given = tuple(like(template, array) for array in given)
        if self.impl in EMULATED:
            report |= self._emulate(dout)
        else:
            found = flash_attn_backward(*given, **self.options, impl=self.impl)
            dq, dk, dv = (to_numpy("gradient", x) for x in found[:3])
            self.gradients = (dq, dk, dv)
        seconds = time.perf_counter() - start
        if self.on_gpu:
            call = functools.partial(flash_attn_backward, *given, **self.options, impl=self.impl)
            seconds = time_on_gpu(call, TIMED_CALLS)
        return report | {"seconds": seconds}

    def _compile(self, *, backward: bool = False) -> float:
        from fa4.backends.emulated import MACHINES
        from fa4.backends.kernel import describe
        from fa4.backends.kernel_backward import describe_backward
        from fa4.compiled.build import Spec, build
        from fa4.compiled.variants import choose_backward_spec, choose_spec, find_gpu

        if self.on_gpu:
            import torch

            gpu = find_gpu(torch.cuda.get_device_capability(self.device))
        else:
            gpu = MACHINES[KERNELS[self.impl]]
        call = make_call(*self.arrays, self.options, varlen=False)
        sizes = describe(call)
        if backward:
            spec: Spec = choose_backward_spec(describe_backward(call), gpu)
        else:
            spec = choose_spec(sizes, gpu)
        self._say(f"compiling for {gpu.arch}")
        start = time.perf_counter()
        if not sizes.is_empty:
            build(spec, gpu.arch)
        return time.perf_counter() - start

    def _emulate(self, dout: np.ndarray | None = None) -> dict[str, Any]:
        """The call, or with dO its gradients; what the emulator found."""
        from fa4.backends import emulated
        from fa4.emulator import EmulationFailed

        family = EMULATED[self.impl]

        call = make_call(*self.arrays, self.options, varlen=False)
        try:
            if dout is None:
                out, lse, reports = emulated.run(family, call, **self.emulator)
                self.outputs = (out, lse)
            else:
                assert self.outputs is not None
                grads, reports = emulated.run_backward(
                    family, call, Saved(*self.outputs), dout, **self.emulator
                )
                self.gradients = (grads.dq, grads.dk, grads.dv)
        except EmulationFailed as failure:
            reports = [failure.report]
        return {
            "findings": [str(finding) for report in reports for finding in report.findings],
            "emulated_instructions": sum(report.instructions.total() for report in reports),
            "load_seconds": sum(report.load_seconds for report in reports),
        }

    def _on_gpu(self) -> tuple[Any, Any, Any]:
        import torch

        template = torch.empty(0, device=self.device)
        q, k, v = (like(template, array) for array in self.arrays)
        return q, k, v

    def _run_on_gpu(self) -> float:
        """Seconds of one call: the median of several, after a first one."""

        tensors = self._on_gpu()

        def call() -> Any:
            return flash_attn_func(*tensors, **self.options, impl=self.impl, return_lse=True)

        result = call()
        self.outputs = to_numpy("out", result.out), to_numpy("lse", result.lse)
        return time_on_gpu(call, TIMED_CALLS)


def refuse(call: Call, family: str, gradient: bool) -> None:
    """Raises now what a kernel would refuse after torch and the compiler are loaded."""
    from fa4.backends.kernel import describe
    from fa4.backends.kernel_backward import check_gradient
    from fa4.compiled.support import check

    check(describe(call), family)
    if gradient:
        check_gradient(call, family)


def time_on_gpu(call: Any, repeats: int, warm_up: int = WARM_UP_CALLS) -> float:
    """Median seconds of a call on the current stream, by CUDA events."""
    import torch

    for _ in range(warm_up):
        call()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in pairs:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) for start, end in pairs)
    return float(times[len(times) // 2]) / 1e3
