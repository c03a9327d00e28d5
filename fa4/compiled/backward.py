"""Compiling the backward kernels of a spec without a GPU, as `fa4.compiled.forward` does."""

from __future__ import annotations

from typing import Any, TypeAlias

from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import make_fake_tensor

from fa4.compiled.host_code import compile_host
from fa4.compiled.launch import COUNTS, WORKSPACE, BackwardArguments, workspace_shapes
from fa4.compiled.stand_ins import ALIGN_BYTES, StandIns
from fa4.plan import require_sound
from fa4.sm90.backward.spec import WarpgroupBackwardSpec
from fa4.sm90.wide.spec import WideBackwardSpec
from fa4.sm100.backward.host import backward
from fa4.sm100.backward.spec import BackwardSpec

AnySpec: TypeAlias = BackwardSpec | WarpgroupBackwardSpec | WideBackwardSpec


def compile_backward(
    spec: BackwardSpec, arch: str = "sm_100a", trace: list[Any] | None = None
) -> Any:
    """As `compile_forward`: three kernels in one module, launched by one call.

    `compile_artifact` makes what is called with `BackwardArguments`. Raises ValueError, naming the
    rule, for a plan that `check_plan` refuses.
    """
    return compile_host(backward, fake_arguments(spec), spec, arch, trace)


def compile_warpgroup_backward(
    spec: WarpgroupBackwardSpec, arch: str = "sm_90a", trace: list[Any] | None = None
) -> Any:
    """The same for Hopper."""
    from fa4.sm90.backward.host import backward

    return compile_host(backward, fake_arguments(spec), spec, arch, trace)


def compile_wide_backward(
    spec: WideBackwardSpec, arch: str = "sm_90a", trace: list[Any] | None = None
) -> Any:
    """The same for Hopper's kernels of wide heads."""
    from fa4.sm90.wide.host import backward

    for plan in (spec.keys_plan, spec.queries_plan):
        require_sound(plan, spec.gpu)
    return compile_host(backward, fake_arguments(spec), spec, arch, trace)


def fake_arguments(
    spec: AnySpec,
) -> BackwardArguments:
    """Stand-ins with symbolic sizes for a call's arguments."""
    tensors = StandIns(spec)
    return BackwardArguments(
        q=tensors.of_queries(spec.head_dim),
        k=tensors.of_keys(spec.head_dim),
        v=tensors.of_keys(spec.head_dim_v),
        out=tensors.of_queries(spec.head_dim_v),
        dout=tensors.of_queries(spec.head_dim_v),
        lse=tensors.of_rows(),
        dlse=tensors.of_rows(spec.lse_gradient),
        residual=tensors.of_queries(spec.head_dim_v) if spec.out_residual else None,
        dq=tensors.of_queries(spec.head_dim),
        dk=tensors.of_keys(spec.head_dim),
        dv=tensors.of_keys(spec.head_dim_v),
        dsink=tensors.of_heads(spec.sink),
        **_workspace(spec, tensors.size["heads_q"]),
        dq_parts=tensors.of_query_parts(spec.head_dim),
        dk_parts=tensors.of_key_parts(spec.head_dim),
        dv_parts=tensors.of_key_parts(spec.head_dim_v),
        **tensors.numbers(),
        max_seqlen_q=Int32(1),
        max_seqlen_k=Int32(1),
        sink=tensors.of_heads(spec.sink),
        **tensors.lengths(),
        aux=tensors.aux(),
    )


def _workspace(spec: AnySpec, heads: Any) -> dict[str, Any]:
    """Contiguous but for the number of tiles, which is a symbol."""
    tiles = cute.sym_int()
    found = {}
    for name, shape in workspace_shapes(spec, heads, tiles).items():
        element = Int32 if name in COUNTS else Float32
        strides, step = [1], 1
        for size in reversed(shape[2:]):
            step *= size
            strides.insert(0, step)
        divisor = max(1, min(step, ALIGN_BYTES // 4))
        strides.insert(0, cute.sym_int64(divisibility=divisor))
        align = ALIGN_BYTES if divisor > 1 else 4
        found[name] = make_fake_tensor(element, shape, stride=tuple(strides), assumed_align=align)
    return {name: found.get(name) for name in WORKSPACE}
