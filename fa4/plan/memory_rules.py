"""Rules on buffers: they fit, overlap only where declared, are aligned, and are what work names."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from fa4.hardware import Gpu
from fa4.plan.places import find_buffer, find_place
from fa4.plan.schema import GROUP_WARPS, Buffer, Copy, Mma, PipelinePlan, Wait, Work, walk

Broken = Iterator[tuple[str, str]]

SPACES = ("smem", "tmem")
TILE_ALIGN_BYTES = 1024  # 8 rows of 128 bytes: the pattern in which TMA and the tensor core swizzle
RUN_BYTES = 128  # of a row, that lie together where they are swizzled most widely
SLOT_ALIGN_BYTES = 128  # a TMA box starts on a 128-byte boundary
PLAIN_ALIGN_BYTES = 8  # an mbarrier, the narrowest thing kept in shared memory
TMEM_ALIGN_COLS = 8
MBARRIER_BYTES = 8
NOT_NAMED_BY_WORK = ("barriers",)  # signals are their readers and writers
TAIL = "_tail"  # bytes behind a ring of uneven slots


def whole_runs(cols: int, element_bytes: int = 2) -> int:
    """Columns of a tile in shared memory with room for `cols`: whole runs of 128 bytes.

    TMA loads tiles of shorter runs more slowly, in boxes of a run's width: Hopper's backward
    kernels of 240 columns took 1.5 times as long in runs of 32 bytes as in tiles of 256 columns,
    and those of 136 in runs of 64 bytes 1.14 times (measured on an H200).
    """
    run = RUN_BYTES // element_bytes
    return -(-cols // run) * run


def works(plan: PipelinePlan) -> Iterator[tuple[str, Work]]:
    """(role, work) for every piece of work of a plan, loop bodies once."""
    for role in plan.roles:
        for step in walk(role.steps):
            if isinstance(step, Work):
                yield role.name, step


def known_buffers(plan: PipelinePlan, gpu: Gpu) -> Broken:
    """Work reads and writes buffers of the plan, and by label what is loaded."""
    loaded = {name for _, work in works(plan) for name in work.writes}
    for role, work in works(plan):
        for name in (*work.reads, *work.writes):
            place = find_place(plan, name)
            if place is None:
                yield role, f"{work.what} names {name}, which is no buffer nor a part of one"
            elif work.by_group and len(plan.role(role).warps) != GROUP_WARPS * max(
                len(work.reads), len(work.writes)
            ):
                yield role, f"{work.what} has not one place for each warpgroup"
            elif place.label is not None and name not in loaded:
                yield role, f"{work.what} names {name}, which no load brings"


def memory_fits(plan: PipelinePlan, gpu: Gpu) -> Broken:
    """Shared memory of a CTA and columns of tensor memory suffice."""
    limits = {"smem": (gpu.smem_bytes_per_cta, "bytes"), "tmem": (gpu.tmem_cols, "columns")}
    for buffer in plan.buffers:
        if buffer.space not in SPACES:
            yield buffer.name, f"space {buffer.space!r}; must be one of {', '.join(SPACES)}"
        if buffer.start < 0 or buffer.size < 1 or buffer.stages < 1:
            yield (
                buffer.name,
                f"start {buffer.start}, size {buffer.size}, stages {buffer.stages}; "
                f"must be at least 0, 1 and 1",
            )
    for space, (limit, unit) in limits.items():
        used = plan.bytes_used(space)
        if used > limit:
            yield space, f"needs {used} {unit}; {gpu.name} has {limit}"


def declared_overlaps(plan: PipelinePlan, gpu: Gpu) -> Broken:
    """Buffers that share memory say so, one of the two at least, and with a reason."""
    for a, b in combinations(plan.buffers, 2):
        declared = b.name in a.overlaps or a.name in b.overlaps
        shared = min(a.stop, b.stop) - max(a.start, b.start) if a.space == b.space else 0
        if shared > 0 and not declared:
            yield (
                f"{a.name}, {b.name}",
                f"share {shared} of {a.space} undeclared: [{a.start}, {a.stop}) and "
                f"[{b.start}, {b.stop})",
            )
        if shared <= 0 and declared:
            yield f"{a.name}, {b.name}", "are declared to overlap and do not"
    names = {buffer.name for buffer in plan.buffers}
    for buffer in plan.buffers:
        for other, reason in buffer.overlaps.items():
            if other not in names:
                yield buffer.name, f"is declared to overlap {other}, which is no buffer"
            if not reason.strip():
                yield buffer.name, f"overlaps {other} without a reason that makes it safe"


def aligned_buffers(plan: PipelinePlan, gpu: Gpu) -> Broken:
    """Tiles in shared memory start at a swizzle atom, their slots at a TMA boundary."""
    tiles = set()
    for _, work in works(plan):
        if isinstance(work.amount, Mma) or (
            isinstance(work.amount, Copy) and work.amount.kind in ("load", "store")
        ):
            found = [find_buffer(plan, name) for name in (*work.reads, *work.writes)]
            tiles |= {buffer.name for buffer in found if buffer is not None}
    for buffer in plan.buffers:
        if buffer.space == "tmem":
            need, what = TMEM_ALIGN_COLS, "column"
        else:
            # Row statistics are 512 bytes of float32: loaded by TMA, never swizzled.
            tile = buffer.name in tiles and buffer.size > TILE_ALIGN_BYTES
            need, what = TILE_ALIGN_BYTES if tile else PLAIN_ALIGN_BYTES, "byte"
            if buffer.name in tiles and buffer.stages > 1 and buffer.size % SLOT_ALIGN_BYTES:
                yield (
                    buffer.name,
                    f"slots of {buffer.size} bytes; must be a multiple of {SLOT_ALIGN_BYTES}",
                )
        if buffer.start % need:
            yield buffer.name, f"starts at {what} {buffer.start}; must be a multiple of {need}"


def ring_slots(plan: PipelinePlan, gpu: Gpu) -> Broken:
    """A ring has as many barriers as its buffer has slots, and starts with all of them empty."""
    signals = {signal.name: signal for signal in plan.signals}
    for name, full in signals.items():
        ring = name.removesuffix("_full")
        empty = signals.get(f"{ring}_empty")
        buffer = find_buffer(plan, ring)
        if ring == name or empty is None or buffer is None or buffer.space != "smem":
            continue
        slots = buffer.stages if buffer.name == ring else 1
        if not full.stages == empty.stages == empty.free == slots:
            yield (
                ring,
                f"has {slots} slots, {full.stages} full and {empty.stages} empty barriers, "
                f"{empty.free} of them free at first; all must agree",
            )


def loads_fit_buffers(plan: PipelinePlan, gpu: Gpu) -> Broken:
    """What a load brings fits into one slot of each buffer it writes."""
    for role, work in works(plan):
        if not isinstance(work.amount, Copy) or work.amount.kind != "load":
            continue
        found = [find_buffer(plan, name) for name in work.writes]
        room = sum(_slot_bytes(plan, buffer) for buffer in found if buffer is not None)
        if work.amount.num_bytes > room:
            yield (
                role,
                f"{work.what} brings {work.amount.num_bytes} bytes into {', '.join(work.writes)} "
                f"of {room}",
            )


def _slot_bytes(plan: PipelinePlan, buffer: Buffer) -> int:
    """Bytes of a slot; in a ring of uneven slots, the large ones reach into the tail."""
    tail = find_buffer(plan, buffer.name + TAIL)
    return buffer.size + (tail.size if tail is not None else 0)


def used_buffers(plan: PipelinePlan, gpu: Gpu) -> Broken:
    """Each buffer is written by some work and read by some work (or lies behind a ring)."""
    read: set[str] = set()
    written: set[str] = set()
    for _, work in works(plan):
        for names, into in ((work.reads, read), (work.writes, written)):
            found = [find_buffer(plan, name) for name in names]
            into |= {buffer.name for buffer in found if buffer is not None}
    rings = {s.name.removesuffix("_full") for s in plan.signals if s.tx_bytes}
    awaited = {s.signal for r in plan.roles for s in walk(r.program) if isinstance(s, Wait)}
    for buffer in plan.buffers:
        if buffer.name in NOT_NAMED_BY_WORK or buffer.name.endswith(TAIL):
            continue
        if buffer.name not in written:
            yield buffer.name, "is written by no work"
        # Who waits for a load by threads reads it with ordinary instructions.
        by_threads = buffer.name in rings and f"{buffer.name}_full" in awaited
        if buffer.name not in read and not by_threads:
            yield buffer.name, "is read by no work"


def barrier_space(plan: PipelinePlan, gpu: Gpu) -> Broken:
    """The mbarriers and the TMEM pointer fit into the buffer `barriers`."""
    buffer = find_buffer(plan, "barriers")
    count = sum(signal.stages for signal in plan.signals if signal.kind == "mbarrier")
    need = MBARRIER_BYTES * (count + 1)
    if buffer is None:
        yield "barriers", f"{count} mbarriers and no buffer of that name"
    elif buffer.size * buffer.stages < need:
        yield (
            "barriers",
            f"{count} mbarriers and a pointer need {need} bytes; it has "
            f"{buffer.size * buffer.stages}",
        )
