"""What to run and how: frozen descriptions that every part of the package reads.

`Problem` is the shape of one attention call. `ForwardConfig` and `BackwardConfig` are the choices a
kernel makes for it: tiles, rescaling threshold, share of software exponentials, order of sums.
Each validates itself on construction and says the rule and the number that broke it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

Window = tuple[int | None, int | None]

DTYPE_BITS = {"fp32": 32, "fp64": 64, "bf16": 16, "fp16": 16, "e4m3": 8, "e5m2": 8}

# log2 of the largest finite value: what the row maximum of P may reach (offset + threshold).
DTYPE_MAX_LOG2 = {
    "fp64": math.log2(1.7976931348623157e308),
    "fp32": math.log2(3.4028234663852886e38),
    "bf16": math.log2(3.3895313892515355e38),
    "fp16": math.log2(65504.0),
    "e4m3": math.log2(448.0),
    "e5m2": math.log2(57344.0),
}

FRAGMENT_COLS = 32  # columns of a row of scores that are read from tensor memory at once
MOST_FRAGMENTS = 8  # of the widest tile, 256 columns

WARP_ROWS = 32  # rows of a tile that one warp owns: one thread per row
WARPGROUP_ROWS = 64  # of wgmma, the tensor core instruction of a Hopper warpgroup
PRODUCT_DEPTH_BYTES = 32  # of both operands that one tensor core instruction multiplies and sums


def require(condition: bool, rule: str, value: object) -> None:
    """Raise ValueError "<rule>; got <value>" unless `condition` holds."""
    if not condition:
        raise ValueError(f"{rule}; got {value!r}")


def require_int(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raise TypeError/ValueError unless `value` is an integer in [least, most]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer; got {value!r}")
    limit = f"at least {least}" if most is None else f"between {least} and {most}"
    require(value >= least and (most is None or value <= most), f"{name} must be {limit}", value)


def _require_one_of(owner: object, **choices: tuple[str, ...]) -> None:
    """Raise ValueError unless each named field is one of the words for it."""
    for name, allowed in choices.items():
        value = getattr(owner, name)
        require(value in allowed, f"{name} must be one of {', '.join(allowed)}", value)


def require_finite(name: str, value: object, least: float | None = None) -> None:
    """Raise TypeError/ValueError unless `value` is a finite real number, at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number; got {value!r}")
    require(math.isfinite(value), f"{name} must be finite", value)
    require(least is None or value >= least, f"{name} must be at least {least}", value)


def normalize_window(window_size: object, causal: bool = False) -> Window:
    """(left, right) with None for "unbounded".

    FlashAttention 2 and 3 write -1 for "unbounded" and FlashAttention 4 writes None; both are
    accepted. Any other negative number is a real offset: key j is visible to query i iff
    i + Sk - Sq - left <= j <= i + Sk - Sq + right. `causal` makes right 0 whatever it was, as in
    FlashAttention, in every implementation. A window with left + right < 0 would hide every key,
    so it is refused.
    """
    if type(window_size) is tuple and window_size == (None, None):  # by far the most
        return None, 0 if causal else None
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size must be a pair (left, right); got {window_size!r}")
    sides: list[int | None] = []
    for name, side in zip(("left", "right"), window_size, strict=True):
        if side is not None and (isinstance(side, bool) or not hasattr(side, "__index__")):
            raise TypeError(f"window_size {name} must be an integer or None; got {side!r}")
        value = None if side is None else int(side)
        sides.append(None if value == -1 else value)
    left, right = sides
    if causal:
        right = 0
    if left is not None and right is not None and left + right < 0:
        raise ValueError(
            f"window_size must satisfy left + right >= 0, or no key is visible; "
            f"got left {left} and right {right}"
        )
    return left, right


def _fill_head_dim_v(sizes: Any) -> None:
    """V's head dimension is K's where none is given; so it is an int wherever it is read."""
    if sizes.head_dim_v is None:
        object.__setattr__(sizes, "head_dim_v", sizes.head_dim)


def sum_clipped(first: int, count: int, most: int) -> int:
    """Sum of `count` integers from `first` on, each clipped to 0 ... most."""

    def below(end: int) -> int:
        inner, over = min(max(end, 0), most), max(end - most, 0)
        return inner * (inner - 1) // 2 + over * most

    return below(first + count) - below(first)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One attention call: (batch, seqlen, heads, head_dim) sizes, element type and mask."""

    batch: int = 1
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int = None  # type: ignore[assignment]  # None: head_dim
    dtype: str = "bf16"
    causal: bool = False
    window_size: Window = (None, None)

    def __post_init__(self) -> None:
        """Check every size; fill head_dim_v with head_dim where it is None."""
        _fill_head_dim_v(self)
        for name in ("batch", "seqlen_q", "seqlen_k"):
            require_int(name, getattr(self, name), 0)
        for name in ("heads_q", "heads_k"):
            require_int(name, getattr(self, name), 1)
        for name in ("head_dim", "head_dim_v"):
            require_int(name, getattr(self, name), 1, 1024)
        if self.heads_q % self.heads_k:
            raise ValueError(
                f"heads_q must be a multiple of heads_k; got {self.heads_q} and {self.heads_k}"
            )
        require(self.dtype in DTYPE_BITS, f"dtype must be one of {list(DTYPE_BITS)}", self.dtype)
        object.__setattr__(self, "window_size", normalize_window(self.window_size, self.causal))

    @property
    def forward_flops(self) -> int:
        """2 (d + dv) per visible pair, query head and batch entry.

        As in the paper, a causal mask counts half of the pairs; a window counts those it shows.
        """
        dims = self.head_dim + self.head_dim_v
        if self.window_size in ((None, None), (None, 0)):
            pairs = self.seqlen_q * self.seqlen_k
            full = 2 * self.batch * self.heads_q * pairs * dims
            return full // 2 if self.window_size[1] == 0 else full
        return 2 * self.batch * self.heads_q * self.visible_pairs * dims

    @property
    def visible_pairs(self) -> int:
        """(query, key) pairs that the window shows, in one head of one batch entry."""
        left, right = self.window_size
        start = self.seqlen_k - self.seqlen_q  # the first row's diagonal; each row's is one more
        rows, keys = self.seqlen_q, self.seqlen_k
        hidden = 0 if left is None else sum_clipped(start - left, rows, keys)
        return (
            rows * keys if right is None else sum_clipped(start + right + 1, rows, keys)
        ) - hidden

    @property
    def backward_flops(self) -> int:
        """2.5 times the forward count: five matrix products instead of two."""
        return self.forward_flops * 5 // 2


@dataclass(frozen=True, kw_only=True)
class Exp2Split:
    """Which exponentials of a row run as a polynomial on the FMA units instead of on MUFU.

    A row of tile_n columns is cut into fragments of 32. In a fragment, the pair (k, k+1) with even
    k is emulated iff k mod frequency >= frequency - residue; the last fragment and those before
    `start_fragment` stay on MUFU. frequency 0 means no emulation.
    """

    frequency: int = 0
    residue: int = 4
    start_fragment: int = 0
    degree: int = 3

    def __post_init__(self) -> None:
        """Check ranges: a residue above the frequency would emulate every pair silently."""
        require_int("frequency", self.frequency, 0, FRAGMENT_COLS)
        require_int("residue", self.residue, 0, FRAGMENT_COLS)
        if self.frequency and self.residue > self.frequency:
            raise ValueError(
                f"residue must be at most the frequency, {self.frequency}; got {self.residue}"
            )
        require_int("start_fragment", self.start_fragment, 0, MOST_FRAGMENTS)
        require_int("degree", self.degree, 1, 5)

    def emulated_columns(self, tile_n: int) -> tuple[bool, ...]:
        """For each of tile_n columns: does the polynomial compute its exponential?"""
        fragments = -(-tile_n // FRAGMENT_COLS)
        flags = []
        for column in range(tile_n):
            fragment, pair = column // FRAGMENT_COLS, column % FRAGMENT_COLS & ~1
            flags.append(
                self.frequency > 0
                and self.start_fragment <= fragment < fragments - 1
                and pair % self.frequency >= self.frequency - self.residue
            )
        return tuple(flags)

    def share(self, tile_n: int) -> float:
        """Emulated fraction of a row of tile_n columns."""
        return sum(self.emulated_columns(tile_n)) / tile_n


# (head_dim class, causal) -> split used on B200: the tuning table of flash-attn-4's forward kernel.
TUNED_EXP2 = {
    (128, False): Exp2Split(frequency=10, start_fragment=1),
    (128, True): Exp2Split(frequency=16, start_fragment=1),
    (192, False): Exp2Split(frequency=16, start_fragment=0),
    (192, True): Exp2Split(frequency=32, start_fragment=1),
    (256, False): Exp2Split(frequency=14, residue=6),
    (256, True): Exp2Split(frequency=14, residue=6),
}
# Kernel -> its own, of a search's leaders (docs/design.md).
OWN_EXP2 = {"halves": Exp2Split(frequency=8)}


@dataclass(frozen=True, kw_only=True)
class ForwardConfig:
    """How the forward kernel walks a problem.

    tile_m, tile_n: rows of one Q tile and of one KV tile; q_tiles: Q tiles per CTA (ping-pong).
    rescale_threshold_log2: tau; O is rescaled only when the row maximum rose by more than this
    many powers of two (0 = whenever it rose). rescale_rows: rows that take that decision together,
    1 (each thread its own) or 32 (a warp). p_offset_log2: P is multiplied by 2^offset (FP8: 8).
    num_splits: parts of the KV sequence computed apart and combined. kernel: of several compiled
    ones, by its name (`fa4 predict --kernel`); "" for the machine's first.
    """

    tile_m: int = 128
    tile_n: int = 128
    q_tiles: int = 2
    rescale_threshold_log2: float = 8.0
    rescale_rows: int = 1
    p_offset_log2: float = 0.0
    exp2: Exp2Split = field(default_factory=Exp2Split)
    num_splits: int = 1
    kernel: str = ""

    def __post_init__(self) -> None:
        """Check ranges and types."""
        require_int("tile_m", self.tile_m, 1)
        require_int("tile_n", self.tile_n, 1)
        require_int("q_tiles", self.q_tiles, 1, 2)
        require_int("num_splits", self.num_splits, 1, 256)
        require_finite("rescale_threshold_log2", self.rescale_threshold_log2, 0.0)
        require_finite("p_offset_log2", self.p_offset_log2, 0.0)
        require(
            self.rescale_rows in (1, WARP_ROWS),
            f"rescale_rows must be 1 (per row) or {WARP_ROWS} (per warp)",
            self.rescale_rows,
        )

    def check_dtype(self, dtype: str) -> None:
        """Refuse an offset and threshold that would push the largest P beyond the element type.

        If 2^(offset + tau) exceeded it, P would saturate in the product while the row sum still
        counted it in full, and the output would shrink.
        """
        reach = self.p_offset_log2 + self.rescale_threshold_log2
        if reach >= DTYPE_MAX_LOG2[dtype]:
            raise ValueError(
                f"p_offset_log2 + rescale_threshold_log2 must be below log2(largest {dtype}) = "
                f"{DTYPE_MAX_LOG2[dtype]:.3f}; got {self.p_offset_log2} + "
                f"{self.rescale_threshold_log2} = {reach}"
            )

    @classmethod
    def tuned(cls, dtype: str, head_dim: int, causal: bool, kernel: str = "") -> ForwardConfig:
        """The choices FlashAttention-4 makes for an element type, head dim and mask, or `kernel`.

        bf16/fp16: tau 8 and the tuned share of emulated exponentials. FP8: tau 0, offset 8.
        fp32/fp64 (no such kernel): no emulation, whose 8.8e-5 only vanishes in 16 bits.
        """
        if dtype in ("fp32", "fp64"):
            return cls()
        if dtype in ("e4m3", "e5m2"):
            split = Exp2Split(frequency=8 if causal else 10, start_fragment=1)
            return cls(rescale_threshold_log2=0.0, p_offset_log2=8.0, exp2=split)
        padded = 128 if head_dim <= 128 else 192 if head_dim <= 192 else 256
        return cls(exp2=OWN_EXP2.get(kernel, TUNED_EXP2[(padded, causal)]), kernel=kernel)


@dataclass(frozen=True, kw_only=True)
class BackwardConfig:
    """How the backward kernel walks a problem.

    dq_order: the order in which KV tiles add their part to a dQ tile: "ascending" or "descending"
    (deterministic), or "random" (CTAs commit as they finish; `seed` draws one interleaving).
    cta_group 2: pairs of CTAs exchange halves of dS and reduce dQ over both KV tiles at once.
    """

    tile_m: int = 128
    tile_n: int = 128
    dq_order: str = "ascending"
    seed: int = 0
    cta_group: int = 1

    def __post_init__(self) -> None:
        """Check ranges and types."""
        require_int("tile_m", self.tile_m, 1)
        require_int("tile_n", self.tile_n, 1)
        require_int("seed", self.seed, 0)
        require_int("cta_group", self.cta_group, 1, 2)
        orders = ("ascending", "descending", "random")
        require(self.dq_order in orders, f"dq_order must be one of {orders}", self.dq_order)
        if self.cta_group == 2:
            require(self.tile_m % 2 == 0, "tile_m must be even with cta_group 2", self.tile_m)


@dataclass(frozen=True, kw_only=True)
class ForwardPipeline:
    """Everything that shapes a forward kernel's pipeline, beside the arithmetic of `numerics`.

    cta_group 2: CTA pairs share B operands. kv_stages None: as many as shared memory holds.
    ping_pong: the tensor core alternates between the two Q tiles (PV0, QK0, PV1, QK1).
    correction "warpgroup": O is rescaled by its own warps, "inline" by the softmax warps.
    p_space: where P waits for the second product. split_p: part of P after which it may start.
    scheduler: "static" (persistent), "lpt", "clc" or "naive". published: with the registers of
    flash_attn.cute, not this package's.
    """

    head_dim: int = 128
    head_dim_v: int = None  # type: ignore[assignment]  # None: head_dim
    element_bytes: int = 2
    causal: bool = False
    numerics: ForwardConfig = field(default_factory=ForwardConfig)
    cta_group: int = 1
    kv_stages: int | None = None
    ping_pong: bool = True
    correction: str = "warpgroup"
    p_space: str = "tmem"
    split_p: float = 0.75
    scheduler: str = "static"
    published: bool = False

    def __post_init__(self) -> None:
        """Check ranges; fill head_dim_v with head_dim where it is None."""
        _fill_head_dim_v(self)
        for name in ("head_dim", "head_dim_v"):
            require_int(name, getattr(self, name), 8, 512)
            require(getattr(self, name) % 8 == 0, f"{name} must be a multiple of 8",
                    getattr(self, name))  # fmt: skip
        require(self.element_bytes in (1, 2), "element_bytes must be 1 or 2", self.element_bytes)
        require_int("cta_group", self.cta_group, 1, 2)
        if self.kv_stages is not None:
            require_int("kv_stages", self.kv_stages, 2, 32)
        _require_one_of(self, correction=("warpgroup", "inline"), p_space=("tmem", "smem"),
                        scheduler=("static", "lpt", "clc", "naive"))  # fmt: skip
        require_finite("split_p", self.split_p)
        require(0.0 < self.split_p <= 1.0, "split_p must be in (0, 1]", self.split_p)

    @property
    def tile_n(self) -> int:
        """Keys of a KV tile."""
        return self.numerics.tile_n

    @property
    def num_splits(self) -> int:
        """Parts of the KV sequence that different CTAs compute."""
        return self.numerics.num_splits

    @property
    def block_rows(self) -> int:
        """Query rows of a work tile, of both CTAs in a pair."""
        return self.numerics.tile_m * self.numerics.q_tiles * self.cta_group


@dataclass(frozen=True, kw_only=True)
class BackwardPipeline:
    """Everything that shapes a backward kernel's pipeline.

    `numerics` holds tile sizes, CTA group. deterministic: CTAs add to a dQ tile in a fixed order.
    scheduler: "naive", "lpt" or "spt" (shortest first). published: flash_attn.cute's kernel.
    """

    head_dim: int = 128
    head_dim_v: int = None  # type: ignore[assignment]  # None: head_dim
    element_bytes: int = 2
    causal: bool = False
    numerics: BackwardConfig = field(default_factory=BackwardConfig)
    deterministic: bool = False
    scheduler: str = "naive"
    published: bool = False

    def __post_init__(self) -> None:
        """Check ranges; fill head_dim_v with head_dim where it is None."""
        _fill_head_dim_v(self)
        for name in ("head_dim", "head_dim_v"):
            require_int(name, getattr(self, name), 16, 256)
            require(getattr(self, name) % 16 == 0, f"{name} must be a multiple of 16",
                    getattr(self, name))  # fmt: skip
        require(self.element_bytes == 2, "element_bytes must be 2", self.element_bytes)
        _require_one_of(self, scheduler=("naive", "lpt", "spt"))


@dataclass(frozen=True, kw_only=True)
class WarpgroupPipeline:
    """A forward kernel before tensor memory: consumer warpgroups that hold S and O in registers.

    consumers: warpgroups of 64 query rows each, tile_m / 64. overlap: a warpgroup starts the next S
    before this tile's P V, whose products its softmax runs under. ping_pong: warpgroups take turns
    at the tensor core; None leaves it to `takes_turns`. Both off is a serial kernel. p_source: P
    enters P V from "registers", or through "smem". emulated: share of the exponentials that a
    polynomial computes. ahead: a CTA starts the first S of its next work tile before it stores this
    one's O, with overlap and where O does not lie over Q. promote: after so many KV tiles O is
    added to what is held of it elsewhere and starts from zero; 0 for never. published:
    flash_attn.cute's code, not this package's. num_splits: parts of the KV sequence that different
    CTAs compute; if 2 or more, their O leaves registers as float32. columns: that rows of Q and K,
    and of V and O, have in shared memory; None for as many as are multiplied. direct: O goes from
    registers to global memory, as what is held. packed: query heads that share a tile's rows.
    """

    head_dim: int = 128
    head_dim_v: int = None  # type: ignore[assignment]  # None: head_dim
    element_bytes: int = 2
    causal: bool = False
    tile_n: int = 128
    consumers: int = 2
    kv_stages: int = 2
    ping_pong: bool | None = None
    overlap: bool = True
    p_source: str = "registers"
    scheduler: str = "static"
    emulated: float = 0.0
    ahead: bool = False
    promote: int = 0
    published: bool = False
    num_splits: int = 1
    columns: tuple[int, int] | None = None
    direct: bool = False
    packed: int = 1

    def __post_init__(self) -> None:
        """Check ranges; fill head_dim_v with head_dim where it is None."""
        _fill_head_dim_v(self)
        require_int("head_dim", self.head_dim, 8, 256)
        require_finite("emulated", self.emulated, 0.0)
        require(self.emulated <= 1.0, "emulated must be at most 1", self.emulated)
        require(self.element_bytes in (1, 2), "element_bytes must be 1 or 2", self.element_bytes)
        require_int("tile_n", self.tile_n, 16, 256)
        depth = PRODUCT_DEPTH_BYTES // self.element_bytes
        rule = f"tile_n must be a multiple of {depth}, the keys that one instruction of P V takes"
        require(self.tile_n % depth == 0, rule, self.tile_n)
        for name, most in (("num_splits", 256), ("consumers", 3), ("kv_stages", 32)):
            require_int(name, getattr(self, name), 1, most)
        _require_one_of(self, p_source=("registers", "smem"),
                        scheduler=("static", "lpt", "naive", "queue"))  # fmt: skip
        require_int("promote", self.promote, 0, 1024)
        if self.promote and not (self.overlap and self.transposes):
            raise ValueError("promote needs overlap, and 8-bit operands of our own kernel")
        if self.ping_pong and self.consumers < 2:
            raise ValueError("ping_pong needs at least 2 consumers; got 1")

    @property
    def widths(self) -> tuple[int, int]:
        """Columns of Q and K, and of V and O, in shared memory."""
        return self.columns or (self.head_dim, self.head_dim_v)

    @property
    def stages_output(self) -> bool:
        """Does O pass through shared memory?"""
        return self.num_splits == 1 and not self.direct

    @property
    def transposes(self) -> bool:
        """Is V transposed in shared memory? Products of 8-bit types read K-major operands only."""
        return self.element_bytes == 1 and not self.published

    @property
    def output_bytes(self) -> int:
        """Of an element of O: 2 for 8-bit operands."""
        return 2 if self.transposes else self.element_bytes

    @property
    def takes_turns(self) -> bool:
        """Do the warpgroups take turns? Where `ping_pong` does not say: as others choose."""
        several = self.consumers > 1 and self.head_dim <= 128
        chosen = several if self.overlap else self.consumers == 2
        return chosen if self.ping_pong is None else self.ping_pong

    @property
    def cta_group(self) -> int:
        """CTAs that work together: one."""
        return 1

    @property
    def block_rows(self) -> int:
        """Query rows of a work tile."""
        return WARPGROUP_ROWS * self.consumers
