"""What the compiler makes of our forward kernel with each feature: loop lengths and spills.

    python -m lab.benchmarks.codegen --install     once: the compiler
    python -m lab.benchmarks.features              the table, and results/features.json

The compiler is that of codegen.py; nothing runs, no figure is a speed on a GPU. Lengths
are issue slots per row of 128 scores (softmax) or per KV tile (mma, correction).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from fa4.inspect import loops
from fa4.inspect.codegen import read_kernels
from lab.benchmarks.codegen import SITE
from lab.benchmarks.common import parse_output, write_record
from lab.benchmarks.feature_kernels import specs


def compile_all() -> Iterator[dict[str, Any]]:
    """Each spec's figures."""
    from fa4.compiled.forward import compile_forward

    for name, spec in specs():
        artifacts = compile_forward(spec, spec.gpu.arch).artifacts
        kernels = read_kernels(artifacts.CUBIN, artifacts.PTX)
        code = max(kernels, key=lambda one: one.instructions or 0)
        softmax = code.loop(loops.SOFTMAX)
        lengths = {kind: one and one.length for kind in (loops.SOFTMAX, loops.MASKED, loops.MMA,
                   loops.CORRECTION) for one in (code.loop(kind),)}  # fmt: skip
        yield {
            "feature": name,
            "spills": (code.spill_loads or 0) + (code.spill_stores or 0),
            "frame_bytes": code.resources.frame_bytes,
            "instructions": code.instructions,
            "emulated": softmax.emulated if softmax else None,
            "alpha_percent": softmax.alpha if softmax else None,
            "p_stored_percent": list(softmax.p_stored) if softmax else None,
            "slots": lengths,
        }


def main() -> None:
    """Compile in a process that sees the compiler, print the table, write the result file."""
    if "--worker" in sys.argv:
        for row in compile_all():
            print(json.dumps(row), flush=True)
        return
    options = parse_output((__doc__ or "").splitlines()[0], "features")
    if not (SITE / "nvidia_cutlass_dsl").is_dir():
        sys.exit(f"no compiler in {SITE}: python -m lab.benchmarks.codegen --install")
    environment = os.environ | {"PYTHONPATH": str(SITE), "CUTE_DSL_NO_CACHE": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "lab.benchmarks.features", "--worker"]
    rows = []
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as worker:
        for line in worker.stdout or ():
            row = json.loads(line)
            rows.append(row)
            lengths = "  ".join(f"{kind} {length}" for kind, length in row["slots"].items())
            print(f"{row['feature']:32} {row['spills']:3} spills  {lengths}", flush=True)
    if worker.returncode:
        sys.exit(worker.returncode)
    print(f"{sum(row['spills'] > 0 for row in rows)} of {len(rows)} kernels spill")
    write_record(options.output, {"kernels": rows}, ("nvidia-cutlass-dsl",))


if __name__ == "__main__":
    main()
