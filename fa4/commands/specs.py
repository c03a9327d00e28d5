"""The specs that `fa4 compile` makes of its options, and the names of their files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fa4.config import WARPGROUP_ROWS, require

if TYPE_CHECKING:
    from fa4.compiled.build import Spec
    from fa4.plan import PipelinePlan

PASSES = ("forward", "backward")
# What one kernel has and the other has not: its field, its option, its default.
OWN_OPTIONS: dict[str, tuple[tuple[str, str, Any], ...]] = {
    "forward": (
        ("group", "--group", 1), ("lse", "--no-lse", True), ("scheduler", "--scheduler", ""),
    ),
    "backward": (
        ("deterministic", "--any-order", True), ("lse_gradient", "--lse-gradient", False),
        ("out_residual", "--out-residual", False),
    ),
}  # fmt: skip


def passes() -> dict[str, str]:
    """What can be compiled -> its pass: the tuned kernel of a pass, or a design by its name."""
    from fa4.designs import designs

    named = {one.name: PASSES[one.backward] for one in designs() if one.compiled is not None}
    return {**dict(zip(PASSES, PASSES, strict=True)), **named}


def take_own(kernel: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `given` that are this kernel's. Raises ValueError for an option of another."""
    for other, options in OWN_OPTIONS.items():
        for name, option, default in options:
            if other != kernel and given[name] != default:
                raise ValueError(f"{option} is an option of the {other} kernel; got {kernel}")
    own = {name: given[name] for name, _, _ in OWN_OPTIONS[kernel]}
    return {name: value for name, value in own.items() if value != ""}


def window_features(window: str, causal: bool) -> dict[str, bool]:
    """The fields of a spec that --window stands for; a causal mask is the right side itself."""
    allowed = {"": (), "left": ("left",), "right": ("right",), "both": ("left", "right")}
    if window not in allowed:
        raise ValueError(f"--window must be left, right or both; got {window!r}")
    return {f"window_{side}": True for side in allowed[window] if not (causal and side == "right")}


def take_tiles(kernel: str, arch: str, tile_m: int, tile_n: int, stages: int) -> dict[str, int]:
    """The fields of a Hopper spec that --tile-m, --tile-n and --stages stand for; 0: the tuned."""
    given = {"--tile-m": tile_m, "--tile-n": tile_n, "--stages": stages}
    named = [f"{option} {value}" for option, value in given.items() if value]
    if named and arch != "sm_90a":
        raise ValueError(f"{named[0]} is a choice for --arch sm_90a; {arch} has one tile")
    if named and kernel == "backward":
        raise ValueError(f"{named[0]} is an option of the forward kernel; got backward")
    require(tile_m in (0, 64, 128, 192), "--tile-m must be 64, 128 or 192", tile_m)
    fields = {"consumers": tile_m // WARPGROUP_ROWS, "tile_n": tile_n, "kv_stages": stages}
    return {name: value for name, value in fields.items() if value}


def find_spec(
    kernel: str, arch: str, head_dim: int, head_dim_v: int, features: dict[str, Any]
) -> Spec:
    """The (tuned) spec of the options; ValueError if they make no kernel for this machine."""
    from fa4.compiled.support import FAMILIES
    from fa4.compiled.variants import GPUS
    from fa4.designs import design_of_spec, designs
    from fa4.designs.design import named

    if arch not in GPUS:
        raise ValueError(f"arch must be one of {', '.join(GPUS)}; got {arch!r}")
    hopper = FAMILIES[arch] == "sm90"
    if hopper and features.pop("cta_group") != 1:
        raise ValueError("--cta-group 2 is a choice for sm_100a and sm_103a; sm_90a has no pairs")
    for name, dim in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        require(dim > 0 and dim % 8 == 0, f"{name} must be a positive multiple of 8", dim)
    gpu = GPUS[arch]
    fitting = [one for one in designs() if one.compiled is not None and not one.missing(gpu)]
    wanted = [one for one in fitting if kernel in (one.name, PASSES[one.backward])]
    if not wanted or wanted[0].compiled is None:
        raise ValueError(f"{kernel} does not run on {gpu.name}")
    spec: Spec = named(wanted[0].compiled.tuned)(head_dim, head_dim_v, gpu, **features)
    found = design_of_spec(spec)
    if kernel not in (found.name, PASSES[found.backward]):
        raise ValueError(f"{found.name} is the kernel of these head dims; got {kernel}")
    require_registers(spec.plan)  # the plan refuses what does not fit into shared memory
    return spec


def require_registers(plan: PipelinePlan) -> None:
    """Raises ValueError, with the sum, if a role's threads hold more than their registers."""
    for role in plan.roles:
        if role.spilled_registers:
            parts = " + ".join(f"{name} {count}" for name, count in role.live.items())
            raise ValueError(
                f"a thread of {role.name} needs {sum(role.live.values())} registers: {parts}; "
                f"it has {role.registers}: choose a smaller tile"
            )


def file_stem(kernel: str, spec: Spec, arch: str) -> str:
    """A name such as forward-128-bf16-causal-sm_100a."""
    from fa4.compiled.identity import describe

    skipped = {"head_dim", "head_dim_v", "dtype", "numerics", "gpu", "lse", "deterministic"}
    dims = f"{spec.head_dim}" + (f"x{spec.head_dim_v}" * (spec.head_dim_v != spec.head_dim))
    words = [
        name if value is True else f"{name}_{value}"
        for name, value in describe(spec).items()
        if name not in skipped
    ]
    words += ["no_lse"] if not getattr(spec, "lse", True) else []
    words += ["any_order"] if not getattr(spec, "deterministic", True) else []
    return "-".join([kernel, dims, spec.dtype, *words, arch])
