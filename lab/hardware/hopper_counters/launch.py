"""Launches the kernels whose counters are read: run by `measure`, under ncu.

    python3 -m lab.hardware.hopper_counters.launch CONFIGURATIONS.json

Each configuration is compiled and launched three times; the last launch is between the profiler's
start and stop. A line per configuration is printed when it is done.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

WARM_LAUNCHES = 2

Configuration = Mapping[str, Any]


def flash_attn_4(given: Configuration) -> Callable[[], Any]:
    """flash-attn-4's kernel with its tile sizes, P's source and overlap forced."""
    import torch
    from flash_attn.cute.interface import _flash_attn_fwd

    torch.manual_seed(0)
    shape = (given["batch"], given["seqlen"], given["heads"], given["head_dim"])
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return lambda: _flash_attn_fwd(
        q,
        k,
        v,
        causal=given["causal"],
        tile_mn=(given["tile_m"], given["tile_n"]),
        mma_pv_is_rs=given["p_source"] == "registers",
        intra_wg_overlap=given["overlap"],
    )


def own(given: Configuration) -> Callable[[], Any]:
    """The package's Hopper forward kernel: `spec` are the fields of its WarpgroupSpec."""
    from fa4.compiled.artifact import compile_artifact
    from fa4.compiled.forward import compile_warpgroup
    from lab.hardware.warpgroup_forward.measure import Inputs, make_spec

    kernel = compile_artifact(make_spec(dict(given["spec"])), "sm_90a", compile_warpgroup)
    seqlen = given["seqlen"]
    inputs = Inputs(kernel.spec, given["batch"], seqlen, seqlen, given["heads"])
    return lambda: inputs.launch(kernel)


KERNELS: Mapping[str, Callable[[Configuration], Callable[[], Any]]] = {
    "flash-attn-4": flash_attn_4,
    "fa4": own,
}


def main() -> None:
    """Compile and launch each; a kernel that fails is said, and the others go on."""
    import torch

    profiler = torch.cuda.cudart()
    for number, given in enumerate(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))):
        try:
            launch = KERNELS[given["kernel"]](given)
            for _ in range(WARM_LAUNCHES):
                launch()
            torch.cuda.synchronize()
            profiler.cudaProfilerStart()
            launch()
            torch.cuda.synchronize()
            profiler.cudaProfilerStop()
            said = ""
        except Exception as error:  # of the compiler or the driver, of any kind
            said = f"{type(error).__name__}: {error}"
        print(json.dumps({"number": number, "failed": said}), flush=True)


if __name__ == "__main__":
    main()
