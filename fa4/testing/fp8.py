"""Properties of FP8 inputs: factors, the range of P, and errors taken together.

What a back end rounds P to, what its factors belong to and how it sums are its own to declare
(`fa4.testing.numerics`); the budget, the root mean square and the mean error are those of plain
attention with the same arithmetic. Features are met one by one in `fp8_with_causal` and so on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from fa4.testing import strategies as draw
from fa4.testing.case import Case
from fa4.testing.checks import equals_oracle
from fa4.testing.combinations import all_needs, cases_of
from fa4.testing.design import FORWARD, combine
from fa4.testing.levels import FEATURES
from fa4.testing.numerics import FP8_TYPES
from fa4.testing.property import Plan, Property
from fa4.testing.statistics import fp8_statistics

_NEEDS = frozenset({"q_descale", "k_descale", "v_descale"})
_KIND = replace(FORWARD, values=("normal",))
_SIZES: dict[str, Any] = {
    "batch": 2, "heads_k": 3, "group": 2, "seqlen_q": 5, "head_dim": 32, "head_dim_v": 32,
}  # fmt: skip


def _factors(name: str, description: str, scales: str, **fields: Any) -> Property:
    """Cases with factors of some letters: of two batch entries and three heads, grouped."""

    def listed(plan: Plan) -> list[Case]:
        shapes: tuple[dict[str, Any], ...] = (
            {},
            {"seqlen_k": 300, "seqlen_q": 130, "heads_k": 2, "batch": 1},
        )
        return [
            Case(dtype=dtype, seed=plan.seed + n, scales=scales,
                 **(_SIZES | {"seqlen_k": 70} | shape | fields))
            for n, shape in enumerate(shapes)
            for dtype in plan.dtypes
        ]  # fmt: skip

    return Property(
        name, description, equals_oracle, listed=listed, needs=_NEEDS | {f"scales_{scales}"},
        dtypes=FP8_TYPES, levels=("lse",), first_look=2,
    )  # fmt: skip


def _values(
    name: str, description: str, regimes: tuple[str, ...], keys: int, **fields: Any
) -> Property:
    """Cases of those regimes; fields: of each, such as `dropout_p`."""

    def listed(plan: Plan) -> list[Case]:
        return [
            Case(dtype=dtype, seed=plan.seed, values=values, seqlen_q=4, seqlen_k=keys,
                 head_dim=64, head_dim_v=64, **fields)
            for values in regimes
            for dtype in plan.dtypes
        ]  # fmt: skip

    needs = all_needs("dropout") if "dropout_p" in fields else frozenset()
    return Property(
        name, description, equals_oracle, listed=listed, needs=needs, dtypes=FP8_TYPES,
        levels=("lse",), first_look=4,
    )  # fmt: skip


def _with_feature(feature: str) -> Property:
    """Each level of a feature, with factors and without."""
    name = f"fp8_with_{feature}"

    def listed(plan: Plan) -> list[Case]:
        own: dict[str, Any] = {"descale": (True, False)}
        if "scales_head" not in plan.offered:
            own = {"descale": (True, False) if "scales_tensor" in plan.offered else False}
            own["scales"] = "tensor"
        levels = [dict(level) | own for level in combine((feature,)) for _ in range(2)]
        return cases_of(name, levels, _KIND, lambda _: 1)(plan)

    return Property(
        name, f"FP8 inputs with {feature}, with and without factors", equals_oracle,
        listed=listed, needs=_NEEDS | all_needs(feature), dtypes=FP8_TYPES, levels=("lse",),
        first_look=2,
    )  # fmt: skip


_LETTERS = {"q": "Q", "k": "K", "v": "V"}
FP8_PROPERTIES: tuple[Property, ...] = (
    Property(
        "fp8",
        "FP8 inputs without factors",
        equals_oracle,
        listed=cases_of("fp8_plain", [{}], _KIND, lambda repeats: -(-repeats // 2)),
        dtypes=FP8_TYPES,
        levels=("lse",),
        first_look=4,
    ),
    *(
        _factors(f"fp8_{x}_descale", f"factors of {name} alone, of batch entries and KV heads",
                 "head", descale=x)
        for x, name in _LETTERS.items()
    ),
    Property(
        "fp8_descale",
        "factors of batch entries and KV heads, for any lengths",
        equals_oracle,
        lambda dtypes: draw.dense_cases(
            dtypes, descale=True, groups=(1, 2), causal=st.booleans(), values=("normal",)
        ),
        needs=_NEEDS | {"scales_head"},
        dtypes=FP8_TYPES,
        levels=("lse",),
    ),
    _factors("fp8_descale_heads", "factors of all three, of batch entries and KV heads", "head",
             descale=True),
    _factors("fp8_descale_tensor", "one factor for all of q, k and v each", "tensor",
             descale=True),
    _factors("fp8_descale_blocks", "factors of blocks of 128 rows or keys", "block",
             descale=True, seqlen_k=300),
    _values("fp8_p_range", "P of a maximum that rises late does not saturate",
            ("jumps_over", "jumps_under", "ramp_up", "ramp_down", "peaks"), 385),
    _values("fp8_p_range_dropout", "P does not saturate with dropout's factor of 10",
            ("normal", "peaks"), 385, dropout_p=0.9),
    _values("fp8_small_p", "many small P beside a large one are not lost", ("tail",), 2049),
    *fp8_statistics(),
    *(_with_feature(feature) for feature in FEATURES),
)  # fmt: skip
