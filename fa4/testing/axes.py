"""Properties of what is no feature of its own: extents, strides, slack, pages, block lists.

Each is a level that every feature must bear. Its cases are a few of it alone, then one with each
level of each feature that may meet it, forward and, in a second property, with gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fa4.testing.case import BLOCK_LISTS, Case
from fa4.testing.checks import equals_oracle, gradients_equal_oracle
from fa4.testing.combinations import all_needs, cases_of
from fa4.testing.design import FORWARD, GRADIENT_VALUES, GRADIENTS, Kind, combine
from fa4.testing.levels import FEATURES, may_meet
from fa4.testing.property import Plan, Property

Fields = Mapping[str, Any]
_LAYOUTS = frozenset({"varlen", "seqused", "paged"})
_ALONE = 2


@dataclass(frozen=True)
class Axis:
    """A level that meets every feature: `fields` of its cases, or an `extent` of their sizes.

    feature: the one that it belongs to, and is always on. without: features that it does not meet.
    """

    name: str
    description: str
    fields: Fields | None = None
    extent: str = ""
    feature: str = ""
    without: frozenset[str] = frozenset()
    dims: tuple[str, ...] = FORWARD.dims
    alone: int = _ALONE
    gradients: bool = True

    def combinations(self, offered: frozenset[str]) -> list[dict[str, Any]]:
        """The axis alone, then with each level of each feature; `offered` by the back end."""
        own = combine((self.feature,))[0] if self.feature else {}
        own |= self.fields or {}
        found = [own] * self.alone
        for feature in sorted(FEATURES, key=lambda name: name not in _LAYOUTS):  # layouts first
            meets = feature != self.feature and (
                not self.feature or may_meet(self.feature, feature)
            )
            if meets and feature not in self.without and all_needs(feature) <= offered:
                found += [dict(level) | own for level in combine((feature,))]
        return found

    def listed(self, label: str, kind: Kind) -> Callable[[Plan], list[Case]]:
        """A `Property.listed`: the axis alone first, each combination once."""
        kind = replace(kind, extent=self.extent, dims=self.dims)

        def make(plan: Plan) -> list[Case]:
            every = self.combinations(plan.offered)
            parts = every[: self.first_look], every[self.first_look :]
            return [
                case
                for n, part in enumerate(parts)
                if part
                for case in cases_of(f"{label} {n}", part, kind, lambda _: 1)(plan)
            ]

        return make

    @property
    def first_look(self) -> int:
        """The axis alone, and in each layout."""
        return self.alone if self.feature else self.alone + len(_LAYOUTS - self.without)

    def properties(self) -> tuple[Property, ...]:
        """Forward, and gradients."""
        needs = all_needs(self.feature) if self.feature else frozenset()
        if "sparse_block" in (self.fields or {}):
            needs |= {"block_sparse_tensors"}
        slack = (self.fields or {}).get("slack", "")
        needs |= {"max_seqlen": {"max_seqlen"}, "seqused": {"seqused"}}.get(slack, set())
        forward = Property(
            self.name, self.description, equals_oracle, needs=needs, levels=("lse",),
            listed=self.listed(self.name, FORWARD), first_look=self.first_look,
        )  # fmt: skip
        if not self.gradients:
            return (forward,)
        name = f"gradients_{self.name}"
        backward = Property(
            name, f"gradients: {self.description}", gradients_equal_oracle,
            needs=needs | {"gradients"}, levels=("gradients",),
            listed=self.listed(name, GRADIENTS), first_look=self.first_look,
        )  # fmt: skip
        return forward, backward


def _strides(name: str, description: str) -> Axis:
    return Axis(f"strides_{name}", description, {"strides": name})


_PACKED = frozenset(_LAYOUTS - {"varlen"})
_AXES = (
    Axis(
        "page_sizes",
        "pages of 8 to 512 keys, 48 and 256 among them",
        {"page_size": (8, 48, 256, 512, 16, 128, 64)},
        feature="paged",
        alone=7,
    ),
    Axis(
        "pages_shared",
        "sequences that share their first pages",
        {"shared_prefix": True, "page_size": (8, 16, 4)},
        extent="shared",
        feature="paged",
    ),
    Axis(
        "head_dim_odd",
        "head dims that are no multiple of 8",
        dims=("dim_odd",),
        alone=6,
    ),
    Axis("many_heads", "more heads than a warp has lanes", extent="many_heads"),
    Axis(
        "many_batch",
        "more batch entries than a warp has lanes",
        extent="many_batch",
        without=_LAYOUTS,
    ),
    Axis(
        "many_sequences",
        "more packed sequences than a warp has lanes",
        extent="many_sequences",
        feature="varlen",
    ),
    Axis(
        "rows_and_keys",
        "more than a tile of rows against several tiles of keys",
        extent="rows_and_keys",
        without=frozenset({"gqa", "aux_tensors"}),
        dims=("dim_to_64", "dim_unequal"),
    ),
    _strides("fused", "q, k and v as parts of one buffer, packed ones too"),
    _strides("heads_first", "heads before rows in memory"),
    _strides("expanded_kv", "K and V of one head for all, with a stride of 0"),
    Axis(
        "slack_buffer",
        "buffers longer than cu_seqlens[-1]",
        {"slack": "buffer"},
        feature="varlen",
    ),
    Axis(
        "slack_max_seqlen",
        "max_seqlen_q and max_seqlen_k above the longest sequence",
        {"slack": "max_seqlen"},
        feature="varlen",
    ),
    Axis(
        "slack_seqused",
        "seqused with cu_seqlens: room behind each packed sequence",
        {"slack": "seqused"},
        feature="varlen",
        without=_LAYOUTS,
    ),
    Axis(
        "block_lists",
        "block lists of each head, one for all, and empty ones",
        {"sparse_block": ((128, 128),), "sparse_lists": BLOCK_LISTS, "mask_mod": "stripes"},
        extent="blocks",
        without=_LAYOUTS | {"causal", "window", "mask_mod", "aux_tensors"},
        alone=4,
    ),
    Axis(
        "dropout_seeds",
        "seeds of more than 32 bits",
        {"seed": (2**32 + 7, 2**63 + 11, 2**32, 2**64 - 1, 2**40 + 3)},
        feature="dropout",
        alone=5,
    ),
)
_SCALE_SIGN = Axis(
    "scale_sign",
    "a factor of 0, and a negative one",
    {"softmax_scale": (-0.25, 0.0, -16.0)},
    feature="softmax_scale",
    alone=6,
)
_EXPANDED_DOUT = _strides("expanded_dout", "dO with strides of 0, as `.sum()` gives it")


def _regime(values: Iterable[str]) -> tuple[Property, ...]:
    """Gradients in each regime of values."""
    found = []
    for name in values:
        label = f"gradients_values_{name}"
        listed = cases_of(label, [{}], replace(GRADIENTS, values=(name,)))
        found.append(
            Property(
                label,
                f"dQ, dK and dV of values {name}",
                gradients_equal_oracle,
                listed=listed,
                needs=frozenset({"gradients"}),
                levels=("gradients",),
                first_look=4,  # one of each element type
            )
        )
    return tuple(found)


_both = [axis.properties() for axis in _AXES]
AXES: tuple[Property, ...] = tuple(forward for forward, *_ in _both)
GRADIENT_AXES: tuple[Property, ...] = (
    *(backward for _, *rest in _both for backward in rest),
    _SCALE_SIGN.properties()[1],
    _EXPANDED_DOUT.properties()[1],
)
GRADIENT_REGIMES = _regime(GRADIENT_VALUES[1:])
