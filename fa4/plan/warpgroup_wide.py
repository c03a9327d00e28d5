"""Backward kernels before tensor memory for wide heads: one of dK and dV, and one of dQ.

Beyond 128 columns the sums of one kernel do not fit: with 64 keys and 256 columns, dK and dV take
256 registers of a warpgroup's threads, where 240 are left of 255. And dQ, added up in memory by all
CTAs of a sequence, asks for 4 bytes of L2 per 2.5 x 64 operations. So two kernels compute S and dP
each, seven products instead of five, and no sum leaves its CTA; the order of sums is always the
same.

    `warpgroup_wide_keys`     64 keys stay, query tiles pass.
        values  S = K Q^T, P; dV += P^T dO        P goes to the other warpgroup
        keys    dP = V dO^T, dS; dK += dS^T Q     through shared memory
    `warpgroup_wide_queries`  128 queries stay, 64 for each warpgroup, KV tiles pass.
        S = Q K^T    dP = dO V^T    dQ += dS K, dS from registers

The ledger at 256 columns, of a step (registers are those of a thread, KiB of shared memory, cycles
those that tensor core and shared memory take at 4096 operations and 128 bytes a cycle):

                  registers                        KiB                              tensor  memory
    keys kernel   dK 128 + dP 32 + P 16 + dS 16    Q, dO 4 x 32, K, V 64, P 2 x 16  2048    2304
    dQ kernel     dQ 128 + S 32 + dP 32 + dS 16    Q, dO 128, K 2 x 32, V 32        3072    3072

A step is 64 x 64 pairs in the first and 128 x 64 in the second. A warpgroup with half of the
columns of dK and dV for itself would hold 128 + 2 x 32 registers too, but compute S and dP twice;
to exchange halves of S and dP takes twice the memory cycles that P does.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa4.config import WARPGROUP_ROWS, require, require_int
from fa4.plan.schema import Arrive, Copy, Mma, Program, SmemAccess, Sync, Work
from fa4.plan.warpgroup_code import unpacked
from fa4.plan.work import WARPGROUP, mma

CONSUMERS = 2
MOST_LIVE = 228  # registers; with 235 ptxas waits for each instruction of a product
RELEASES = 4  # arrivals of a warpgroup that has used a slot: one lane of each warp
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24
ADDRESS_REGISTERS = 15
BARRIER_BYTES = 8 * 32
FLOAT_BYTES = 4
LOAD_WARP = CONSUMERS * WARPGROUP // 32
COLS_UNIT, DEPTH = 8, 16  # of a product's columns, and of what it sums over
TILE_ROWS = WARPGROUP_ROWS  # queries of a tile of the keys' kernel, as of a warpgroup's keys


@dataclass(frozen=True, kw_only=True)
class WideBackwardPipeline:
    """The two kernels. Head dimensions are those of the tiles in shared memory.

    cols, cols_v: of these columns, those that a head has, all for None. q_stages, do_stages:
    places for Q and dO in the kernel of dK and dV. tile_n: keys of a tile of the dQ kernel.
    k_stages, v_stages: places for K, two or three, and V there.
    """

    head_dim: int = 256
    head_dim_v: int = 256
    cols: int | None = None
    cols_v: int | None = None
    element_bytes: int = 2
    causal: bool = False
    q_stages: int = 2
    do_stages: int = 2
    tile_n: int = 64
    k_stages: int = 2
    v_stages: int = 1

    def __post_init__(self) -> None:
        """Check ranges."""
        for name, most in (
            ("head_dim", 256), ("head_dim_v", 256),
            ("cols", self.head_dim), ("cols_v", self.head_dim_v),
        ):  # fmt: skip
            value, unit = getattr(self, name), COLS_UNIT if name.startswith("cols") else DEPTH
            if value is not None:
                require_int(name, value, unit, most)
                require(value % unit == 0, f"{name} must be a multiple of {unit}", value)
        require(self.element_bytes == 2, "element_bytes must be 2", self.element_bytes)
        require_int("tile_n", self.tile_n, 16, 128)
        require(self.tile_n % 16 == 0, "tile_n must be a multiple of 16", self.tile_n)
        for name in ("q_stages", "do_stages", "v_stages"):
            require_int(name, getattr(self, name), 1, 3)
        require_int("k_stages", self.k_stages, 2, 3)

    @property
    def sum_dims(self) -> tuple[int, int]:
        """Columns of dQ and dK, and of dV."""
        return self.cols or self.head_dim, self.cols_v or self.head_dim_v

    @property
    def depths(self) -> tuple[int, int]:
        """Columns of Q and K, and of dO and V, over which S and dP sum: some may hold zeros."""
        d, dv = (-(-dim // DEPTH) * DEPTH for dim in self.sum_dims)
        return d, dv

    def row_bytes(self, value: bool) -> int:
        """Of a row of V or dO, or else of Q or K."""
        return (self.head_dim_v if value else self.head_dim) * self.element_bytes


def product(
    pipeline: WideBackwardPipeline, cols: int, depth: int, *, from_registers: bool = False
) -> Mma:
    """A warpgroup's 64 rows x cols x depth."""
    return mma(WARPGROUP_ROWS, cols, depth, element_bytes=pipeline.element_bytes,
               a_in_tmem=from_registers, in_registers=True)  # fmt: skip


def start(what: str, amount: Mma, reads: tuple[str, ...]) -> Program:
    """A product, and what arrives when it is done."""
    done = Arrive(f"{what}_done", after="tensor")
    return Work(what, amount, asynchronous=True, reads=reads), done


def store(pipeline: WideBackwardPipeline, what: str, dim: int, place: str, done: str) -> Program:
    """A warpgroup's gradient by way of shared memory that nobody reads any more."""
    num_bytes = WARPGROUP_ROWS * dim * pipeline.element_bytes
    return (
        Work(f"scale {what}", unpacked(fma=dim / 2, alu=dim / 4)),
        Work(f"write {what}", SmemAccess(num_bytes=num_bytes), writes=(place,)),
        Work(f"show {what}", Sync(fenced=True)),
        Work(f"store {what}", Copy(kind="store", num_bytes=num_bytes), asynchronous=True,
             reads=(place,)),
        Arrive(done, after="tma"),
    )  # fmt: skip
