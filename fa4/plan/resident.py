"""What is resident at a time, and launch orders that never end because of it.

CTAs hold their SM until they end, and new ones start only where one has ended. Where a CTA waits
for another one, as in a fixed order of sums, all resident ones may wait for one that has not
started. Which ones do depends on no times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fa4.hardware import Gpu
from fa4.plan.schema import LEAST_REGISTERS, PipelinePlan
from fa4.plan.work import WARPGROUP

WARP = 32
RESERVED_SMEM_BYTES = 1024  # of each CTA, by the system (CUDA programming guide)
SMALLEST_TMEM = 32  # columns of an allocation, which is a power of two (PTX ISA, tcgen05.alloc)
FROM = {"ascending": "first", "descending": "last"}

Broken = Iterator[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Stuck:
    """A launch order comes to a halt: `launched` CTAs have started, and those in `waiting` not
    ended."""

    launched: int
    waiting: tuple[int, ...]


def find_stuck(before: Sequence[int], resident: int) -> Stuck | None:
    """Where CTAs 0, 1, ... that start in this order, `resident` at a time, never end; or None.

    before: for each the CTA that it waits for, -1 for none. One that waits for nobody, or for one
    that has ended, ends.
    """
    after = {first: cta for cta, first in enumerate(before) if first >= 0}
    ended: set[int] = set()
    for launched in range(len(before)):
        if launched - len(ended) == resident:
            return Stuck(
                launched=launched, waiting=tuple(x for x in range(launched) if x not in ended)
            )
        cta: int | None = launched
        while cta is not None and cta <= launched and (before[cta] < 0 or before[cta] in ended):
            ended.add(cta)
            cta = after.get(cta)
    return None


def ctas_per_sm(plan: PipelinePlan, gpu: Gpu) -> int:
    """CTAs of a plan that an SM has room for at a time; 1 for what fits nowhere, which other rules
    find."""
    cols = plan.bytes_used("tmem")
    allocated = max(SMALLEST_TMEM, 1 << (cols - 1).bit_length()) if cols else 0
    smem = plan.bytes_used("smem") + RESERVED_SMEM_BYTES
    threads = WARP * plan.warps
    groups = range(plan.warps // 4)
    counts = {warp // 4: role.registers for role in plan.roles for warp in role.warps}
    registers = WARPGROUP * sum(counts.get(group, LEAST_REGISTERS) for group in groups)
    fitting = min(
        gpu.smem_bytes_per_sm // smem,
        gpu.max_threads_per_sm // threads,
        gpu.registers_per_sm // registers,
        gpu.tmem_cols // allocated if allocated else gpu.max_ctas_per_sm,
        gpu.max_ctas_per_sm,
    )
    return max(1, fitting)


def resident_clusters(plan: PipelinePlan, gpu: Gpu) -> int:
    """CTAs, or CTA pairs, of a plan that run on the chip at a time."""
    return gpu.sm_count // plan.cta_group * ctas_per_sm(plan, gpu)


def launches_end(plan: PipelinePlan, gpu: Gpu) -> Broken:
    """A kernel's launch order ends, however many work tiles that wait for each other there are."""
    resident, group = resident_clusters(plan, gpu), "CTA pairs" if plan.cta_group == 2 else "CTAs"
    if resident < 1:
        yield "chip", f"no {group} fit on {gpu.name} with {gpu.sm_count} SMs"
        return
    for turns in (plan.turns,) if plan.turns else ():
        blocks = resident + 1  # of one head: one more than there is room for
        for launch in turns.launches:
            stuck = find_stuck(_before(blocks, launch == turns.order), resident)
            if stuck is not None:
                yield (
                    f"launch from the {FROM[launch]} keys on",
                    f"never ends where turns go from the {FROM[turns.order]} keys on: of {blocks} "
                    f"KV tiles of a head, all {len(stuck.waiting)} resident {group} wait for one "
                    "that has not started",
                )


def _before(blocks: int, same_order: bool) -> list[int]:
    """For each CTA of a head, in the order of launches, whom it waits for."""
    if same_order:
        return list(range(-1, blocks - 1))
    return [cta + 1 if cta + 1 < blocks else -1 for cta in range(blocks)]
