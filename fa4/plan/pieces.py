"""Forward kernels on Blackwell whose scores come in pieces: what a search for a design may choose.

`forward_plan` has a warpgroup for each Q tile and one buffer for its scores. Here a Q tile may have
several softmax warpgroups (`groups`), each with pieces of the keys of its own, and each of them
several buffers of scores (`buffers`), so that products of the next pieces run under its softmax.
Every choice is a field; `pieces_plan` makes the plan, which the checks prove and the simulator
times. One is built: `halves`.

The plan and its signals are in `pieces_plan`, memory and registers in `pieces_layout`, programs in
`pieces_products`, `pieces_softmax` and `pieces_output`; this file owns the choices.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fa4.config import Exp2Split, require, require_finite, require_int
from fa4.plan.work import FRAGMENT, WARPGROUP

CHOICES = {
    "order": ("tiles", "groups"),
    "softmax": ("serial", "interleaved"),
    "maximum": ("exact", "speculative", "loaded"),
    "row_sums": ("after", "merged", "tensor"),
    "correction": ("warpgroup", "inline"),
    "scheduler": ("static", "lpt", "naive"),
}


@dataclass(frozen=True, kw_only=True)
class PiecesPipeline:
    """Everything that shapes such a kernel.

    piece: keys of a buffer of scores; groups: softmax warpgroups of a Q tile, which take its pieces
    in turn; buffers: of scores, of each warpgroup. joint_scores: one product writes the pieces of
    all groups. order: of the products of a step, Q tile by Q tile or group by group. ping_pong: the
    next scores follow each P V, else all of them. softmax: "interleaved" has the maximum of the
    next piece and the sums of the last one beside a piece's exponentials. maximum: "speculative"
    takes the last one and begins again in the steps in which it rose by more than tau; "loaded"
    comes with the load from tensor memory. row_sums: "tensor" by a column of ones beside V.
    correction: who rescales O. stagger: a Q tile's statistics are released by the other one's.
    value_bytes: of V and P, 1 for FP8. q_buffers: of each Q tile. tau: log2 of the rise that
    rescales.
    """

    head_dim: int = 128
    head_dim_v: int = None  # type: ignore[assignment]  # None: head_dim
    element_bytes: int = 2
    value_bytes: int = 2
    cta_group: int = 1
    q_tiles: int = 2
    q_buffers: int = 1
    tile_n: int = 128
    piece: int = 128
    groups: int = 1
    buffers: int = 1
    joint_scores: bool = False
    order: str = "tiles"
    ping_pong: bool = True
    softmax: str = "serial"
    maximum: str = "exact"
    row_sums: str = "after"
    correction: str = "warpgroup"
    stagger: bool = False
    split_p: float = 1.0
    exp2: Exp2Split = field(default_factory=Exp2Split)
    tau: float = 8.0
    kv_stages: int | None = None
    scheduler: str = "static"

    def __post_init__(self) -> None:
        """Check ranges and refuse choices that contradict each other, with the numbers."""
        given: object = self.head_dim_v
        if given is None:
            object.__setattr__(self, "head_dim_v", self.head_dim)
        for name, (least, most, step) in _RANGES.items():
            value = getattr(self, name)
            require_int(name, value, least, most)
            require(value % step == 0, f"{name} must be a multiple of {step}", value)
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            require(value in allowed, f"{name} must be one of {', '.join(allowed)}", value)
        if self.kv_stages is not None:
            require_int("kv_stages", self.kv_stages, 2, 32)
        require_finite("tau", self.tau, 0.0)
        require_finite("split_p", self.split_p)
        require(0.0 < self.split_p <= 1.0, "split_p must be in (0, 1]", self.split_p)
        self._check_together()

    def _check_together(self) -> None:
        turn = self.piece * self.groups
        if self.tile_n % turn:
            raise ValueError(
                f"tile_n must be a multiple of piece x groups = {self.piece} x {self.groups} = "
                f"{turn}; got {self.tile_n}"
            )
        if self.turns % self.buffers:
            raise ValueError(
                f"buffers must divide the {self.turns} pieces that a warpgroup has of a tile, "
                f"{self.tile_n} / {turn}; got {self.buffers}"
            )
        for given, needs, why in (
            (self.joint_scores, self.groups > 1, "joint_scores needs several groups; got 1"),
            (self.order == "groups", self.groups > 1, "order groups needs several groups; got 1"),
            (self.softmax == "interleaved", self.buffers > 1,
             f"softmax interleaved needs 2 buffers of scores or more; got {self.buffers}"),
            (self.softmax == "interleaved", self.maximum != "speculative",
             "softmax interleaved knows each maximum in time; got maximum speculative with it"),
            (self.softmax == "interleaved", self.row_sums != "merged",
             "softmax interleaved has its own order of sums; got row_sums merged with it"),
            (self.stagger, self.q_tiles == 2 and self.correction == "warpgroup",
             f"stagger needs 2 Q tiles and a correction warpgroup; got {self.q_tiles} and "
             f"{self.correction}"),
            (self.q_buffers == 2, self.scheduler == "static",
             f"q_buffers 2 needs CTAs of several work tiles, scheduler static; got "
             f"{self.scheduler}"),
            (self.element_bytes == 1, self.value_bytes == 1,
             f"element_bytes 1 needs value_bytes 1; got {self.value_bytes}"),
        ):  # fmt: skip
            if given and not needs:
                raise ValueError(why)

    @property
    def turns(self) -> int:
        """Pieces that each warpgroup has of a KV tile."""
        return self.tile_n // (self.piece * self.groups)

    @property
    def chains(self) -> tuple[tuple[int, int], ...]:
        """(Q tile, group) of every softmax warpgroup."""
        return tuple((i, g) for i in range(self.q_tiles) for g in range(self.groups))

    @property
    def block_rows(self) -> int:
        """Query rows of a work tile, of both CTAs in a pair."""
        return WARPGROUP * self.q_tiles * self.cta_group

    @property
    def num_splits(self) -> int:
        """Parts of the KV sequence that different CTAs compute: one."""
        return 1

    @property
    def split_columns(self) -> int:
        """Columns of a piece of P before its first arrival, in whole fragments."""
        if self.split_p == 1.0:
            return self.piece
        return max(FRAGMENT, int(self.piece * self.split_p) // FRAGMENT * FRAGMENT)

    @property
    def rescales_alone(self) -> bool:
        """Does S that is ready tell that all P V before it have ended? Else there is a signal."""
        return self.buffers == 1 and (self.groups == 1 or self.joint_scores or not self.ping_pong)


_RANGES = {
    "head_dim": (16, 256, 16), "head_dim_v": (16, 256, 16), "element_bytes": (1, 2, 1),
    "value_bytes": (1, 2, 1), "cta_group": (1, 2, 1), "q_tiles": (1, 4, 1),
    "q_buffers": (1, 2, 1), "tile_n": (32, 512, 32), "piece": (32, 256, 32),
    "groups": (1, 2, 1), "buffers": (1, 4, 1),
}  # fmt: skip


def chain_name(pipeline: PiecesPipeline, i: int, g: int) -> str:
    """What the signals and buffers of a softmax warpgroup are called by: 0, or 0a and 0b."""
    return f"{i}" if pipeline.groups == 1 else f"{i}{'ab'[g]}"


def slot_name(pipeline: PiecesPipeline, i: int, g: int, turn: int) -> str:
    """The same of the buffer that a piece is in; turn: the number of the piece."""
    name = chain_name(pipeline, i, g)
    return name if pipeline.buffers == 1 else f"{name}_{turn % pipeline.buffers}"
