"""What one compiler makes of attention kernels: flash-attn-4's, NVIDIA's open ones and ours.

    python -m lab.benchmarks.codegen --install     once: the compiler and the peers
    python -m lab.benchmarks.codegen               the whole table, and results/codegen.json
    python -m lab.benchmarks.codegen --ours d128 --causal      only ours, its loops, quickly
    python -m lab.benchmarks.codegen --ours d128 --backward --cta-group 2         the same
    python -m lab.benchmarks.codegen --backward         the table of the backward pass alone
    python -m lab.benchmarks.codegen --cubin FILE.cubin        the loops of any kernel

All compile with CuTe-DSL 4.8.1 in its CUDA 13 flavour, for sm_100a, without a GPU: nothing runs, no
figure is a speed on a GPU. `--install` puts compiler, disassembler and cuDNN's kernels into
.venv/codegen, so that .venv keeps its own flavour; `make conformance` installs flash-attn-4.
Loop lengths are warp issue slots for each row of 128 scores (see fa4/inspect/loops.py). "base" is
without emulated exponentials, each of which costs 4 slots more than a MUFU in every peer. Compile
times are of the compiling process's CPU until the kernel can be called, warm: the shortest but the
first. The backward pass is in
codegen_backward.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fa4.inspect import loops
from fa4.inspect.codegen import KernelCode, read_kernels
from fa4.inspect.cubin import find_disassembler
from lab import ROOT
from lab.benchmarks import codegen_found
from lab.benchmarks.codegen_backward import CASES, compare_backward
from lab.benchmarks.codegen_found import (
    SECONDS,
    SITE,
    WORKER,
    Found,
    compile_one,
    describe,
    environment,
    number,
)
from lab.benchmarks.codegen_wanted import CUDNN, EXAMPLE, FLASH, OURS, Wanted
from lab.benchmarks.common import record_path, write_record

DSL = "4.8.1"
PACKAGES = (
    f"nvidia-cutlass-dsl=={DSL}",
    f"nvidia-cutlass-dsl-libs-core=={DSL}",
    f"nvidia-cutlass-dsl-libs-base=={DSL}",
    f"nvidia-cutlass-dsl-libs-cu13=={DSL}",
    "nvidia-cuda-nvdisasm==13.5.37",
    "nvidia-cudnn-frontend==1.32.0",
)
DIMS = {"d64": (64, 64), "d128": (128, 128), "d192": (192, 128)}
COMPILES = 3  # the first one warms the process
SLOTS_PER_EMULATED = 4  # 10 instructions for a pair in place of 2 MUFU
# What must not be longer than in the best peer, and what has a limit of its own.
COMPARED = (
    "compile_cpu_seconds", "softmax_base_slots", "masked_base_slots", "mma_slots",
    "correction_slots",
)  # fmt: skip
LIMITS = {"alpha_percent": 20, "first_p_percent": 50}
# Instructions in all, then in the loops softmax, softmax masked, mma and correction: counted by
# other means for the pinned versions. The loops found here must agree.
KNOWN = {
    (FLASH, 64, False): (2997, 515, None, 173, 107),
    (FLASH, 64, True): (3783, 515, 687, 175, 105),
    (FLASH, 128, False): (3597, 543, None, 202, 185),
    (FLASH, 128, True): (4097, 514, 689, 205, 186),
    (FLASH, 192, False): (3773, 544, None, 234, 185),
    (FLASH, 192, True): (4196, 485, 659, 253, 186),
    (CUDNN, 64, False): (2722, 424, None, 160, 113),
    (CUDNN, 64, True): (5010, 556, 598, 165, 113),
    (CUDNN, 128, False): (3608, 553, None, 148, 193),
    (CUDNN, 128, True): (5589, 426, 598, 146, 193),
    (CUDNN, 192, False): (4334, 544, None, 275, 223),
    (CUDNN, 192, True): (5817, 548, 721, 245, 223),
}


def compile_case(dims: tuple[int, int], causal: bool, compiles: int) -> Iterator[Found]:
    """The kernels of one case; without emulation too, where it can be switched off.

    cuDNN's causal (192, 128) keeps 34 exponentials on a cheaper polynomial then: left out.
    """
    for maker in (FLASH, CUDNN, OURS):
        pair = maker == OURS and not causal and dims[1] == 128  # as fa4.compiled.launch chooses
        wanted = Wanted(maker, *dims, causal, cta_group=2 if pair else 1)
        found = compile_one(wanted, compiles)
        yield found
        if maker != FLASH and emulates(found):
            plain = compile_one(replace(found.wanted, exp2="mufu"), compiles)
            if not emulates(plain):
                yield plain


def emulates(found: Found) -> bool:
    """Whether any exponential is not a MUFU."""
    return found.code is not None and any(loop.emulated for loop in found.code.loops)


def print_loops(code: KernelCode) -> None:
    """The loops of one kernel with what their slots go to."""
    resources = code.resources
    print(
        f"{resources.name[:60]}: {code.instructions} instructions, {resources.registers} registers "
        f"at launch, frame {resources.frame_bytes} B, {code.spill_loads} LDL, "
        f"{code.spill_stores} STL, {code.dynamic_smem_bytes} B of dynamic SMEM"
    )
    if code.problem:
        print(code.problem)
    if code.ptx:
        print(f"  setmaxnreg {code.ptx.budgets}, TMEM columns {code.ptx.tmem_columns}")
    for loop in code.known_loops:
        row = f", {loop.per_row:.0f} per row, {loop.emulated} emulated" if loop.elements else ""
        print(
            f"  {loop.kind:15} {loop.length:4} slots{row}; shortest way {loop.shortest}, elsewhere "
            f"{loop.outside}; budget {loop.registers}, highest R{loop.highest_register}, "
            f"{loop.spills} spills"
        )
        print("     ", ", ".join(f"{name} {count}" for name, count in loop.columns.items()))
        if loop.elements:
            print(f"      alpha at {loop.alpha}%, P stored at {list(loop.p_stored)}%, "
                  f"arrived at {list(loop.p_arrived)}%")  # fmt: skip


def base_slots(loop: loops.LoopReport | None) -> float | None:
    """Slots per row if nothing were emulated."""
    if loop is None or not loop.elements:
        return None
    share = loops.ROW / loop.elements
    return loop.per_row - SLOTS_PER_EMULATED * loop.emulated * share


def measure_start(wanted: Wanted) -> dict[str, Any]:
    """Seconds to a kernel of ours that is in the on-disk cache, in a new process."""
    with tempfile.TemporaryDirectory(prefix="fa4-codegen-") as folder:
        cache = {"FA4_CACHE_DIR": str(Path(folder) / "cache")}
        command = [sys.executable, "-W", "ignore", *WORKER, wanted.argument(), "0", folder]
        seconds: list[float] = []
        for _ in range(4):
            done = subprocess.run(
                command, env=environment() | cache, cwd=ROOT, capture_output=True, text=True,
                timeout=SECONDS, check=False,
            )  # fmt: skip
            if done.returncode:
                return {"problem": (done.stderr.strip().splitlines() or ["failed"])[-1]}
            seconds.append(json.loads((Path(folder) / "start.json").read_text()))
    return {"first_seconds": seconds[0], "cached_seconds": min(seconds[1:])}


def figures(found: Found) -> dict[str, float | None]:
    """What is compared; smaller is better in each."""
    code = found.code
    if code is None:
        return {}
    softmax, masked = code.loop(loops.SOFTMAX), code.loop(loops.MASKED)
    mma, correction = code.loop(loops.MMA), code.loop(loops.CORRECTION)
    p_stored = softmax.p_stored if softmax else ()
    return {
        "compile_cpu_seconds": round(found.seconds, 3),
        "spill_instructions": None
        if code.spill_loads is None
        else code.spill_loads + (code.spill_stores or 0),
        "frame_bytes": code.resources.frame_bytes,
        "softmax_slots": softmax.per_row if softmax else None,
        "softmax_base_slots": base_slots(softmax),
        "masked_slots": masked.per_row if masked else None,
        "masked_base_slots": base_slots(masked),
        "mma_slots": mma.length if mma else None,
        "correction_slots": correction.length if correction else None,
        "correction_skip_slots": correction.shortest if correction else None,
        "alpha_percent": softmax.alpha if softmax else None,
        "first_p_percent": p_stored[0] if p_stored else None,
    }


def disagreement(found: Found) -> str:
    """How a peer's loops differ from what is known of them; empty if they do not."""
    wanted, code = found.wanted, found.code
    known = KNOWN.get((wanted.maker, wanted.head_dim, wanted.causal))
    if known is None or code is None or wanted.exp2 != "tuned":
        return ""
    kinds = (loops.SOFTMAX, loops.MASKED, loops.MMA, loops.CORRECTION)
    counted = [code.instructions, *(one and one.length for one in map(code.loop, kinds))]
    return "" if tuple(counted) == known else f"counted {counted}, known {list(known)}"


ratios = partial(codegen_found.ratios, figures=figures)


def missed(ours: Found, peers: Iterable[Found]) -> list[str]:
    """The goals that a kernel of ours does not reach: no spills, nothing longer than in the best
    peer, alpha in the first fifth of the loop and P before its middle."""
    found = figures(ours)
    names = [
        name for name, row in ratios(ours, peers).items() if name in COMPARED and row["ratio"] > 1
    ]
    names += [name for name in ("spill_instructions", "frame_bytes") if found[name]]
    for name, limit in LIMITS.items():
        value = found[name]
        names += [name] if value is None or value > limit else []
    return names


def emulation_cost(found: Sequence[Found]) -> float | None:
    """Slots that each emulated exponential adds, of a kernel compiled with and without."""
    kernels = {one.wanted.exp2: one.code.loop(loops.SOFTMAX) for one in found if one.code}
    tuned, plain = kernels.get("tuned"), kernels.get("mufu")
    if tuned is None or plain is None or not tuned.emulated:
        return None
    return round((tuned.length - plain.length) / tuned.emulated, 2)


COLUMNS = (
    ("compile s", 9), ("SASS", 5), ("LDL+STL", 7), ("budgets", 14), ("SMEM", 6), ("TMEM", 4),
    ("softmax", 7), ("emu", 3), ("base", 5), ("masked", 6), ("emu", 3), ("MMA", 9),
    ("corr. (skip)", 12), ("alpha %", 7), ("P stored %", 24),
)  # fmt: skip


def print_row(found: Found) -> None:
    """One line of the table."""
    if found.code is None:
        print(f"  {found.name:20} not there: {found.problem}")
        return
    code, row = found.code, figures(found)
    softmax, masked = code.loop(loops.SOFTMAX), code.loop(loops.MASKED)
    mma, correction = code.loop(loops.MMA), code.loop(loops.CORRECTION)
    cells = (
        f"{found.seconds:.2f}",
        code.instructions,
        f"{code.spill_loads}+{code.spill_stores}",
        "/".join(map(str, code.setmaxnreg)),
        code.dynamic_smem_bytes,
        code.tmem_columns,
        number(row["softmax_slots"]),
        softmax.emulated if softmax else "",
        number(row["softmax_base_slots"]),
        number(row["masked_slots"]),
        masked.emulated if masked else "",
        f"{mma.length} ({mma.columns.get('MMA', 0)})" if mma else "-",
        f"{correction.length} ({correction.shortest})" if correction else "-",
        softmax.alpha if softmax else "-",
        " ".join(f"{percent:.0f}" for percent in softmax.p_stored) if softmax else "-",
    )
    print(
        f"  {found.name:20}",
        *(f"{cell!s:>{w}}" for cell, (_, w) in zip(cells, COLUMNS, strict=True)),
    )


def compare(cases: Sequence[tuple[str, bool]], compiles: int) -> list[dict[str, Any]]:
    """Compiles and prints every case."""
    rows = []
    for dims, causal in cases:
        mask = "causal" if causal else "full"
        print(f"{DIMS[dims]} {mask}")
        print(f"  {'':20}", *(f"{title:>{width}}" for title, width in COLUMNS), flush=True)
        found = []
        for one in compile_case(DIMS[dims], causal, compiles):
            found.append(one)
            print_row(one)
            if disagreement(one):
                print(
                    f"  {one.name}: {disagreement(one)}: another version, or a fault in the count"
                )
            sys.stdout.flush()
        peers = [one for one in found if one.code and one.wanted.maker != OURS]
        theirs = [one for one in peers if one.wanted.maker == CUDNN]
        mine = [one for one in found if one.code and one.wanted.maker == OURS]
        for one in mine:
            parts = [f"{k} {v['ratio']}" for k, v in ratios(one, peers).items() if v["ratio"]]
            print(f"  {one.name} over the best peer: {', '.join(parts)}")
            print(f"  {one.name} misses: {', '.join(missed(one, peers)) or 'nothing'}")
        costs = {name: emulation_cost(group) for name, group in (("ours", mine), (CUDNN, theirs))}
        print(f"  slots for each emulated exponential: {costs}", flush=True)
        rows.append(
            {
                "head_dim": DIMS[dims][0],
                "head_dim_v": DIMS[dims][1],
                "mask": mask,
                "kernels": [describe(one, figures(one), disagreement(one)) for one in found],
                "against_best_peer": {one.name: ratios(one, peers) for one in mine},
                "goals_missed": {one.name: missed(one, peers) for one in mine},
                "slots_per_emulated": costs,
            }
        )
    return rows


def install() -> None:
    """Puts the compiler and cuDNN's kernels into .venv/codegen."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--upgrade"]
    subprocess.run([*pip, "--no-deps", "--target", str(SITE), *PACKAGES], check=True)


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--cubin", type=Path, metavar="FILE")
    parser.add_argument("--ours", choices=DIMS, help="compile ours alone, once")
    parser.add_argument(
        "--peer", choices=(FLASH, CUDNN, EXAMPLE), help="with --ours: this one instead"
    )
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--backward", action="store_true", help="the backward pass alone")
    parser.add_argument("--deterministic", action="store_true", help="with --backward")
    parser.add_argument("--no-emulation", action="store_true")
    parser.add_argument("--cta-group", type=int, choices=(1, 2), default=1)
    parser.add_argument("--cases", nargs="*", choices=DIMS, default=list(DIMS))
    parser.add_argument("--compiles", type=int, default=COMPILES)
    parser.add_argument("--output", type=Path, default=record_path("codegen"))
    return parser.parse_args()


def main() -> None:
    """Prints the table and writes the result file, or one of the shorter things."""
    options = parse_options()
    if options.install:
        install()
        return
    if options.cubin:
        try:
            kernels = read_kernels(options.cubin.read_bytes())
        except (OSError, ValueError) as error:
            sys.exit(f"{options.cubin}: {error}")
        for code in kernels:
            print_loops(code)
        return
    if not (SITE / "nvidia_cutlass_dsl").is_dir() or find_disassembler() is None:
        sys.exit(f"no compiler in {SITE}: python -m lab.benchmarks.codegen --install")
    if options.ours:
        exp2 = "mufu" if options.no_emulation else "tuned"
        maker = options.peer or OURS
        wanted = Wanted(maker, *DIMS[options.ours], options.causal, exp2, options.cta_group,
                        options.backward, options.deterministic)  # fmt: skip
        found = compile_one(wanted, 1)
        if found.code is None:
            sys.exit(f"{found.name}: {found.problem}")
        print_loops(found.code)
        return
    result: dict[str, Any] = {"cached_start": None, "cases": []}
    if options.backward:  # the forward pass stays as it was
        known = json.loads(options.output.read_text("utf-8"))
        result = {name: known[name] for name in result}
    else:
        masks = (False, True)
        result["cases"] = compare(
            [(dims, causal) for dims in options.cases for causal in masks], options.compiles
        )
        result["cached_start"] = measure_start(Wanted(OURS, 128, 128, True))
        print(f"ours from the on-disk cache: {result['cached_start']}")
    dims = [DIMS[name] for name in options.cases]
    result["backward"] = compare_backward(
        [case for case in CASES if case[0] in dims], options.compiles
    )
    packages = ("nvidia-cutlass-dsl", "torch")
    report = {"packages": PACKAGES} | result
    write_record(options.output, report, packages, whole=not options.backward)


if __name__ == "__main__":
    main()
