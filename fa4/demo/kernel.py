"""The compiled SM100 kernels on one head of the demo's input, executed by the emulator.

Its errors are judged by the same budget as FA4 mode's, its findings are those of the emulator's
checks under each schedule, and the simulator predicts its time by its own instruction counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from fa4.backends.request import Request
from fa4.call.call import Call
from fa4.call.checked import make_call
from fa4.demo.gradients import describe_run, keep_worst, run_backward_kernels
from fa4.demo.inputs import Layer
from fa4.demo.measure import split_heads
from fa4.demo.speed import predict_request
from fa4.testing.budget import check_output, expect_forward
from fa4.testing.inputs import dense_inputs

MOST_ROWS = 512  # rows and keys that the emulator is given: one chunk of the text
SCHEDULES = ("fifo", "random", "adversarial")


def run_kernel(
    layer: Layer,
    request: Request,
    causal: bool,
    rescale_rate: float,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """One head of a prepared layer through the compiled kernel.

    rescale_rate: share of rescales in the layer, for the prediction. Keys of the result: problem
    (a sentence if the kernel cannot run here, and then nothing else); layer, rows, keys, head_dim,
    padded_head_dim, arch, compiler; ok; checks (of out and lse); schedules (findings of each);
    resources; prediction (of the whole layer; None if the simulator has no such kernel); backward
    (see `run_backward_kernels`; None if there is no result to differentiate).
    """
    from fa4.backends.kernel import describe
    from fa4.compiled.build import build
    from fa4.compiled.support import NotSupported
    from fa4.compiled.toolchain import find_toolchain
    from fa4.compiled.variants import choose_sm100_spec

    tensors = next(split_heads(request)).tensors
    q, k, v = (np.ascontiguousarray(x[:, :MOST_ROWS]) for x in tensors)
    call = make_call(q, k, v, {"causal": causal}, varlen=False)
    try:
        spec = choose_sm100_spec(describe(call))
        toolchain = find_toolchain()
        progress(f"compiled kernel: compiling for {spec.gpu.arch}, unless it is in the cache")
        compiled = build(spec, spec.gpu.arch)
        import tvm_ffi  # noqa: F401  (calls the kernel's host code)
    except (ImportError, NotSupported) as error:
        return {"problem": f"the compiled kernel is left out: {error}"}
    started = time.perf_counter()
    outputs, schedules = _emulate(call, progress)
    checks = _check((q, k, v), causal, outputs)
    progress(f"compiled kernel: emulated in {time.perf_counter() - started:.1f} s")
    found = any(schedule["findings"] for schedule in schedules)
    backward = run_backward_kernels(call, outputs[0], progress) if outputs else None
    good = backward is None or bool(backward["problem"]) or backward["ok"]
    return {
        "problem": None,
        "layer": layer.name,
        "rows": q.shape[1],
        "keys": k.shape[1],
        "head_dim": spec.head_dim,
        "padded_head_dim": spec.pipeline.head_dim,
        "arch": spec.gpu.arch,
        "compiler": toolchain.label,
        "ok": good and not found and all(check["within_budget"] for check in checks.values()),
        "checks": checks,
        "schedules": schedules,
        "resources": _resources(compiled),
        "prediction": predict_request(request, causal, rescale_rate, kernel=spec),
        "backward": backward,
    }


def _emulate(
    call: Call, progress: Callable[[str], None]
) -> tuple[list[tuple[np.ndarray, np.ndarray]], list[dict[str, Any]]]:
    """(O, LSE) of each schedule that the checks did not stop, and what each schedule found."""
    from fa4.backends import emulator
    from fa4.emulator import EmulationFailed

    outputs, schedules = [], []
    for seed, schedule in enumerate(SCHEDULES):
        progress(f"compiled kernel: emulating under schedule {schedule}")
        try:
            out, lse, reports = emulator.run(call, schedule=schedule, seed=seed)
            outputs.append((out, lse))
        except EmulationFailed as failure:
            reports = [failure.report]
        schedules.append(describe_run(schedule, seed, reports))
    return outputs, schedules


def _check(
    tensors: tuple[np.ndarray, ...], causal: bool, outputs: list[tuple[np.ndarray, np.ndarray]]
) -> dict[str, Any]:
    """Errors of O and LSE against the oracle, of the schedule that is worst; {} without outputs."""
    expected = expect_forward(dense_inputs(*tensors, causal=causal))
    worst: dict[str, Any] = {}
    for out, lse in outputs:
        for name, got in (("out", out[0]), ("lse", lse[0])):
            keep_worst(worst, name, check_output(name, [got], expected[name]))
    return worst


def _resources(compiled: Any) -> dict[str, Any]:
    """Registers of each role, spills, shared and tensor memory, with what the machine has.

    registers: the plan's; setmaxnreg: those that the code sets.
    """
    from fa4.inspect.codegen import read_kernels

    spec = compiled.spec
    (code,) = read_kernels(compiled.cubin, compiled.ptx)
    code = code.with_smem(compiled.metadata["dynamic_smem_bytes"])
    return {
        "registers": {role.name: role.registers for role in spec.plan.roles},
        "setmaxnreg": code.setmaxnreg,
        "registers_at_launch": code.resources.registers,
        "spill_bytes": code.resources.frame_bytes,
        "smem_bytes": code.dynamic_smem_bytes,
        "smem_bytes_limit": spec.gpu.smem_bytes_per_cta,
        "tmem_columns": code.tmem_columns,
        "tmem_columns_used": spec.plan.bytes_used("tmem"),
        "tmem_columns_limit": spec.gpu.tmem_cols,
    }
