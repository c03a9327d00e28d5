"""The compiled Hopper kernels of wide heads as a function of a `Case`, run by the emulator.

The features are those of the SM100 tests, each set with wide head dims; the two main kernels are
run, on statistics that NumPy prepares.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import cutlass
import numpy as np
import pytest
from cutlass import cute

from fa4.compiled.backward import fake_arguments
from fa4.compiled.build import build as build_cached
from fa4.compiled.host_code import compile_host
from fa4.emulator.host.session import Session
from fa4.emulator.machine.options import Options
from fa4.sm90.wide import host
from fa4.sm90.wide.spec import WideBackwardSpec
from fa4.testing.budget import Outputs
from fa4.testing.inputs import Inputs
from tests.sm100.backward_kernel import SPECS as FEATURES
from tests.sm100.backward_kernel import (
    BackwardKernel,
    Workspace,
    prepare_stats,
    surroundings_are_nan,
)
from tests.sm100.backward_kernel import arguments as main_arguments
from tests.sm100.forward_kernel import KERNELS, NOTHING, aligned_copy, as_numpy, as_torch

CHOICES: dict[str, dict[str, Any]] = {
    "plain": {"head_dim": 256},
    "causal": {"head_dim": 192, "head_dim_v": 128},
    "window": {"head_dim": 136, "head_dim_v": 16},
    "packed": {"head_dim": 160, "head_dim_v": 256},
    "padded": {"head_dim": 256, "head_dim_v": 24},
    "biased": {"head_dim": 8, "head_dim_v": 184},
    "biased_window": {"head_dim": 192},
    "masked": {"head_dim": 144},
    "masked_softcap": {"head_dim": 16, "head_dim_v": 256},
    "chunked": {"head_dim": 256},
    "chunked_curved": {"head_dim": 256},
    "chunked_softcap": {"head_dim": 24, "head_dim_v": 200},
    "capped": {"head_dim": 240},
}

# Of `fa4.compiled.launch.BackwardArguments`, what the main kernels are given.
PARAMETERS = (
    "q", "k", "v", "dout", "dq", "dk", "dv", "stats", "softmax_scale", "softcap",
    "window_left", "window_right", "max_seqlen_q", "max_seqlen_k", "cu_seqlens_q", "cu_seqlens_k",
    "seqused_q", "seqused_k", "aux",
)  # fmt: skip


@cute.jit
def gradients(q, k, v, dout, dq, dk, dv, stats, softmax_scale, softcap, window_left, window_right,
              longest_q, longest_k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, aux, stream,
              spec: cutlass.Constexpr, trace: cutlass.Constexpr):  # fmt: skip
    """`host.gradients` with one level of arguments."""
    host.gradients(
        q, k, v, dout, dq, dk, dv, stats, softmax_scale, softcap, (window_left, window_right),
        (longest_q, longest_k), (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k), aux, stream,
        spec, trace,
    )  # fmt: skip


def compile_gradients(
    spec: WideBackwardSpec, arch: str = "sm_90a", trace: list[Any] | None = None
) -> Any:
    """What `cute.compile` returns for the main kernels."""
    given = fake_arguments(spec)
    return compile_host(gradients, [getattr(given, name) for name in PARAMETERS], spec, arch, trace)


@dataclass(frozen=True)
class WideKernel(BackwardKernel):
    """A compiled spec, with its host code loaded."""

    spec: WideBackwardSpec  # type: ignore[assignment]

    def __call__(
        self, inputs: Inputs, *, with_dlse: bool = False, **options: Any
    ) -> tuple[Outputs, Any]:
        """(gradients, reports of both kernels); findings raise unless collect=True."""
        stats, _ = prepare_stats(self.spec, inputs, with_dlse)
        reports, outputs = self.launch(inputs, stats, **options)
        return outputs, reports

    def launch(self, inputs: Inputs, stats: Any, **options: Any) -> tuple[Any, Outputs]:
        """The same with statistics of the rows."""
        call = arguments(self.spec, inputs, stats)
        self.session._options = Options(**options)
        self.session.reports.clear()
        self.session.call(self.compiled, call, {})
        found = [as_numpy(x) for x in call[4:7]]
        for grad, index in zip(
            found, (inputs.q_index, inputs.kv_index, inputs.kv_index), strict=True
        ):
            mine = np.zeros(grad.shape[:-2], bool)
            for part in index:
                mine[part] = True
            assert (grad[~mine] == NOTHING).all(), "a row beyond its sequence was written"
            assert surroundings_are_nan(grad), "memory beside a gradient was written"
        dq, dk, dv = (x.copy() for x in found)
        return list(self.session.reports), Outputs(None, dq=dq, dk=dk, dv=dv)


def arguments(spec: WideBackwardSpec, inputs: Inputs, stats: np.ndarray) -> tuple[Any, ...]:
    """What `gradients` is called with, in its order; the gradients hold `NOTHING`."""
    space = Workspace(stats, stats, stats, (), spec.block_rows)
    q, k, v, dout, dk, dv, _, _, _, _, *rest = main_arguments(spec, inputs, space)
    dq = as_torch(aligned_copy(np.full_like(inputs.q, NOTHING)))
    return (q, k, v, dout, dq, dk, dv, stats, *rest)


def spec_of(name: str, **changed: Any) -> WideBackwardSpec:
    """One of `CHOICES` with its features; head_dim_v is head_dim where it is not named."""
    features = {name: value for name, value in FEATURES[name].items() if "head_dim" not in name}
    fields = {**features, "deterministic": False, **CHOICES[name], **changed}
    return WideBackwardSpec(**{"head_dim_v": fields["head_dim"], **fields})


def kept(spec: WideBackwardSpec) -> WideKernel:
    """Kernels that are compiled once on this machine as long as no source changes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FA4_CACHE", "1")
        patch.setenv("FA4_CACHE_DIR", str(KERNELS))
        compiled = build_cached(spec, spec.gpu.arch, compiler=compile_gradients)
        return WideKernel(spec, compiled, Session(None, (), {}))


def build(spec: WideBackwardSpec, trace: list[Any] | None = None) -> WideKernel:
    """Kernels that are not kept. trace: collects their steps."""
    compiled = compile_gradients(spec, spec.gpu.arch, trace)
    return WideKernel(spec, compiled, Session(None, (), {}))


@cache
def kernel(name: str) -> WideKernel:
    """One of `CHOICES`, compiled once on this machine as long as no source changes."""
    return kept(spec_of(name))
