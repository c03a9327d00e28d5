"""The calls whose bits are compared: small, of every feature, with maxima that rise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fa4.config import Exp2Split, ForwardConfig
from fa4.sm90.forward.spec import WarpgroupSpec
from fa4.testing import Case
from tests.sm90.forward_kernel import CHOICES, spec_of

DENSE = ((200, 417),)
RAGGED = ((130, 200), (0, 50), (40, 0), (70, 264))
_EMULATED = ForwardConfig(exp2=Exp2Split(frequency=8, residue=4))
_EAGER = ForwardConfig(rescale_threshold_log2=0.0)


@dataclass(frozen=True)
class BitCase:
    """A spec, and the problem it is called with; sms: CTAs of the launch at most."""

    spec: WarpgroupSpec
    problem: Case
    sms: int = 2


def _own(head_dim: int, head_dim_v: int | None = None, **fields: Any) -> WarpgroupSpec:
    return WarpgroupSpec(head_dim=head_dim, head_dim_v=head_dim_v or head_dim, **fields)


# Beside the specs of the tests: tiles and schedulers of the plain features, by name.
MORE: dict[str, tuple[WarpgroupSpec, str]] = {
    "d128": (_own(128), "normal"),
    "d128 rescaled": (_own(128, numerics=_EAGER), "ramp_up"),
    "d128 fp16": (_own(128, dtype="fp16", tile_n=176), "activations"),
    "d128 P in smem": (_own(128, p_source="smem", overlap=False), "jumps_over"),
    "d128 causal longest first": (_own(128, causal=True, scheduler="lpt"), "normal"),
    "d128 causal emulated": (
        _own(128, causal=True, scheduler="snake", numerics=_EMULATED), "activations",
    ),
    "d64 three consumers": (_own(64, consumers=3, causal=True, scheduler="snake"), "ramp_up"),
    "d64 one consumer": (_own(64, consumers=1, tile_n=64, kv_stages=4), "jumps_under"),
    "d96": (_own(96, tile_n=144), "scale_100"),
    "d192,128": (_own(192, 128, causal=True), "ramp_up"),
    "d256": (_own(256, tile_n=80), "normal"),
}  # fmt: skip
VALUES = ("normal", "ramp_up", "activations", "jumps_over")


def _problem(spec: WarpgroupSpec, values: str, seed: int) -> Case:
    """The call of a spec: one sequence, ragged ones where it has them."""
    rows, keys = spec.packed_q or spec.used_q, spec.packed_k or spec.used_k
    lengths = tuple(
        (q if rows else DENSE[0][0], k if keys else DENSE[0][1])
        for q, k in (RAGGED if rows or keys else DENSE)
    )
    fields: dict[str, Any] = {
        "layout": "packed", "lengths": lengths, "heads_k": 1, "group": spec.group,
        "head_dim": spec.head_dim, "head_dim_v": spec.head_dim_v,
        "dtype": spec.dtype, "causal": spec.causal, "values": values, "seed": seed,
    }  # fmt: skip
    if spec.sink:
        fields["sink"] = 0.5
    if spec.softcap:
        fields["softcap"] = 20.0
    if spec.window_left or spec.window_right:
        fields["window_size"] = (100 if spec.window_left else None,
                                 30 if spec.window_right else None)  # fmt: skip
    return Case(**fields)


def cases() -> dict[str, BitCase]:
    """By name."""
    specs = {f"tests: {name}": spec_of(name) for name in CHOICES}
    # Who draws what differs from launch to launch; the suite's programs have no counter.
    specs = {name: spec for name, spec in specs.items() if not spec.draws_work}
    named = {
        name: (spec, VALUES[number % len(VALUES)])
        for number, (name, spec) in enumerate(specs.items())
    } | MORE
    return {
        name: BitCase(spec, _problem(spec, values, number))
        for number, (name, (spec, values)) in enumerate(named.items())
    }
