"""What selects the generated code of a Hopper forward kernel. Sizes are run-time values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from fa4.config import (
    PRODUCT_DEPTH_BYTES,
    WARPGROUP_ROWS,
    ForwardConfig,
    WarpgroupPipeline,
    require,
    require_int,
)
from fa4.hardware import H200, Gpu
from fa4.kit.features import ForwardFeatures
from fa4.plan.schema import PipelinePlan
from fa4.plan.warpgroup import begins_ahead, has_room, warpgroup_plan
from fa4.plan.warpgroup_packing import ROW_BYTES, QueryPlace, query_place, straddles
from fa4.plan.warpgroup_tuned import padded_width

MOST_GROUP = 1 << 16
PERSISTENT = ("static", "snake", "queue")  # a CTA has several work tiles
SCHEDULERS = (*PERSISTENT, "lpt", "naive")


def query_box(spec: WarpgroupSpec, shape: tuple[int, ...]) -> tuple[Any, int]:
    """Rows and columns of a tile of Q or O, as TMA moves it: a warpgroup's, or a work tile's.

    Where query heads are packed, rows are (heads, positions).
    """
    rows, cols = shape[:2]
    if spec.group == 1:
        return rows, cols
    if spec.straddles:
        return (spec.group, spec.query_place.positions), cols
    heads = min(spec.group, rows)
    return (heads, rows // heads), cols


@dataclass(frozen=True, kw_only=True)
class WarpgroupSpec(ForwardFeatures):
    """One forward kernel. Two specs that differ compile to different code and cache keys.

    Beside the features, these are choices of `WarpgroupPipeline`: consumers warpgroups of 64 rows
    of queries, KV tiles of tile_n keys in kv_stages stages; p_source, where P enters PV from
    ("registers" or "smem"); overlap, ping_pong, ahead, promote.
    scheduler: "static" (a CTA per SM strides over the work tiles), "snake" (longest first, back and
    forth), "queue" (longest first, each as soon as an SM is free), "naive" (a CTA per work tile) or
    "lpt" (the same, longest first). numerics: tau and the
    emulated exponentials, of the pairs that a thread has in every eight columns. split: the keys of
    a query are divided over CTAs, in as many parts as the call says. descale: letters of those of
    q, k and v that have factors for each batch entry and KV head (8-bit types). columns: that rows
    of Q and K, and of V, have in shared memory; None for `padded_width` of the head dims. direct:
    O goes from registers to global memory; None for where it must.
    """

    DTYPES: ClassVar[tuple[str, ...]] = ("bf16", "fp16", "e4m3", "e5m2")

    descale: str = ""
    promote: int = 0
    tile_n: int = 128
    consumers: int = 2
    kv_stages: int = 2
    p_source: str = "registers"
    overlap: bool = True
    ping_pong: bool | None = None
    ahead: bool = False
    scheduler: str = "static"
    split: bool = False
    direct: bool | None = None
    columns: tuple[int, int] | None = None
    numerics: ForwardConfig = field(default_factory=ForwardConfig)
    gpu: Gpu = H200

    def __post_init__(self) -> None:
        """Check what the kernel itself cannot do; the plan checks its own choices."""
        self.check_call()
        require_int("group", self.group, 1, MOST_GROUP)
        several = self.group > WARPGROUP_ROWS and self.group % WARPGROUP_ROWS
        require(not several, f"a group above {WARPGROUP_ROWS} must be a multiple of it", self.group)
        vector = 16 // self.element_bytes
        for name, dim in (("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)):
            require_int(name, dim, vector, 256)
            require(dim % vector == 0, f"{name} must be a multiple of {vector}", dim)
        require_int("tile_n", self.tile_n, 16, 256)
        require(
            self.tile_n % self.depth == 0, f"tile_n must be a multiple of {self.depth}", self.tile_n
        )
        if self.columns is not None:
            narrow = any(n < dim for n, dim in zip(self.columns, self.dims, strict=True))
            require(not narrow, f"columns must be at least {self.dims}", self.columns)
        if self.element_bytes == 1:
            self._check_narrow()
        elif self.descale:
            raise ValueError(f"descale needs dtype e4m3 or e5m2; got {self.dtype}")
        if self.straddles:
            found = self.tile_columns[0] * self.element_bytes
            rule = f"with groups of {self.group}, rows of Q must be whole {ROW_BYTES} bytes"
            require(found % ROW_BYTES == 0, rule, found)
        if self.shifts[1] and self.direct is False:
            raise ValueError(f"head_dim_v {self.head_dim_v} needs direct stores; got False")
        if self.split and self.draws_work:
            raise ValueError("split keys have a CTA for each part; got scheduler 'queue'")
        require(
            self.scheduler in SCHEDULERS,
            f"scheduler must be one of {', '.join(SCHEDULERS)}",
            self.scheduler,
        )

    def _check_narrow(self) -> None:
        require(set(self.descale) <= set("qkv"), "descale must be of letters of qkv", self.descale)
        require(self.p_source == "registers", "p_source must be registers with 8-bit types",
                self.p_source)  # fmt: skip
        require(not self.split, "split must be False with 8-bit types", self.split)
        self.numerics.check_dtype(self.dtype)

    @property
    def dims(self) -> tuple[int, int]:
        """d and dv."""
        return self.head_dim, self.head_dim_v

    @property
    def depth(self) -> int:
        """Elements of K of one product, of which head dimensions are padded to a multiple."""
        return PRODUCT_DEPTH_BYTES // self.element_bytes

    @property
    def p_words(self) -> int:
        """Registers of a thread that hold P as an operand."""
        return self.tile_n * self.element_bytes // 8

    @property
    def takes_turns(self) -> bool:
        """Do the warpgroups take turns at the tensor core?"""
        return self.pipeline.takes_turns

    @property
    def has_mods(self) -> bool:
        """Are scores or the mask computed by functions of the caller?"""
        return self.score_mod is not None or self.mask_mod is not None

    @property
    def begins_ahead(self) -> bool:
        """Does the next work tile's first S start before this one's O is stored?"""
        return begins_ahead(self.pipeline, self.gpu)

    @property
    def draws_work(self) -> bool:
        """Does a counter in global memory, which is zero, say which work tile is next?"""
        return self.scheduler == "queue"

    @property
    def cta_group(self) -> int:
        """CTAs that work together: one."""
        return 1

    @property
    def tile_rows(self) -> int:
        """Rows of a Q tile: a warpgroup's."""
        return WARPGROUP_ROWS

    @property
    def q_tiles(self) -> int:
        """Q tiles of a CTA: one of each warpgroup."""
        return self.consumers

    @property
    def straddles(self) -> bool:
        """Do the rows of a position lie in two warpgroups' tiles?"""
        return straddles(self.group)

    @property
    def query_place(self) -> QueryPlace:
        """Where a work tile has its rows of Q, if positions straddle."""
        return query_place(self.group, self.consumers * WARPGROUP_ROWS)

    @property
    def tile_columns(self) -> tuple[int, int]:
        """Columns of Q and K, and of V, in shared memory."""
        d, dv = (padded_width(dim, self.element_bytes) for dim in self.dims)
        whole = ROW_BYTES // self.element_bytes
        return self.columns or (-(-d // whole) * whole if self.straddles else d, dv)

    @property
    def multiplied(self) -> tuple[int, int]:
        """Columns of Q and K, and of V, that products take: of 8-bit types all there are."""
        if self.element_bytes == 1:
            return self.tile_columns
        d, dv = (-(-dim // self.depth) * self.depth for dim in self.dims)
        return d, dv

    @property
    def shifts(self) -> tuple[bool, bool]:
        """May boxes of Q and K, and of V and O, begin earlier? `sectors` says why, and why not."""
        plain = self.element_bytes == 2 and not self.split and not self.ragged_k
        qk, vo = (plain and dim % 16 == 8 for dim in self.dims)
        return qk, vo

    @property
    def stores_directly(self) -> bool:
        """Does O go from registers to global memory? `direct` says it, or where it must.

        TMA stores no box that begins earlier, nor one of a warpgroup's rows where positions
        straddle; and O of 8-bit types, wider than Q, may have no room.
        """
        if self.split or self.direct is not None:
            return bool(self.direct) and not self.split
        if self.element_bytes == 1:
            return not has_room(self._pipeline(False), self.gpu)
        return self.shifts[1] or self.straddles

    @property
    def pipeline(self) -> WarpgroupPipeline:
        """The pipeline of this kernel; head dimensions padded."""
        return self._pipeline(self.stores_directly)

    def _pipeline(self, direct: bool) -> WarpgroupPipeline:
        return WarpgroupPipeline(
            head_dim=self.multiplied[0],
            head_dim_v=self.multiplied[1],
            columns=None if self.multiplied == self.tile_columns else self.tile_columns,
            element_bytes=self.element_bytes,
            causal=self.hides_last_keys,
            tile_n=self.tile_n,
            consumers=self.consumers,
            kv_stages=self.kv_stages,
            ping_pong=self.ping_pong,
            p_source=self.p_source,
            overlap=self.overlap,
            ahead=self.ahead and self.scheduler in PERSISTENT,
            promote=self.promote,
            scheduler="lpt" if self.scheduler == "snake" else self.scheduler,
            num_splits=2 if self.split else 1,  # or more: the code is the same
            direct=direct,
            packed=self.group,
        )

    @property
    def plan(self) -> PipelinePlan:
        """Roles, signals and buffers. Raises ValueError if they do not fit the machine."""
        return warpgroup_plan(self.pipeline, self.gpu)
