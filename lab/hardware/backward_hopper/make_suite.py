"""Compiles both kernels for sm_90a, draws inputs and runs the emulator: one .npz per launch."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fa4.emulator import Launch
from fa4.emulator.host.session import Session
from fa4.sm100.backward.spec import BackwardSpec
from tests.sm100.backward_prepost import FUNCTIONS, Call, Sizes, compile_small, copy, room
from tests.sm100.test_backward_prepost import SPECS

ARCH = "sm_90a"
TIMED = "timed"
LARGE = Sizes((16384,), heads=16, gaps=False)


def calls() -> dict[str, Call]:
    """By name: a call for each variant of the tests, and one without a sequence in front."""
    dense = Sizes((700, 700), heads=2, dout="heads first", lse="rows first")
    ragged = Sizes((700, 1, 0, 129, 128, 257), heads=2, slack=3, tail=100, blind=0.2)
    found = {
        name: Call(spec, ragged if spec.packed_q or spec.used_q else dense)
        for name, spec in SPECS.items()
    }
    many = Sizes((0, *range(40), *[0, 300, 2] * 5), dout="one for all heads", dlse="one for all")
    return found | {"many sequences": Call(SPECS["packed"], many)}


def large_call() -> Call:
    """What is timed: 16k rows of 16 heads."""
    return Call(BackwardSpec(head_dim=128, head_dim_v=128), LARGE)


def label(variant: str, name: str) -> str:
    """A launch's name, as of its file."""
    return re.sub(r"\W+", "_", f"{variant} {name}").strip("_")


def moved_bytes(name: str, call: Call) -> int:
    """What a kernel must read and write of a call without extras."""
    rows, spec = sum(call.sizes.lengths) * call.sizes.heads, call.spec
    if name == "postprocess":
        return rows * spec.head_dim * (4 + 2)
    return rows * (spec.head_dim_v * (2 + 2) + spec.head_dim * 4 + 4 + 8)


def captured(kernel: Any, call: Call, name: str, buffer: Any) -> Launch:
    """What the host function launches on the tensors of a buffer."""
    found: list[Launch] = []

    def keep(launches: Any, allocations: Any, options: Any) -> None:
        found.extend(launches)

    session = Session(keep, (), {})
    session.call(kernel, call.arguments(name, buffer), {})
    (launch,) = found
    return launch


def described(kernel: Any, call: Call, name: str, buffer: Any) -> dict[str, Any]:
    """What `run_there` needs of a launch, beside the buffer's contents."""
    launch = captured(kernel, call, name, buffer)
    text = {
        "kernel": launch.kernel, "grid": launch.grid, "block": launch.block,
        "smem": launch.dynamic_smem_bytes, "base": buffer.ctypes.data, "size": buffer.size,
        "parameters": [part.hex() for part in launch.parameters],
        "moved_bytes": moved_bytes(name, call),
    }  # fmt: skip
    return {
        "launch": np.array(json.dumps(text)),
        "cubin": np.frombuffer(kernel.artifacts.CUBIN, np.uint8),
    }


def suite() -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, arrays) of each launch."""
    for variant, call in calls().items():
        for name in FUNCTIONS:
            kernel, before = compile_small(name, call.spec, ARCH), call.buffer(name)
            emulated = copy(before)
            Session(None, (), {}).call(kernel, call.arguments(name, emulated), {})
            arrays = {"before": before, "emulated": emulated ^ before}
            yield label(variant, name), arrays | described(kernel, call, name, before)
    call = large_call()
    for name in FUNCTIONS:
        kernel = compile_small(name, call.spec, ARCH)
        yield label(TIMED, name), described(kernel, call, name, room(call.bytes_used))


def main() -> int:
    """Writes the suite."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, arrays in suite():
        np.savez_compressed(folder / f"{name}.npz", **arrays)
        print(f"{name}: {(folder / f'{name}.npz').stat().st_size} bytes", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
