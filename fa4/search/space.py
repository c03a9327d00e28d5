"""What a search may choose: axes, the options of each, and the pipeline that a choice makes.

An option is a set of settings that belong together, such as the shape of the pieces of scores. A
design is one option of each axis; its number counts through all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from fa4.config import (
    PRODUCT_DEPTH_BYTES,
    BackwardConfig,
    BackwardPipeline,
    Exp2Split,
    Problem,
    WarpgroupPipeline,
)
from fa4.designs.amounts import element_bytes
from fa4.hardware import Gpu
from fa4.plan.pieces import PiecesPipeline
from fa4.plan.pieces_plan import MAXIMUM_ARCHES
from fa4.plan.warpgroup_packing import packings, straddles
from fa4.sim.predict import AnyPipeline

Settings = Mapping[str, Any]
EXPS_PER_CLK = 16  # of an SM on which some exponentials are computed by a polynomial
SPLITS = {0: Exp2Split(), 16: Exp2Split(frequency=16), 10: Exp2Split(frequency=10),
          8: Exp2Split(frequency=8), 6: Exp2Split(frequency=6)}  # fmt: skip
WIDEST_TILE = 256  # keys


@dataclass(frozen=True, kw_only=True)
class DesignSpace:
    """Axes of options, and what makes a pipeline of their settings (ValueError: contradictory)."""

    axes: tuple[tuple[Settings, ...], ...]
    make: Callable[[Settings], AnyPipeline]

    def __len__(self) -> int:
        return prod(len(options) for options in self.axes)

    def settings(self, number: int) -> dict[str, Any]:
        """Of a design. Raises IndexError beyond the last one."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        found: dict[str, Any] = {}
        for options in reversed(self.axes):
            number, index = divmod(number, len(options))
            found = {**options[index], **found}
        return found

    def kind(self, number: int) -> int:
        """Which option of the first axis a design has."""
        return number * len(self.axes[0]) // len(self)

    def neighbours(self, number: int) -> Iterator[int]:
        """Designs that differ in one option."""
        step = 1
        for options in reversed(self.axes):
            index = number // step % len(options)
            for other in range(len(options)):
                if other != index:
                    yield number + (other - index) * step
            step *= len(options)

    def restricted(self, only: Mapping[str, Sequence[str]]) -> DesignSpace:
        """The designs with one of the given values of each named setting.

        Raises ValueError naming the settings or values there are.
        """
        axes = self.axes
        for name, wanted in only.items():
            there = {str(x[name]) for options in self.axes for x in options if name in x}
            if not there:
                known = sorted({key for options in self.axes for x in options for key in x})
                raise ValueError(f"no setting {name!r} in this space; it has {', '.join(known)}")
            unknown = [value for value in wanted if value not in there]
            if unknown:
                raise ValueError(
                    f"{name} must be among {', '.join(sorted(there))}; got {unknown[0]!r}"
                )
            kept = tuple(
                tuple(x for x in options if name not in x or str(x[name]) in wanted)
                for options in axes
            )
            if not all(kept):
                said = "; ".join(f"{key} {', '.join(values)}" for key, values in only.items())
                raise ValueError(f"no design has {said} together")
            axes = kept
        return DesignSpace(axes=axes, make=self.make)


def find_space(problem: Problem, gpu: Gpu, *, backward: bool, narrow_values: bool) -> DesignSpace:
    """The designs for a problem on a machine. narrow_values: V and P may be FP8.

    Raises ValueError for what a machine lacks.
    """
    if narrow_values and (backward or not gpu.tmem_cols):
        which = "the backward pass" if backward else gpu.name
        raise ValueError(f"fp8-values needs forward products from tensor memory; got {which}")
    if backward:
        return _backward(problem, gpu)
    if not gpu.tmem_cols:
        return _warpgroups(problem)
    return _pieces(problem, gpu, narrow_values=narrow_values)


def _named(name: str, *values: Any) -> tuple[Settings, ...]:
    return tuple({name: value} for value in values)


def _pieces(problem: Problem, gpu: Gpu, *, narrow_values: bool) -> DesignSpace:
    masked = problem.window_size != (None, None)
    size = element_bytes(problem.dtype)
    maxima = ("exact", "speculative", *(("loaded",) if gpu.arch in MAXIMUM_ARCHES else ()))
    steps = [{"softmax": "serial", "maximum": m, "row_sums": s}
             for m, s in product(maxima, ("after", "merged", "tensor"))]  # fmt: skip
    steps += [{"softmax": "interleaved", "maximum": m, "row_sums": s}
              for m, s in product(maxima, ("after", "tensor")) if m != "speculative"]  # fmt: skip
    emulated = SPLITS if gpu.exp_per_clk <= EXPS_PER_CLK else {0: SPLITS[0]}
    fixed = {"head_dim": problem.head_dim, "head_dim_v": problem.head_dim_v, "element_bytes": size}

    def make(settings: Settings) -> PiecesPipeline:
        named = {**fixed, **settings, "exp2": SPLITS[settings["exp2"]]}
        found = PiecesPipeline(**named)
        # In whole fragments, of which the last is never emulated: the same by other names.
        named["split_p"] = found.split_columns / found.piece
        named["exp2"] = found.exp2 if found.exp2.share(found.piece) else SPLITS[0]
        return PiecesPipeline(**named)

    return DesignSpace(
        axes=(
            tuple(_shapes()),
            tuple(steps),
            ({"correction": "warpgroup", "stagger": False},
             {"correction": "warpgroup", "stagger": True},
             {"correction": "inline", "stagger": False}),
            _named("cta_group", 1, 2),
            _named("q_tiles", *range(1, 3 + (gpu.tmem_cols > 512))),
            _named("q_buffers", 1, 2),
            _named("ping_pong", True, False),
            _named("split_p", 1.0, 0.75, 0.5),
            _named("exp2", *emulated),
            # Of unequal work tiles the longest first: a stride over them makes both kernels that
            # there are 8% to 10% slower, and takes most of a search's time.
            _named("scheduler", *(("lpt",) if masked else ("static", "naive"))),
            _named("value_bytes", *dict.fromkeys((size, 1) if narrow_values else (size,))),
        ),
        make=make,
    )  # fmt: skip


def _shapes() -> Iterator[dict[str, Any]]:
    """Pieces, groups and buffers whose tiles are not too wide, in every order of products."""
    for piece, groups, turns in product((32, 64, 96, 128, 192, 256), (1, 2), (1, 2, 3, 4)):
        tile_n = piece * groups * turns
        if tile_n > WIDEST_TILE:
            continue
        for buffers in (n for n in range(1, turns + 1) if turns % n == 0):
            for joint, order in product((False, True), ("tiles", "groups")):
                if groups > 1 or (not joint and order == "tiles"):
                    yield {"tile_n": tile_n, "piece": piece, "groups": groups, "buffers": buffers,
                           "joint_scores": joint, "order": order}  # fmt: skip


def _warpgroups(problem: Problem) -> DesignSpace:
    masked = problem.window_size != (None, None)
    size = element_bytes(problem.dtype)
    depth = PRODUCT_DEPTH_BYTES // size
    packed = max(packings(problem.heads_q // problem.heads_k))
    dims = {
        "head_dim": -(-problem.head_dim // depth) * depth,
        "head_dim_v": -(-problem.head_dim_v // depth) * depth,
        "element_bytes": size,
        "causal": masked,
        "packed": packed,
        "direct": size == 2 and straddles(packed),
    }
    starts = [{"scheduler": "static", "ahead": ahead} for ahead in (False, True)]
    starts += [{"scheduler": name, "ahead": False} for name in ("lpt", "naive")]
    starts += [{"scheduler": "lpt", "ahead": True}] if masked else []
    return DesignSpace(
        axes=(
            _named("consumers", 1, 2, 3),
            _named("tile_n", *range(48, 224, 16)),
            _named("kv_stages", 2, 3, 4),
            _named("p_source", *(("registers", "smem") if size == 2 else ("registers",))),
            _named("overlap", True, False),
            _named("ping_pong", True, False),
            tuple(starts),
        ),
        make=lambda settings: WarpgroupPipeline(**{**dims, **settings}),
    )


def _backward(problem: Problem, gpu: Gpu) -> DesignSpace:
    if not gpu.tmem_cols:
        raise ValueError(f"backward designs need tensor memory; {gpu.name} has none")
    fixed: dict[str, Any] = {
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "causal": problem.window_size != (None, None),
    }

    def make(settings: Settings) -> BackwardPipeline:
        numerics = BackwardConfig(**{name: settings[name] for name in _TILES})
        others = {name: value for name, value in settings.items() if name not in _TILES}
        return BackwardPipeline(**fixed, **others, numerics=numerics)

    return DesignSpace(
        axes=(
            _named("tile_m", 64, 128),
            _named("tile_n", 64, 128),
            _named("cta_group", 1, 2),
            _named("scheduler", "naive", "lpt", "spt"),
            _named("published", False, True),
        ),
        make=make,
    )


_TILES = ("tile_m", "tile_n", "cta_group")
