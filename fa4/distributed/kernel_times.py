"""How long a rank's kernels take: attention of a block, merges and copies of its parts.

A block's time is simulated (`SimulatedBlocks`: the kernel of this package on a machine that
`fa4.sim` knows) or follows from a measured rate (`RatedBlocks`: anybody's kernel). What is neither
is memory traffic, counted from what `execute` reads and writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from fa4.config import require
from fa4.distributed.blocks import Block, SequenceMask, make_blocks
from fa4.distributed.plan import Sizes

TILE = 128  # rows and keys that a kernel computes at once, as far as rounding goes
MOST_ROWS, MOST_KEYS = 1 << 15, 1 << 16  # simulated; of more, a part stands for all
FLOPS_PER_PAIR = {False: 2.0, True: 5.0}  # times (head_dim + head_dim_v): 2 and 5 products
MERGES = ("fused", "eager")
# Of attention backward on an H200 beside the sequence's own rate, 16,384 tokens, 16 heads of 128:
# lab/hardware/results/warpgroup_backward.json, whose kernels the simulator predicts 15% too fast.
HOPPER_BACKWARD_FLOPS = {"whole": 629e12, "banded": 628e12}


class BlockTimes(Protocol):
    """Who computes blocks, how fast."""

    def seconds(self, block: Block, heads_q: int, heads_k: int, backward: bool) -> float:
        """Of one call."""


@dataclass(frozen=True)
class RatedBlocks:
    """Pairs over a rate, in FLOP/s: "whole" blocks, and "banded" ones (causal, windows).

    backward: the same of the backward pass, for plans that have one.
    """

    sizes: Sizes
    forward: Mapping[str, float]
    backward: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, block: Block, heads_q: int, heads_k: int, backward: bool) -> float:
        """Of one call."""
        rates = self.backward if backward else self.forward
        flops = FLOPS_PER_PAIR[backward] * block.pairs * heads_q * self.sizes.batch
        flops *= self.sizes.head_dim + self.sizes.head_dim_v
        return flops / rates["whole" if block.is_whole else "banded"]


@dataclass(frozen=True)
class SimulatedBlocks:
    """This package's kernel on a machine of `fa4 machines`, one simulation for each shape.

    settings: of `fa4 predict`, as text. Hopper's backward pass goes at its measured rate.
    """

    sizes: Sizes
    machine: str
    settings: Mapping[str, object] = field(default_factory=dict)
    known: dict[Any, float] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        """ValueError for elements that no kernel has."""
        allowed = (1, 2)
        require(self.sizes.item_bytes in allowed, "item_bytes must be 1 or 2",
                self.sizes.item_bytes)  # fmt: skip

    def seconds(self, block: Block, heads_q: int, heads_k: int, backward: bool) -> float:
        """Of one call."""
        rows, keys = block.shape
        shape = rounded(block)
        if not shape.pairs:
            return 0.0
        key = (shape.shape, shape.window, heads_q, heads_k, backward)
        if key not in self.known:
            self.known[key] = self._simulate(shape, heads_q, heads_k, backward)
        small = max(rows, keys) <= MOST_ROWS and rows * keys <= TILE**2
        return self.known[key] * (1.0 if small else block.pairs / shape.pairs)

    def _simulate(self, shape: Block, heads_q: int, heads_k: int, backward: bool) -> float:
        from fa4.sim.options import build
        from fa4.sim.predict import call_seconds

        rows, keys = shape.shape
        settings: dict[str, object] = {
            "machine": self.machine, "seqlen_q": rows, "seqlen_k": keys, "heads_q": heads_q,
            "heads_k": heads_k, "head_dim": self.sizes.head_dim,
            "head_dim_v": self.sizes.head_dim_v, "batch": self.sizes.batch,
            "dtype": "bf16" if self.sizes.item_bytes == 2 else "e4m3", **self.settings,
        }  # fmt: skip
        if shape.window == (None, 0):
            settings["causal"] = True
        elif not shape.is_whole:
            settings["window"] = shape.window
        if backward:
            if _is_hopper(self.machine):
                rated = RatedBlocks(self.sizes, {}, HOPPER_BACKWARD_FLOPS)
                return rated.seconds(shape, heads_q, heads_k, True)
            settings["pass"] = "bwd"
        request = build(settings)
        return call_seconds(request.problem, request.pipeline, request.machine, request.simulation)


def _is_hopper(machine: str) -> bool:
    from fa4.sim.machine import find_machine

    return find_machine(machine).gpu.arch == "sm_90a"


def rounded(block: Block) -> Block:
    """A block of few shapes that stands for others: whole tiles, sizes of four binary digits.

    Long sides are halved until they can be simulated; what a pair takes hardly changes by that.
    """
    rows, keys = (_round(x) for x in block.shape)
    low, high = block.low, block.high
    square = block.window == (None, 0) and block.shape[0] == block.shape[1]
    if square:
        while rows > MOST_ROWS:
            rows //= 2
        return Block((range(rows),), (range(rows),), None, 0)
    while rows > MOST_ROWS and (block.is_whole or rows > 4 * TILE):
        rows, keys = (rows // 2, keys) if block.is_whole else (rows // 2, max(TILE, keys // 2))
    while keys > MOST_KEYS:
        keys //= 2
    left, right = block.window
    apart = keys - rows
    if not block.is_whole:
        low = None if left is None else apart - left
        high = None if right is None else apart + right
    return Block((range(rows),), (range(keys),), low, high)


def _round(size: int) -> int:
    """Up to tiles, and of more than 16 tiles to a sixteenth of the next power of two."""
    step = max(TILE, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step


def one_gpu_seconds(blocks: BlockTimes, mask: SequenceMask, sizes: Sizes, backward: bool) -> float:
    """The same call on one GPU that has all rows and keys."""
    rows = (range(mask.documents[-1]),)
    return sum(
        blocks.seconds(block, sizes.heads_q, sizes.heads_k, backward)
        for block in make_blocks(rows, rows, mask)
    )


# Of HBM's rate, by a kernel that reads and writes: flash-attn-4's post-process kernel on an H200
# (fp32 in, 16 bit out) moves 181 MB in 47.0 us, Nsight Compute; taken for other machines as well.
MEMORY_SHARE = 0.80
EAGER_KERNELS = 10  # of a merge an operator at a time, those of LSE included


@dataclass(frozen=True)
class MemoryTimes:
    """Kernels that HBM bounds: bytes over what it attains, and a launch.

    merge: "fused" reads both parts and writes one (`merging`); "eager" is written with operators,
    in fp32: each part widened, two products, a sum.
    """

    bytes_per_s: float
    merge: str = "fused"
    launch_s: float = 3e-6  # from one kernel to the next on a stream: assumed

    def __post_init__(self) -> None:
        """Check the name."""
        require(self.merge in MERGES, f"merge must be one of {', '.join(MERGES)}", self.merge)

    @property
    def is_eager(self) -> bool:
        """Are merges written with operators?"""
        return self.merge == "eager"

    def seconds(self, num_bytes: float, kernels: int = 1) -> float:
        """Of so many kernels, or of none."""
        return num_bytes / self.bytes_per_s + kernels * self.launch_s if num_bytes else 0.0

    def merge_bytes(self, wide: bool, item_bytes: int) -> int:
        """Of an element of O, merged into one of fp32 (wide) or of the type of q."""
        into = 4 if wide else item_bytes
        if self.is_eager:
            return (item_bytes + 4) + 2 * (4 + 4) + (4 + 4 + 4)
        return 2 * into + item_bytes


def memory_of(machine: str, merge: str = "fused") -> MemoryTimes:
    """Of a machine of `fa4 machines`."""
    from fa4.sim.machine import find_machine

    return MemoryTimes(find_machine(machine).gpu.hbm_bytes_per_s * MEMORY_SHARE, merge)
