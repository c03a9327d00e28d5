"""Compiling a forward kernel without a GPU: sizes, strides and scalars stay run-time values."""

from __future__ import annotations

from typing import Any

from cutlass import Int32

from fa4.compiled.host_code import compile_host
from fa4.compiled.launch import LaunchArguments
from fa4.compiled.stand_ins import StandIns
from fa4.sm90.forward.spec import WarpgroupSpec
from fa4.sm100.forward.kernel import forward
from fa4.sm100.forward.spec import ForwardSpec
from fa4.sm100.halves.spec import HalvesSpec


def compile_forward(
    spec: ForwardSpec, arch: str = "sm_100a", trace: list[Any] | None = None
) -> Any:
    """What `cute.compile` returns, with PTX and cubin in `.artifacts`; TVM-FFI calls.

    `compile_artifact` makes what is called with `LaunchArguments`. `trace` collects the steps
    (role, Wait or Arrive) as the kernel is traced. Raises ValueError, naming the rule, for a plan
    that `check_plan` refuses.
    """
    return compile_host(forward, fake_arguments(spec), spec, arch, trace)


def compile_halves(spec: HalvesSpec, arch: str = "sm_100a", trace: list[Any] | None = None) -> Any:
    """The same with two softmax warpgroups a Q tile."""
    from fa4.sm100.halves.kernel import forward

    return compile_host(forward, fake_arguments(spec), spec, arch, trace)


def compile_warpgroup(
    spec: WarpgroupSpec, arch: str = "sm_90a", trace: list[Any] | None = None
) -> Any:
    """The same for Hopper."""
    from fa4.sm90.forward import kernel

    tensors = StandIns(spec)
    more: tuple[Any, ...] = (tensors.counter(),) if spec.draws_work else ()
    hosts = kernel.forward, kernel.forward_queue
    if spec.element_bytes == 1:
        more = (*(tensors.of_entries(letter in spec.descale) for letter in "qkv"), *more)
        hosts = kernel.forward_narrow, kernel.forward_narrow_queue
    elif spec.split:
        more = tensors.parts_of_queries(spec.head_dim_v), tensors.parts_of_rows()
        hosts = kernel.forward_split, kernel.forward_split
    host = hosts[spec.draws_work]
    return compile_host(host, (*fake_arguments(spec, tensors), *more), spec, arch, trace)


def fake_arguments(
    spec: ForwardSpec | HalvesSpec | WarpgroupSpec, tensors: StandIns | None = None
) -> LaunchArguments:
    """Stand-ins with symbolic sizes for a call's arguments."""
    tensors = tensors or StandIns(spec)
    return LaunchArguments(
        q=tensors.of_queries(spec.head_dim),
        k=tensors.of_keys(spec.head_dim),
        v=tensors.of_keys(spec.head_dim_v),
        o=tensors.of_queries(spec.head_dim_v, spec.out_dtype),
        lse=tensors.of_rows(spec.lse),
        **tensors.numbers(),
        max_seqlen_q=Int32(1),
        sink=tensors.of_heads(spec.sink),
        **tensors.lengths(),
        aux=tensors.aux(),
        num_sms=Int32(1),
    )
