"""Compiles one kernel for sm_100a: the worker of `codegen.py`.

    codegen_kernels.py WANTED COMPILES FOLDER

WANTED: the fields of `Wanted` as JSON. The forward kernels are bf16, with LSE, of any size. FOLDER
gets kernel.cubin, kernel.ptx and compile.json. COMPILES 0 (of ours) fetches the kernel through
fa4's cache instead, and leaves start.json.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

from lab.benchmarks import codegen_backward_kernels as backward_kernels
from lab.benchmarks.codegen_wanted import (
    CUDNN,
    EXAMPLE,
    FLASH,
    OURS,
    SMS,
    Timed,
    Wanted,
    compile_whole,
    no_device,
)

PACKAGES = {
    EXAMPLE: ("flashinfer-python",),
    FLASH: ("flash-attn-4", "quack-kernels"),
    CUDNN: ("nvidia-cudnn-frontend",),
    OURS: (),
}


def compile_flash(wanted: Wanted, timed: Timed) -> None:
    """flash-attn-4: its interface on fake tensors chooses tile, CTA group and registers itself."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from lab.foreign import flash_attention

    interface = flash_attention()
    dims = (wanted.head_dim, wanted.head_dim, wanted.head_dim_v)
    with mock.patch.object(interface.cute, "compile", timed), no_device(), FakeTensorMode():
        q, k, v = (
            torch.empty(2, 4096, 8, dim, dtype=torch.bfloat16, device="cuda") for dim in dims
        )
        interface._flash_attn_fwd(q, k, v, causal=wanted.causal, return_lse=True)


def compile_cudnn(wanted: Wanted, timed: Timed) -> None:
    """cuDNN's open kernels with the parameters that its adapter derives for a B200."""
    import cudnn
    from cudnn.frost import compiled_cache
    from cudnn.sdpa.fwd import config_sm100

    deep = wanted.head_dim > 128
    longest_first = wanted.causal and not deep
    params = config_sm100.TemplateParams(
        dtype_qkv=config_sm100.DTYPE_BF16,
        window_right=0 if wanted.causal else None,
        sched_policy=config_sm100.SCHED_LPT if longest_first else config_sm100.SCHED_NATURAL,
        cta_mma=1 if wanted.head_dim == 64 else 2,
        d_flavor=64 if wanted.head_dim == 64 else 128,
        exp2_fma_split=wanted.exp2 == "tuned",
    )
    name = "prefill_d192_d128_f16" if deep else "prefill_d128_f16"
    path = Path(cudnn.__file__).parent / "sdpa/fwd/kernels/sm100" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    module.FROST_TEMPLATE_PARAMS = params  # read while the module is executed
    sys.modules[name] = module
    with mock.patch.object(compiled_cache, "compile_cached", timed), no_device():
        spec.loader.exec_module(module)
        module.compile()


def compile_ours(wanted: Wanted, timed: Timed) -> None:
    """fa4's kernel."""
    from fa4.compiled.forward import compile_forward

    spec = our_spec(wanted)
    timed.run(lambda: compile_whole(spec, compile_forward))


def our_spec(wanted: Wanted) -> Any:
    """The `ForwardSpec` of a kernel of ours."""
    from fa4.config import Exp2Split, ForwardConfig
    from fa4.sm100.forward.spec import ForwardSpec

    numerics = ForwardConfig.tuned("bf16", wanted.head_dim, wanted.causal)
    if wanted.exp2 == "mufu":
        numerics = replace(numerics, exp2=Exp2Split())
    return ForwardSpec(
        head_dim=wanted.head_dim,
        head_dim_v=wanted.head_dim_v,
        causal=wanted.causal,
        numerics=numerics,
        cta_group=wanted.cta_group,
    )


def start_from_cache(wanted: Wanted) -> float:
    """Seconds until fa4 has a kernel of its on-disk cache ready, its modules imported."""
    from fa4.compiled.build import build

    spec = our_spec(wanted)
    start = time.perf_counter()
    build(spec)
    return time.perf_counter() - start


MAKERS = {OURS: compile_ours, FLASH: compile_flash, CUDNN: compile_cudnn}
BACKWARD_MAKERS = {
    OURS: backward_kernels.compile_ours,
    FLASH: backward_kernels.compile_flash,
    CUDNN: backward_kernels.compile_cudnn,
    EXAMPLE: backward_kernels.compile_example,
}


def main() -> None:
    """Compiles what the command line names."""
    text, compiles, folder = sys.argv[1:]
    wanted = Wanted(**json.loads(text))
    os.environ |= {"FLASH_ATTENTION_ARCH": "sm_100", "FLASH_ATTENTION_NUM_SMS": str(SMS)}
    os.environ["CUTE_DSL_ARCH"] = "sm_100a"
    os.environ["CUTE_DSL_NO_CACHE"] = "1"
    if not int(compiles):
        (Path(folder) / "start.json").write_text(json.dumps(start_from_cache(wanted)))
        return
    timed = Timed(int(compiles))
    makers = BACKWARD_MAKERS if wanted.backward else MAKERS
    makers[wanted.maker](wanted, timed)
    artifacts = timed.compiled.artifacts
    out = Path(folder)
    (out / "kernel.cubin").write_bytes(artifacts.CUBIN)
    (out / "kernel.ptx").write_text(artifacts.PTX)

    from fa4.inspect.codegen import launch_smem_bytes

    report = {
        "seconds": timed.seconds,
        "cpu_seconds": timed.cpu_seconds,
        "dynamic_smem_bytes": launch_smem_bytes(str(timed.compiled.ir_module)),
        "versions": {
            name: metadata.version(name)
            for name in (
                *PACKAGES[wanted.maker],
                "nvidia-cutlass-dsl",
                "nvidia-cutlass-dsl-libs-cu13",
            )
        },
    }
    (out / "compile.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
