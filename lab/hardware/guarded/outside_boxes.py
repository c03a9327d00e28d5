"""What TMA touches when a box lies partly or wholly outside its tensor.

    python3 -m lab.hardware.guarded.outside_boxes FILE.json              # GPU
    python3 -m lab.hardware.guarded.outside_boxes FILE.json --emulated   # the emulator's verdicts

A tensor of three dimensions begins where mapped memory begins, or ends where it ends. Boxes lie
inside it, cross either edge of a dimension, or lie beyond one; their map begins where the tensor
does, or in front of it. Each case runs in a process of its own, as an illegal access ends the
context.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from fa4.emulator.tma.descriptor import TensorMap
from lab.hardware.driver import Gpu
from lab.hardware.emulator_hopper.barriers import wait
from lab.hardware.emulator_hopper.programs import Program, TensorMapAt, module_text, run_program
from lab.hardware.emulator_hopper.tensors import START
from lab.hardware.guarded.memory import CudaDriver, GuardedMemory
from lab.hardware.there import describe_machine

OPERATIONS = ("load", "prefetch", "store", "reduce")
STARTS = ("the tensor's", "in front of it")
EDGES = ("before", "behind")
DIMS, BOX = (32, 8, 5), (16, 4, 2)  # float32; rows of 128 bytes
LIMIT_S = 5.0
PROCESSES = 8
HOW = ("crossing", "beyond", "far", "before", "entering")
OK, TOUCHED = "ok", "illegal access"


@dataclass(frozen=True)
class OutsideCase:
    """One copy. place: "inside", or how it lies and to which dimension: "beyond 1", "before 0".

    Part of the box is in the tensor where it is "entering" by the first edge of a dimension, or
    "crossing" the last one. edge: where nothing is mapped.
    """

    operation: str
    place: str
    start: str
    edge: str

    @property
    def name(self) -> str:
        """For the table of results."""
        return f"{self.operation}, {self.place}, map begins {self.start}, unmapped {self.edge} it"

    @property
    def at(self) -> tuple[int, ...]:
        """Coordinates of the box, in the tensor."""
        where, _, number = self.place.partition(" ")
        at = [0, 0, 0]
        if number:
            d = int(number)
            half = BOX[d] // 2
            at[d] = {"crossing": DIMS[d] - half, "beyond": DIMS[d], "before": -BOX[d],
                     "far": 4 * DIMS[d], "entering": -half}[where]  # fmt: skip
        return tuple(at)

    @property
    def is_outside(self) -> bool:
        """Does the box hold nothing of the tensor?"""
        return not self.place.startswith(("inside", "crossing", "entering"))


def all_cases() -> list[OutsideCase]:
    """Stores and reductions may not begin at negative coordinates."""
    ways = ["inside"] + [f"{how} {d}" for how in HOW
                         for d in range(3)]  # fmt: skip
    return [
        OutsideCase(*choice)
        for choice in product(OPERATIONS, ways, STARTS, EDGES)
        if choice[0] in ("load", "prefetch") or not choice[1].startswith(("before", "entering"))
    ]


def make_program(case: OutsideCase) -> Program:
    """The kernel of a case: array 0 is the tensor, array 1 takes what a load fetched.

    In front of the tensor a map has a further dimension, which moves it forward again by as many
    bytes as it begins earlier.
    """
    pitches = (DIMS[0] * 4, DIMS[0] * DIMS[1] * 4)
    tensor_bytes = pitches[1] * DIMS[2]
    moved = case.start != STARTS[0]
    dims: tuple[int, ...] = DIMS
    strides: tuple[int, ...] = pitches
    box: tuple[int, ...] = BOX
    at = case.at
    if moved:
        dims, strides, box, at = (*dims, 2), (*strides, tensor_bytes), (*box, 1), (*at, 1)
    table = TensorMap(0, "f32", dims, strides, box, (1,) * len(dims), hints=0)
    place = "{" + ", ".join(str(c) for c in at) + "}"
    size, rank = table.box_bytes, f"{len(dims)}d"
    copy = {
        "load": f"""
  @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], {size};
  @%p1 cp.async.bulk.tensor.{rank}.shared::cluster.global.tile.mbarrier::complete_tx::bytes
    [%r21], [%rd20, {place}], [%r20];
{wait("%r20", "0", "FULL")}""",
        "prefetch": f"@%p1 cp.async.bulk.prefetch.tensor.{rank}.L2.global.tile [%rd20, {place}];",
        "store": _drain(
            f"cp.async.bulk.tensor.{rank}.global.shared::cta.tile.bulk_group", place),
        "reduce": _drain(
            f"cp.reduce.async.bulk.tensor.{rank}.global.shared::cta.add.tile.bulk_group", place),
    }[case.operation]  # fmt: skip
    body = f"""{START}
  mov.u64 %rd20, map0;
  cvta.param.u64 %rd20, %rd20;
  bar.sync 0;
{copy}
  bar.sync 0;
  @%p1 st.global.b32 [%rd2], %r19;
"""
    tensor = np.arange(tensor_bytes // 4, dtype=np.float32)
    maps = (TensorMapAt(table.encode(), 0, -tensor_bytes if moved else 0),)
    return Program(case.name, "outside", module_text(body, 2, 1), (tensor, np.zeros(64, np.uint32)),
                   (), smem_bytes=16384, maps=maps)  # fmt: skip


def _drain(instruction: str, place: str) -> str:
    return f"""
  st.shared.v4.b32 [%r22], {{%r3, %r3, %r3, %r3}};
  fence.proxy.async.shared::cta;
  bar.sync 0;
  @%p1 {instruction} [%rd20, {place}], [%r21];
  @%p1 cp.async.bulk.commit_group;
  @%p1 cp.async.bulk.wait_group 0;
"""


class GuardedGpu(Gpu):
    """Arrays begin where mapped memory begins, or end where it ends."""

    def __init__(self, edge: str) -> None:
        """edge: on which side of each array nothing is mapped. Raises CudaError without a GPU."""
        super().__init__()
        self._at_end, self._guarded = edge == EDGES[1], GuardedMemory(CudaDriver())

    def allocate(self, size_bytes: int) -> int:
        """As of Gpu, with nothing mapped on both sides."""
        self._guarded.at_end = self._at_end
        return self._guarded.allocate(size_bytes)

    def free(self, address: int) -> None:
        """As of Gpu."""
        self._guarded.free(address)


def measure(case: OutsideCase) -> str:
    """The verdict of this machine's GPU, in a process of its own."""
    command = [sys.executable, "-m", "lab.hardware.guarded.outside_boxes", "-", "--case", case.name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def measure_here(case: OutsideCase) -> str:
    """The verdict of the GPU; the context of this process may be lost afterwards."""
    program = make_program(case)
    try:
        run_program(GuardedGpu(case.edge), program, program.text.encode() + b"\0", LIMIT_S)
    except RuntimeError as error:
        return TOUCHED if "ILLEGAL_ADDRESS" in str(error) else str(error)
    return OK


def emulate_here(case: OutsideCase) -> str:
    """The emulator's verdict."""
    from fa4.emulator.errors import EmulationFailed
    from lab.hardware.emulator_hopper.emulate import emulate

    try:
        emulate(make_program(case))
    except EmulationFailed as error:
        return TOUCHED if "out-of-bounds" in str(error) else str(error)
    return OK


def main() -> int:
    """Writes {case: verdict} and where it was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--emulated", action="store_true")
    parser.add_argument("--case", help="one case, measured in this process")
    arguments = parser.parse_args()
    cases = all_cases()
    if arguments.case:
        (case,) = (case for case in cases if case.name == arguments.case)
        print(measure_here(case))
        return 0
    judge, threads = (emulate_here, 1) if arguments.emulated else (measure, PROCESSES)
    verdicts: dict[str, str] = {}
    with ThreadPoolExecutor(threads) as pool:
        for case, verdict in zip(cases, pool.map(judge, cases), strict=True):
            verdicts[case.name] = verdict
            print(f"{verdict:16} {case.name}", flush=True)
    machine = {"gpu": "the emulator"} if arguments.emulated else describe_machine()
    arguments.out.write_text(json.dumps(machine | {"verdicts": verdicts}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
