"""Compiling a forward kernel without a GPU: sizes, strides and scalars stay run-time values."""

from __future__ import annotations

import tempfile
from typing import Any

from cutlass import Float32, Int32, cute
from cutlass.base_dsl.compiler import DumpDir
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from fa4.compiled.launch import LaunchArguments
from fa4.plan import require_sound
from fa4.sm100.forward.kernel import forward
from fa4.sm100.forward.spec import ForwardSpec
from fa4.sm100.kit.descriptors import ELEMENTS

AUX_ELEMENTS = {**ELEMENTS, "fp32": Float32, "int32": Int32}
ALIGN_BYTES = 16  # of rows in global memory: what TMA asks of addresses and strides


def compile_forward(
    spec: ForwardSpec, arch: str = "sm_100a", trace: list[Any] | None = None
) -> Any:
    """What `cute.compile` returns, with PTX and cubin in `.artifacts`; TVM-FFI calls.

    Call it with `LaunchArguments`. `trace` collects the steps (role, Wait or Arrive) as the kernel
    is traced. Raises ValueError, naming the rule, for a plan that `check_plan` refuses.
    """
    require_sound(spec.plan, spec.gpu)
    arguments = fake_arguments(spec)
    with tempfile.TemporaryDirectory() as folder:
        options = (
            cute.EnableTVMFFI(True),
            cute.KeepPTX(True),
            cute.KeepCUBIN(True),
            cute.GPUArch(arch),
            DumpDir(folder),
        )
        return cute.compile[options](forward, *arguments, spec, [] if trace is None else trace)


def fake_arguments(spec: ForwardSpec) -> tuple[Any, ...]:
    """Stand-ins with symbolic sizes for a call's arguments, the stream included."""
    element = ELEMENTS[spec.dtype]
    divisor = ALIGN_BYTES * 8 // element.width
    batch, batches, rows_q, rows_k, heads_q, heads_k = (cute.sym_int() for _ in range(6))
    tensor = make_fake_tensor

    def operand(packed: bool, rows: Any, heads: Any, dim: int) -> Any:
        shape = (rows, heads, dim) if packed else (batch, rows, heads, dim)
        strides = (*(cute.sym_int64(divisibility=divisor) for _ in shape[:-1]), 1)
        return tensor(element, shape, stride=strides, assumed_align=ALIGN_BYTES)

    def integers(given: bool, length: Any) -> Any:
        return tensor(Int32, (length,), stride=(1,), assumed_align=4) if given else None

    lse = None
    if spec.lse:
        shape = (heads_q, rows_q) if spec.packed_q else (batch, heads_q, rows_q)
        strides = (*(cute.sym_int64() for _ in shape[:-1]), 1)
        lse = tensor(Float32, shape, stride=strides, assumed_align=4)
    aux = tuple(_auxiliary(*described) for described in spec.aux) or None
    arguments = LaunchArguments(
        q=operand(spec.packed_q, rows_q, heads_q, spec.head_dim),
        k=operand(spec.packed_k, rows_k, heads_k, spec.head_dim),
        v=operand(spec.packed_k, rows_k, heads_k, spec.head_dim_v),
        o=operand(spec.packed_q, rows_q, heads_q, spec.head_dim_v),
        lse=lse,
        softmax_scale=Float32(0.0),
        softcap=Float32(0.0) if spec.softcap else None,
        window_left=Int32(0) if spec.window_left else None,
        window_right=Int32(0) if spec.window_right else None,
        max_seqlen_q=Int32(1),
        sink=tensor(Float32, (heads_q,), stride=(1,), assumed_align=4) if spec.sink else None,
        cu_seqlens_q=integers(spec.packed_q, batches),
        cu_seqlens_k=integers(spec.packed_k, batches),
        seqused_q=integers(spec.used_q, cute.sym_int()),
        seqused_k=integers(spec.used_k, cute.sym_int()),
        aux=aux,
        num_sms=Int32(1),
    )
    return *arguments, make_fake_stream(use_tvm_ffi_env_stream=True)


def _auxiliary(dtype: str, rank: int) -> Any:
    """A tensor of any strides for the callables."""
    element = AUX_ELEMENTS[dtype]
    shape = tuple(cute.sym_int() for _ in range(rank))
    strides = tuple(cute.sym_int64() for _ in range(rank))
    return make_fake_tensor(element, shape, stride=strides, assumed_align=element.width // 8)
