"""One kernel, launched a few times, for Nsight Compute: VARIANT (JSON), PROBLEM (JSON)."""

from __future__ import annotations

import json
import sys

from fa4.compiled.artifact import compile_artifact
from fa4.compiled.forward import compile_warpgroup
from hardware.warpgroup_forward.measure import Inputs, Problem, make_spec


def main() -> int:
    """Three launches."""
    import torch

    spec = make_spec(json.loads(sys.argv[1]))
    problem = Problem(**json.loads(sys.argv[2]))
    kernel = compile_artifact(spec, "sm_90a", compile_warpgroup)
    given = Inputs(spec, problem.batch, problem.seqlen, problem.seqlen, problem.heads)
    for _ in range(3):
        given.launch(kernel)
    torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
