"""How the CTAs of a grid begin and end, and when the launch behind it may start."""

from __future__ import annotations

import numpy as np

from fa4.emulator.machine.checks import check_cta_exit, check_warp_exit
from fa4.emulator.machine.names import ctas_of
from fa4.emulator.machine.options import WARP_START_STEPS
from fa4.emulator.machine.state import QUARTERS, Cluster, Cta, Fragment, Grid, Warp
from fa4.emulator.translate.layout import SHARED_BASE
from fa4.emulator.warp_lanes import FULL_MASK, Array

# Registers of an SM, and the granularity of the allocation per warp: CUDA programming guide,
# compute capability 9.0 and 10.0; 512 per warp from the occupancy calculator.
REGISTERS_PER_SM = 65536


# Starting.


def start(grid: Grid) -> None:
    """Starts the first clusters."""
    most = grid.machine.options.resident_clusters
    while len(grid.resident) < most and start_next(grid):
        pass


def start_next(grid: Grid) -> bool:
    """Starts one more cluster, if one is left and the chip has room. Returns whether it did."""
    if grid.started == grid.cluster_count or not grid.may_start:
        return False
    if len(grid.resident) * grid.cluster_size >= grid.machine.options.clusters_limit:
        return False
    grid.started += 1
    start_cluster(grid, grid.started - 1)
    return True


def start_cluster(grid: Grid, index: int) -> None:
    """Creates the CTAs of a cluster and makes their warps ready."""
    cluster = Cluster(grid, index, grid.number + index, ctas_of(grid, index))
    grid.resident.append(cluster)
    for cta in cluster.ctas:
        _start_warps(cta)
    machine = grid.machine
    if machine.events is not None:
        machine.events.cluster_started(cluster, machine.ticks)


def _start_warps(cta: Cta) -> None:
    grid, machine = cta.grid, cta.machine
    machine.steps_left -= WARP_START_STEPS * grid.warp_count
    budget = _registers_per_thread(grid)
    # The pools of setmaxnreg hold what the CTA's own warps of a quarter gave back, not what the
    # SM has free or other quarters have: a Hopper GPU waits for ever for more.
    cta.registers_free = [0] * QUARTERS
    for index in range(grid.warp_count):
        lanes = min(32, grid.thread_count - 32 * index)
        warp = Warp(cta, index, FULL_MASK >> (32 - lanes))
        warp.register_budget = budget
        cta.warps.append(warp)
        _set_specials(warp)
        fragment = Fragment(warp, 0, warp.alive)
        warp.fragments.append(fragment)
        machine.ready.append(fragment)


def _registers_per_thread(grid: Grid) -> int:
    """What the compiler may use: .maxnreg, or an even share of a quarter, at most 255.

    A multiple of 8 (the allocation's granularity). ptxas gives no more than the largest number that
    a setmaxnreg names (13.5: 128, 256 and 384 threads with setmaxnreg.inc 80, 120, 240).
    """
    listed = grid.program.kernel.directives.get("maxnreg")
    if listed:
        return listed[0]
    warps = -(-grid.warp_count // QUARTERS) * QUARTERS
    most = min(255, REGISTERS_PER_SM // (32 * warps), grid.program.most_named_registers)
    return most // 8 * 8


def _set_specials(warp: Warp) -> None:
    cta, grid, launch = warp.cta, warp.cta.grid, warp.cta.grid.launch
    place, inner = cta.position
    threads = np.arange(32 * warp.index, 32 * warp.index + 32, dtype=np.uint32)
    x, y, _ = (np.uint32(size) for size in launch.block)
    warp.set_special("%tid.x", threads % x)
    warp.set_special("%tid.y", threads // x % y)
    warp.set_special("%tid.z", threads // (x * y))
    triples = {
        "ntid": launch.block,
        "ctaid": place,
        "nctaid": launch.grid,
        "clusterid": grid.cluster_position(cta.cluster.index),
        "nclusterid": grid.cluster_grid,
        "cluster_ctaid": inner,
        "cluster_nctaid": launch.cluster,
    }
    for name, values in triples.items():
        for axis, value in zip("xyz", values, strict=True):
            warp.set_special(f"%{name}.{axis}", value)
    lane = np.arange(32, dtype=np.uint64)
    at = np.uint64(1) << lane
    singles: dict[str, Array | int] = {
        "%laneid": lane,
        "%lanemask_eq": at,
        "%lanemask_lt": at - np.uint64(1),
        "%lanemask_le": 2 * at - np.uint64(1),
        "%lanemask_gt": np.uint64(FULL_MASK) - (2 * at - np.uint64(1)),
        "%lanemask_ge": np.uint64(FULL_MASK) - (at - np.uint64(1)),
        "%warpid": warp.index,
        "%nwarpid": grid.warp_count,
        "%smid": cta.index % grid.machine.options.clusters_limit,
        "%nsmid": grid.machine.options.clusters_limit,
        "%cluster_ctarank": cta.rank,
        "%cluster_nctarank": grid.cluster_size,
        "%is_explicit_cluster": int(grid.cluster_size > 1),
        "%dynamic_smem_size": launch.dynamic_smem_bytes,
        # In units of 128 bytes; the second with what the system keeps (seen on an H200).
        "%total_smem_size": -(-(cta.shared_end - SHARED_BASE) // 128) * 128,
        "%aggr_smem_size": -(-cta.shared_end // 128) * 128,
        "%gridid": grid.number,
    }
    for name, number in singles.items():
        warp.set_special(name, number)


# Ending.


def warp_exited(warp: Warp) -> None:
    """A warp is done; perhaps its CTA and its cluster are."""
    cta = warp.cta
    cta.exited += 1
    cta.grid.add_counts(warp)
    check_warp_exit(warp)
    for barrier in cta.barriers.values():
        barrier.leave(cta.live_threads)
    threads, arrived_in = warp.threads.bit_count(), warp.cluster_visits.arrived_in
    if cta.cluster.barrier.leave(threads, arrived_in):
        cta.machine.progress += 1
    if cta.done:
        _cta_exited(cta)


def _cta_exited(cta: Cta) -> None:
    grid = cta.grid
    grid.ctas_done += 1
    if not cta.triggered:
        trigger(cta)
    check_cta_exit(cta)
    if not cta.cluster.done:
        return
    grid.resident.remove(cta.cluster)
    start_next(grid)
    if grid.done and grid.follower is not None:
        _prior_finished(grid.follower)


def count_running(grid: Grid) -> None:
    """Adds the steps of warps that a finding stopped before their end."""
    for cluster in grid.resident:
        for cta in cluster.ctas:
            for warp in cta.warps:
                if warp.alive:
                    grid.add_counts(warp)
    grid.resident = []


def trigger(cta: Cta) -> None:
    """griddepcontrol.launch_dependents by a CTA (or its end)."""
    grid = cta.grid
    if not cta.triggered:
        cta.triggered = True
        grid.triggered += 1
        cta.machine.progress += 1
    follower = grid.follower
    if grid.all_triggered and follower is not None and not follower.resident:
        start(follower)


def _prior_finished(grid: Grid) -> None:
    """The launch before is over: waits for it end."""
    if not grid.resident:
        start(grid)
    for cluster in grid.resident:
        for cta in cluster.ctas:
            cta.prior_waiters.wake()


def take_cluster(grid: Grid) -> int | None:
    """clusterlaunchcontrol.try_cancel: a cluster that has not started, or None."""
    if grid.started == grid.cluster_count:
        return None
    grid.ctas_done += grid.cluster_size  # they will never run
    grid.triggered += grid.cluster_size
    grid.started += 1
    return grid.started - 1
