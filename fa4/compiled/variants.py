"""Which kernel a call gets: tuned choices for head dims and machine; and the common variants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeAlias

from fa4.compiled.support import FAMILIES, NARROW, BackwardCall, ForwardCall, check
from fa4.config import ForwardConfig, Window
from fa4.designs import find_design
from fa4.designs.design import named
from fa4.hardware import B200, B300, H200, Gpu
from fa4.kit.units import TILE_ROWS
from fa4.masks import IntervalMask
from fa4.plan.backward_serial import SERIAL_DIMS
from fa4.plan.halves import halves_numerics
from fa4.plan.warpgroup_packing import packings
from fa4.plan.warpgroup_parts import GradientSizes, choose_key_parts, choose_query_parts
from fa4.plan.warpgroup_tuned import WarpgroupProblem, tuned_warpgroups
from fa4.sm90.backward.spec import MOST_DIM, WarpgroupBackwardSpec
from fa4.sm90.forward.spec import PERSISTENT, WarpgroupSpec
from fa4.sm90.wide.spec import WideBackwardSpec
from fa4.sm100.backward.spec import BackwardSpec
from fa4.sm100.forward.spec import ForwardSpec
from fa4.sm100.halves.spec import HalvesSpec

AnyForwardSpec: TypeAlias = ForwardSpec | HalvesSpec | WarpgroupSpec
AnyBackwardSpec: TypeAlias = BackwardSpec | WarpgroupBackwardSpec | WideBackwardSpec

# A kernel for an H200 runs on an H100: they differ in memory alone.
GPUS = {gpu.arch: gpu for gpu in (B200, B300, H200)}

COMMON_HEAD_DIMS = ((64, 64), (128, 128), (192, 128))
COMMON_ROWS = 8192  # of a sequence
# P bears 2^4, so that 8 bits do not lose its small values. A maximum may lag behind by about what
# is left to the largest e4m3: measured, the kernel is slower with less.
NARROW_NUMERICS = ForwardConfig(rescale_threshold_log2=4.0, p_offset_log2=4.0)
PAIR_DIMS = (128, 192)
PAIR_TILE = (128, 128)  # head dims of the backward kernel of pairs


def tuned_spec(head_dim: int, head_dim_v: int, gpu: Gpu = B200, **features: Any) -> ForwardSpec:
    """The spec with FlashAttention-4's tuned arithmetic for its dims, mask and machine.

    features: further fields of ForwardSpec. B300's exponential units are twice as fast, so nothing
    is emulated there.
    """
    masks = ("causal", "window_left", "window_right", "mask")
    masked = any(features.get(name) for name in masks)
    tuned = ForwardConfig.tuned(features.get("dtype", "bf16"), head_dim, masked)
    if gpu.arch == "sm_103a":
        tuned = ForwardConfig(rescale_threshold_log2=tuned.rescale_threshold_log2)
    features.setdefault("numerics", tuned)
    return ForwardSpec(head_dim=head_dim, head_dim_v=head_dim_v, gpu=gpu, **features)


def tuned_halves_spec(
    head_dim: int, head_dim_v: int, gpu: Gpu = B200, **features: Any
) -> HalvesSpec:
    """The same with halves."""
    masks = ("causal", "window_left", "window_right", "mask")
    masked = any(features.get(name) for name in masks)
    numerics = halves_numerics(
        features.get("dtype", "bf16"), head_dim, masked, emulate=gpu.arch != "sm_103a"
    )
    features.setdefault("numerics", numerics)
    return HalvesSpec(head_dim=head_dim, head_dim_v=head_dim_v, gpu=gpu, **features)


def tuned_warpgroup_spec(
    head_dim: int, head_dim_v: int, problem: WarpgroupProblem | None = None, **features: Any
) -> WarpgroupSpec:
    """The Hopper spec with the tiles of a problem (None: a long one) and tau 8.

    features: further fields of WarpgroupSpec; tiles among them are as given. No exponential is
    emulated: measured, it gains nothing.
    """
    gpu = features.get("gpu", H200)
    size = 1 if features.get("dtype") in NARROW else 2
    if problem is None:
        window = (None, 0) if features.get("causal") else (None, None)
        problem = WarpgroupProblem(
            head_dim=head_dim, head_dim_v=head_dim_v, rows=COMMON_ROWS, keys=COMMON_ROWS, heads=16,
            batch=8, masked=_uneven(features), window=window, element_bytes=size,
        )  # fmt: skip
    if size == 1:
        features.setdefault("numerics", NARROW_NUMERICS)
    tuned = tuned_warpgroups(problem, gpu)
    features.setdefault("split", tuned.num_splits > 1)
    if not {"consumers", "tile_n", "kv_stages"} & set(features):
        features.setdefault("columns", tuned.widths)
        features.setdefault("direct", tuned.direct if tuned.num_splits == 1 else None)
    # These take registers, of which mods have none to spare: up to 328 bytes would be spilled.
    spare = not (features.get("score_mod") or features.get("mask_mod"))
    if "consumers" not in features:  # the turns of other warpgroups say nothing
        features.setdefault("ping_pong", tuned.ping_pong and spare)
        features.setdefault("ahead", tuned.ahead and spare)
    if "tile_n" in features:  # as many stages as that of the tuned tile may not fit
        features.setdefault("kv_stages", WarpgroupSpec.kv_stages)
    for name in ("consumers", "tile_n", "kv_stages", "promote"):
        features.setdefault(name, getattr(tuned, name))
    queued = spare or not problem.uneven
    features.setdefault("scheduler", tuned.scheduler if queued else "lpt")
    if features["scheduler"] not in PERSISTENT:  # the same kernel: no CTA has two work tiles
        features["ahead"] = False
    return WarpgroupSpec(head_dim=head_dim, head_dim_v=head_dim_v, **features)


def _uneven(features: dict[str, Any]) -> bool:
    """May work tiles differ in the number of their keys?"""
    masks = ("causal", "window_left", "window_right", "mask")
    return any(features.get(name) for name in masks)


def common_specs(gpu: Gpu = B200) -> Iterator[AnyForwardSpec]:
    """What most models call: the usual head dims, both element types, with and without mask."""
    for head_dim, head_dim_v in COMMON_HEAD_DIMS:
        for dtype in ("bf16", "fp16"):
            for causal in (False, True):
                yield find_tuned(head_dim, head_dim_v, gpu, dtype=dtype, causal=causal)


def find_tuned(head_dim: int, head_dim_v: int, gpu: Gpu = B200, **features: Any) -> AnyForwardSpec:
    """The tuned spec of a long problem, for any machine that has a kernel."""
    if FAMILIES[gpu.arch] == "sm90":
        return tuned_warpgroup_spec(head_dim, head_dim_v, gpu=gpu, **features)
    return tuned_spec(head_dim, head_dim_v, gpu, **features)


def find_gpu(capability: tuple[int, int], family: str = "") -> Gpu:
    """The machine with a compute capability. Raises ValueError if no kernel (of a family) is."""
    arch = f"sm_{capability[0]}{capability[1]}a"
    fitting = {name: gpu for name, gpu in GPUS.items() if family in ("", FAMILIES[name])}
    if arch not in fitting:
        known = ", ".join(f"{gpu.arch} ({gpu.name})" for gpu in fitting.values())
        kernel = f"the {family.upper()} kernel runs" if family else "kernels run"
        raise ValueError(
            f"{kernel} on {known}; this GPU has compute capability {capability[0]}.{capability[1]}"
        )
    return fitting[arch]


def choose_spec(call: ForwardCall, gpu: Gpu = B200) -> AnyForwardSpec:
    """The kernel of a call. Raises NotSupported, with the reason, if there is none."""
    if FAMILIES[gpu.arch] == "sm90":
        return choose_sm90_spec(call, gpu)
    return choose_sm100_spec(call, gpu)


def choose_sm90_spec(call: ForwardCall, gpu: Gpu = H200) -> WarpgroupSpec:
    """The same for Hopper."""
    check(call, "sm90")
    problem = warpgroup_problem(call)
    group = tuned_warpgroups(problem, gpu).packed
    features = _features(call) | {"lse": call.lse, "group": group, "gpu": gpu}
    if call.numerics is not None:
        features["numerics"] = call.numerics
    if call.descale:
        features["descale"] = call.descale
    return tuned_warpgroup_spec(call.head_dim, call.head_dim_v, problem, **features)


def warpgroup_problem(call: ForwardCall) -> WarpgroupProblem:
    """What the choice of a Hopper kernel's tiles, packed heads and parts looks at.

    pack_gqa=True asks for a group of 2 or more.
    """
    features, ratio = _features(call), 1 if call.pack_gqa is False else call.group
    sequences, size = call.batch if call.packed_k else 1, 1 if call.dtype in NARROW else 2
    return WarpgroupProblem(
        head_dim=call.head_dim,
        head_dim_v=call.head_dim_v,
        rows=call.longest_q,
        keys=-(-call.rows_k // max(sequences, 1)),
        heads=call.heads_q,
        batch=call.batch,
        masked=_uneven(features),
        window=kernel_window(call),
        kv_heads=call.heads_k,
        queries=call.longest_q,
        ragged=bool(call.varlen),
        num_splits=call.num_splits if size == 2 else 1,
        element_bytes=size,
        packings=packings(ratio, 1 + (call.pack_gqa is True and ratio > 1)),
    )


def count_splits(call: ForwardCall, spec: AnyForwardSpec) -> int:
    """Parts of a call's keys, which different CTAs compute; 1 where they are not divided."""
    if not getattr(spec, "split", False):
        return 1
    return tuned_warpgroups(warpgroup_problem(call), spec.gpu).num_splits


def _packed_heads(call: ForwardCall, rows: int) -> int:
    """Query heads that share the rows of a Q tile; 1 for none."""
    packs = call.group > 1 and rows % call.group == 0 and call.pack_gqa is not False
    return call.group if packs else 1


def choose_sm100_spec(call: ForwardCall, gpu: Gpu = B200) -> ForwardSpec | HalvesSpec:
    """The same for Blackwell: of the kernel that the call names, if it names one."""
    check(call)
    features, group = _features(call), _packed_heads(call, TILE_ROWS)
    tuned = tuned_spec
    if call.numerics is not None and call.numerics.kernel:
        compiled = find_design(gpu, kernel=call.numerics.kernel).compiled
        assert compiled is not None  # `check` refuses others
        tuned = named(compiled.tuned)
    spec: ForwardSpec | HalvesSpec = tuned(
        call.head_dim,
        call.head_dim_v,
        gpu,
        **features,
        lse=call.lse,
        group=group,
        cta_group=_cta_group(call, call.longest_q * group),
        # Tiles of unequal length: the longest first, so that the short ones fill the gaps.
        scheduler="lpt" if _uneven(features) else "static",
    )
    return replace(spec, numerics=_numerics(call, spec.numerics, call.longest_q * group))


def choose_backward_spec(call: BackwardCall, gpu: Gpu = B200) -> AnyBackwardSpec:
    """The backward kernels of a call. Raises NotSupported, with the reason, if there are none."""
    family = FAMILIES[gpu.arch]
    check(call, family)
    features = {
        **_features(call),
        "score_mod_bwd": call.score_mod_bwd,
        "lse_gradient": call.lse_gradient,
        "out_residual": call.out_residual,
        "deterministic": call.deterministic,
    }
    if family == "sm100":
        features["cta_group"] = _backward_cta_group(call)
    else:
        features["key_parts"] = find_key_parts(call, gpu) > 1
        if is_wide(call):
            features["query_parts"] = find_query_parts(call, gpu) > 1
    return find_tuned_backward(call.head_dim, call.head_dim_v, gpu, **features)


def find_tuned_backward(
    head_dim: int, head_dim_v: int, gpu: Gpu = B200, **features: Any
) -> AnyBackwardSpec:
    """The backward spec of a machine.

    features: further fields of the spec. The sums of Hopper's wide heads have one order anyway.
    """
    fields = {"head_dim": head_dim, "head_dim_v": head_dim_v, "gpu": gpu, **features}
    if FAMILIES[gpu.arch] == "sm100":
        return BackwardSpec(**fields)
    if max(head_dim, head_dim_v) > MOST_DIM:
        return WideBackwardSpec(**{**fields, "deterministic": False})
    return WarpgroupBackwardSpec(**fields)


def find_key_parts(call: BackwardCall, gpu: Gpu) -> int:
    """Into how many parts the query heads that share keys are divided; 1 for kernels without."""
    if FAMILIES[gpu.arch] == "sm100" or call.is_empty:
        return 1
    return choose_key_parts(sizes_of(call), gpu.sm_count)


def find_query_parts(call: BackwardCall, gpu: Gpu) -> int:
    """Into how many parts the keys are divided in a kernel of dQ alone; 1 for kernels without."""
    if FAMILIES[gpu.arch] == "sm100" or call.is_empty:
        return 1
    return choose_query_parts(sizes_of(call), gpu.sm_count)


def is_wide(call: BackwardCall) -> bool:
    """Has Hopper a kernel of dK and dV and one of dQ for it?"""
    return max(call.head_dim, call.head_dim_v) > MOST_DIM


def sizes_of(call: BackwardCall) -> GradientSizes:
    """What decides whether Hopper's kernels divide sums over CTAs."""
    return GradientSizes(
        batch=call.batch, heads_q=call.heads_q, heads_k=call.heads_k,
        rows_q=call.rows_q if call.packed_q else call.batch * call.longest_q,
        rows_k=call.rows_k if call.packed_k else call.batch * call.longest_k,
        longest_q=call.longest_q, longest_k=call.longest_k,
        window=kernel_window(call), wide=is_wide(call),
    )  # fmt: skip


def _backward_cta_group(call: BackwardCall) -> int:
    """2 for the head dims of the kernels of pairs, where there is a KV tile for each CTA.

    (192, 128) fits into no CTA alone.
    """
    dims = call.head_dim, call.head_dim_v
    return 2 if dims == SERIAL_DIMS or (dims == PAIR_TILE and call.rows_k > TILE_ROWS) else 1


def _features(call: ForwardCall) -> dict[str, Any]:
    """The fields of a spec that forward and backward kernels share."""
    left, right = kernel_window(call)
    mask = call.mask_mod if isinstance(call.mask_mod, IntervalMask) else None
    return {
        "dtype": call.dtype,
        "causal": right == 0,
        "window_left": left is not None,
        "window_right": right not in (None, 0),
        "packed_q": call.packed_q,
        "packed_k": call.packed_k,
        "used_q": call.used_q,
        "used_k": call.used_k,
        "sink": call.sink,
        "softcap": call.softcap > 0,
        "score_mod": call.score_mod,
        "mask_mod": None if mask else call.mask_mod,
        "mask": mask,
        "aux": call.aux,
    }


def _numerics(call: ForwardCall, tuned: ForwardConfig, rows: int) -> ForwardConfig:
    """The given ones, else the tuned ones with as many Q tiles as there is work for."""
    if call.numerics is not None:
        return call.numerics
    return replace(tuned, q_tiles=1) if rows <= TILE_ROWS else tuned


def _cta_group(call: ForwardCall, rows: int) -> int:
    """2 where pairs of CTAs pay: long sequences without a mask, whose tiles are all alike."""
    plain = kernel_window(call) == (None, None) and call.mask_mod is None
    varlen = call.packed_q or call.packed_k or call.used_q or call.used_k
    plain = plain and (call.numerics is None or call.numerics.q_tiles == 2)
    fits = call.head_dim in PAIR_DIMS and call.head_dim_v == TILE_ROWS and rows > 2 * TILE_ROWS
    return 2 if plain and not varlen and fits else 1


def kernel_window(call: ForwardCall) -> Window:
    """The window as the kernel needs it: no side that hides nothing, and 32-bit bounds.

    Query i of Sq sees keys from i + Sk - Sq - left to i + Sk - Sq + right.
    """
    left, right = call.window
    most = call.rows_q + call.rows_k
    if left is not None:
        left = None if left >= call.rows_k - 1 else max(left, -most)
    if right is not None:
        # A right side of 0 is another kernel (causal), not another bound: it stays.
        right = None if right > 0 and right >= call.rows_q - 1 else max(right, -most)
    return left, right
