"""The backward kernels in the table of `codegen.py`: ours of one CTA and of pairs, and
those of flash-attn-4, cuDNN (head dim 128) and NVIDIA's example (one head dim).

Counted is the main kernel, compile times are of all three of a pass. "compute" is the loop that
makes P and dS of a query tile: where a peer has but a masked one, every tile goes through that.
"MMA" is what its warp issues for a query tile: loops inside are counted as often as they run.
"reduce" brings dQ out of tensor memory; cuDNN's copies dS as well and leaves the additions to
another warp, whose loop is not counted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from fa4.inspect import loops
from fa4.inspect.codegen import KernelCode
from lab.benchmarks.codegen_found import Figures, Found, compile_one, describe, number, ratios
from lab.benchmarks.codegen_wanted import CUDNN, EXAMPLE, FLASH, OURS, Wanted

CASES = (((128, 128), False), ((128, 128), True), ((64, 64), False), ((64, 64), True),
         ((192, 128), False), ((192, 128), True))  # fmt: skip
SERIAL = (192, 128)  # fits into no CTA alone
MMA_DEPTH, TILE = 16, 128
INSTRUCTION_BYTES = 16
# What must not be longer than in the best peer; and what has a limit of its own.
COMPARED = ("compile_cpu_seconds", "mma_slots", "reduce_slots", "barriers")
LIMITS = {"compute_slots": 391, "masked_slots": 460, "spill_instructions": 0, "frame_bytes": 0,
          "ignored_budgets": 0}  # fmt: skip
# Slots of the compute loop, counted by other means for the pinned versions.
KNOWN = {
    (FLASH, (128, 128), False): 548, (FLASH, (128, 128), True): 583,
    (FLASH, (64, 64), False): 449, (FLASH, (64, 64), True): 483,
    (FLASH, (192, 128), False): 547, (FLASH, (192, 128), True): 580,
    (CUDNN, (128, 128), False): 391, (CUDNN, (128, 128), True): 592,
}  # fmt: skip
COLUMNS = (("compile s", 9), ("SASS", 5), ("LDL+STL", 7), ("frame", 5), ("budgets", 14),
           ("SMEM", 6), ("compute", 9), ("masked", 6), ("MMA", 9), ("reduce", 6),
           ("barriers", 8))  # fmt: skip


def compare_backward(cases: Iterable[tuple[tuple[int, int], bool]], compiles: int) -> list[Any]:
    """Compiles and prints every case."""
    return [compare_case(dims, causal, compiles) for dims, causal in cases]


def compare_case(dims: tuple[int, int], causal: bool, compiles: int) -> dict[str, Any]:
    """One case as plain data."""
    mask = "causal" if causal else "full"
    print(f"backward {dims} {mask}")
    print(f"  {'':20}", *(f"{title:>{width}}" for title, width in COLUMNS), flush=True)
    found = []
    for wanted in wanted_of(dims, causal):
        one = compile_one(wanted, compiles)
        found.append(one)
        print_row(one)
        if disagreement(one):
            print(f"  {one.name}: {disagreement(one)}: another version, or a fault in the count")
        sys.stdout.flush()
    peers = [one for one in found if one.code and one.wanted.maker != OURS]
    mine = [one for one in found if one.code and one.wanted.maker == OURS]
    for one in mine:
        print(f"  {one.name} misses: {', '.join(missed(one, peers)) or 'nothing'}", flush=True)
    return {
        "head_dim": dims[0],
        "head_dim_v": dims[1],
        "mask": mask,
        "limits": LIMITS,
        "kernels": [brief(one) for one in found],
        "against_best_peer": {one.name: against(one, peers) for one in mine},
        "goals_missed": {one.name: missed(one, peers) for one in mine},
    }


def brief(found: Found) -> dict[str, Any]:
    """A kernel as plain data, of its code only the loops that are compared."""
    row = describe(found, figures(found), disagreement(found)) | {"pair": found.pair}
    if found.code is not None:
        del row["code"]
        compared = (loops.GRADIENTS, loops.GRADIENTS_MASKED, loops.MMA, loops.REDUCE)
        row["instructions"] = found.code.instructions
        row["budgets"] = list(found.code.setmaxnreg)
        row["dynamic_smem_bytes"] = found.code.dynamic_smem_bytes
        row["columns"] = {
            loop.kind: dict(loop.columns) for loop in found.code.loops if loop.kind in compared
        }
    return row


def wanted_of(dims: tuple[int, int], causal: bool) -> list[Wanted]:
    """The kernels of a case: peers that have it, then each of ours."""
    makers = [FLASH]
    makers += [EXAMPLE] if dims[0] == dims[1] else []
    makers += [CUDNN] if dims == (TILE, TILE) else []
    groups = {SERIAL: (2,), (TILE, TILE): (1, 2)}.get(dims, (1,))
    wanted = [Wanted(maker, *dims, causal, backward=True) for maker in makers]
    ours = Wanted(OURS, *dims, causal, backward=True)
    return wanted + [
        replace(ours, cta_group=group, deterministic=in_turn)
        for group in groups
        for in_turn in (False, True)
    ]


def figures(found: Found) -> Figures:
    """What is compared; smaller is better in each."""
    code = found.code
    if code is None:
        return {}
    plain, masked = code.loop(loops.GRADIENTS), code.loop(loops.GRADIENTS_MASKED)
    compute, masked = plain or masked, masked or plain
    reduce = code.loop(loops.REDUCE)
    spills = None if code.spill_loads is None else code.spill_loads + (code.spill_stores or 0)
    return {
        "compile_cpu_seconds": round(found.seconds, 3),
        "spill_instructions": spills,
        "frame_bytes": code.resources.frame_bytes,
        "ignored_budgets": len(code.ignored_budgets),
        "compute_slots": compute.length if compute else None,
        "compute_shortest_slots": compute.shortest if compute else None,
        "masked_slots": masked.length if masked else None,
        "masked_shortest_slots": masked.shortest if masked else None,
        "mma_slots": mma_slots(code, instructions_of(found)),
        "reduce_slots": reduce.length if reduce else None,
        "barriers": sum(one.barriers for one in (compute, reduce) if one),
    }


def instructions_of(found: Found) -> int:
    """MMA instructions of a query tile: S, dP, dV, dK, and dQ of the keys of a pair or a CTA."""
    wanted = found.wanted
    depths = (wanted.head_dim, wanted.head_dim_v, TILE, TILE, TILE * (2 if found.pair else 1))
    return sum(depths) // MMA_DEPTH


def mma_slots(code: KernelCode, instructions: int) -> int | None:
    """Slots that an MMA warp issues for a query tile of so many MMA instructions.

    Of its loop, which is the smallest with at least half of them; what is missing there is issued
    by further trips of a loop inside.
    """
    with_mma = [(loop.columns.get("MMA", 0), loop) for loop in code.loops]
    whole = [pair for pair in with_mma if 2 * pair[0] >= instructions]
    if not whole:
        return None
    count, loop = min(whole, key=lambda pair: pair[1].length)
    stop = loop.header + loop.length * INSTRUCTION_BYTES
    inner = [pair for pair in with_mma if pair[0] and loop.header < pair[1].header < stop]
    if count == instructions or not inner:
        return loop.length
    inside, trip = max(inner, key=lambda pair: pair[0])
    return loop.length + trip.length * (instructions - count) // inside


def against(ours: Found, peers: Sequence[Found]) -> dict[str, dict[str, Any]]:
    """Each figure beside the best peer's: the MMA warp's beside those for as many CTAs. The peers
    add dQ in any order, so ours that does not has no peer in that."""
    found = ratios(ours, peers, figures)
    alike = ratios(ours, [peer for peer in peers if peer.pair == ours.pair], figures)
    dropped = {"mma_slots", *(("reduce_slots",) if ours.wanted.deterministic else ())}
    found = {name: row for name, row in found.items() if name not in dropped}
    return found | {name: row for name, row in alike.items() if name == "mma_slots"}


def missed(ours: Found, peers: Sequence[Found]) -> list[str]:
    """The goals that a kernel of ours does not reach."""
    found = figures(ours)
    beaten = against(ours, peers)
    names = [
        name for name in COMPARED
        if name in beaten and beaten[name]["ours"] > beaten[name]["best_peer"]
    ]  # fmt: skip
    over = {name: found[name] for name in LIMITS}
    return names + [name for name, x in over.items() if x is None or x > LIMITS[name]]


def disagreement(found: Found) -> str:
    """How a peer's compute loop differs from what is known of it; empty if it does not."""
    wanted = found.wanted
    known = KNOWN.get((wanted.maker, (wanted.head_dim, wanted.head_dim_v), wanted.causal))
    if known is None or found.code is None:
        return ""
    counted = figures(found)["compute_slots"]
    return "" if counted == known else f"counted {counted}, known {known}"


def print_row(found: Found) -> None:
    """One line of the table."""
    if found.code is None:
        print(f"  {found.name:20} not there: {found.problem}")
        return
    code, row = found.code, figures(found)
    budgets = "/".join(map(str, code.setmaxnreg)) + ("!" if code.ignored_budgets else "")
    cells = (
        f"{found.seconds:.2f}",
        code.instructions,
        f"{code.spill_loads}+{code.spill_stores}",
        code.resources.frame_bytes,
        budgets,
        code.dynamic_smem_bytes,
        f"{number(row['compute_slots'])} ({number(row['compute_shortest_slots'])})",
        number(row["masked_slots"]),
        f"{number(row['mma_slots'])} ({instructions_of(found)})",
        number(row["reduce_slots"]),
        number(row["barriers"]),
    )
    print(
        f"  {found.name:20}",
        *(f"{cell!s:>{w}}" for cell, (_, w) in zip(cells, COLUMNS, strict=True)),
    )
