"""The foreign kernels that run: which, on what sizes, and what is known of them.

The sizes are the smallest that go through all of a kernel's code: several stages of its pipelines,
and at least two work tiles for each CTA of a persistent kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fa4.testing import Case
from tests.conformance import attention, gemms, latent, scaled, small
from tests.conformance.gemms import Gemm
from tests.conformance.latent import Latent
from tests.conformance.program import Program


@dataclass(frozen=True)
class Foreign:
    """One kernel on one problem.

    family: what it belongs to in the results. known: kinds of findings that are right, each with
    the reason. judged: False if those leave no outputs to compare. refused: why it cannot be
    launched, as the error says it. arch: what it is compiled for.
    """

    name: str
    family: str
    build: Callable[[], Program]
    known: Mapping[str, str] = field(default_factory=dict)
    judged: bool = True
    refused: str = ""
    arch: str = "sm_100a"


HOPPER = "sm_90a"
Fields = dict[str, Any]

ROWS_BEYOND = {
    "uninitialised": "threads of rows beyond the last read shared memory that no copy has filled; "
    "nothing is made of it"
}
EARLY_DEALLOC = {
    "race": "the compute warps deallocate tensor memory without waiting for the MMA of the last dQ "
    "and for the warps that read it",
    "tmem": "tcgen05.ld of the last dQ after the deallocation",
}
UNFENCED_COPIES = {
    "missing-proxy-fence": "cp.async fills shared memory through the generic proxy (PTX ISA "
    "9.7.9.25.3.1), tcgen05.mma reads it through the async proxy (9.7.16.6.5), and there is no "
    "fence.proxy.async between the two"
}
UNFINISHED_STORES = {
    "exit": "nothing waits until the last copies of dK and dV out of shared memory have read it, "
    "so that the CTA may exit before"
}
UNGUARDED_EXCHANGE = {
    "race": "two softmax warps exchange row maxima through one word each with one barrier a step: "
    "a warp may write the next maximum before its partner has read the last one"
}
DOUBLE_ARRIVAL = {
    "barrier": "two barrier.cluster.arrive before the first wait; each thread must arrive only "
    "once before the barrier completes (PTX ISA 9.7.13.3)"
}
NO_MORE_TILES = {
    "division": "a CTA without a further tile splits its index by the number of tiles of a group "
    "that was not found, which is 0, before it looks whether there is one; nothing is made of it"
}
FEW_CLUSTERS = {
    "division": "with less than 8 clusters along M the index is divided by the number of clusters "
    "in whole groups of 8, which is 0, before it looks whether there are any; it is not used"
}
LATE_ZEROS = {
    "missing-fence": "the compiler has put the zeros of the accumulator behind wgmma.fence, whose "
    "effect on registers it does not know; ptxas moves them before it"
}


def tutorial(number: str, *sizes: int, **facts: Any) -> Foreign:
    """A GEMM of NVIDIA's tutorial."""
    build = gemms.tutorial_gemm_6 if number == "6" else lambda *s: gemms.tutorial_gemm(number, *s)
    return Foreign(f"tutorial_gemm_{number}", "tutorial GEMM", lambda: build(*sizes), **facts)


def dense(name: str, family: str, gemm: Gemm, file: str = "dense_gemm") -> Foreign:
    """One of NVIDIA's dense GEMMs."""
    return Foreign(name, f"{family} GEMM", lambda: gemms.dense_gemm(file, gemm))


def grouped(name: str, in_smem: bool) -> Foreign:
    """NVIDIA's grouped GEMM, with tensor maps made in shared or in global memory."""
    sizes = ((128, 128, 64), (256, 128, 128), (128, 256, 64))
    return Foreign(name, "grouped GEMM", lambda: gemms.grouped_gemm(sizes, in_smem), NO_MORE_TILES)


def hopper(name: str, gemm: Gemm, file: str = "dense_gemm", **facts: Any) -> Foreign:
    """One of NVIDIA's dense GEMMs for Hopper."""
    build = partial(gemms.hopper_gemm, file, gemm)
    return Foreign(f"hopper_{name}", "Hopper GEMM", build, arch=HOPPER, **facts)


PAIR: Fields = {"tiler": (256, 128), "cluster": (2, 1), "two_ctas": True}
PERSISTENT = "dense_gemm_persistent"
DYNAMIC = "dense_gemm_persistent_dynamic"
PIPELINED = "dense_gemm_software_pipeline"

GEMMS = [
    tutorial("0", 128, 256, 128),
    tutorial("1", 256, 256, 128),
    tutorial("2", 512, 256, 128),
    tutorial("3", 1024, 512, 64),
    tutorial("3_1", 1024, 512, 64),
    tutorial("5", 1024, 512, 64),
    tutorial("6", 1024, 512, 128),
    dense("dense", "1-CTA", Gemm(mnkl=(256, 128, 192, 1))),
    dense(
        "dense_mn_major",
        "1-CTA",
        Gemm(mnkl=(128, 128, 64, 2), majors="mnm", output="Float16", tma_store=False),
    ),
    dense("dense_edges", "1-CTA", Gemm(mnkl=(200, 136, 72, 1), inputs="BFloat16")),
    dense("dense_2cta", "2-CTA", Gemm(mnkl=(256, 256, 192, 1), **PAIR)),
    dense(
        "dense_2cta_fp8",
        "2-CTA",
        Gemm(mnkl=(512, 128, 256, 1), inputs="Float8E4M3FN", **{**PAIR, "cluster": (4, 1)}),
    ),
    dense("persistent", "persistent", Gemm(mnkl=(256, 384, 128, 1), clusters=2), PERSISTENT),
    dense("persistent_2cta", "persistent", Gemm(mnkl=(512, 256, 128, 1), **PAIR), PERSISTENT),
    dense(
        "persistent_prefetch",
        "persistent",
        Gemm(mnkl=(256, 256, 128, 1), clusters=2),
        "dense_gemm_persistent_prefetch",
    ),
    dense("dynamic", "dynamic persistent", Gemm(mnkl=(384, 384, 64, 1)), DYNAMIC),
    dense("dynamic_2cta", "dynamic persistent", Gemm(mnkl=(512, 384, 64, 1), **PAIR), DYNAMIC),
    dense("software_pipeline", "software-pipelined", Gemm(mnkl=(256, 128, 256, 1)), PIPELINED),
    grouped("grouped_smem", True),
    grouped("grouped_gmem", False),
    hopper("dense", Gemm(mnkl=(512, 128, 192, 1), tiler=(64, 128))),
    hopper(
        "dense_mn_major",
        Gemm(mnkl=(128, 128, 64, 2), majors="mnm", output="Float16"),
        known=FEW_CLUSTERS,
    ),
    hopper("dense_fp8", Gemm(mnkl=(512, 64, 256, 1), inputs="Float8E4M3FN", tiler=(64, 64))),
    hopper(
        "persistent",
        Gemm(mnkl=(512, 512, 128, 1), tiler=(128, 256), cluster=(2, 1)),
        "dense_gemm_persistent",
        known=LATE_ZEROS,
    ),
]

MX8, MX4, NV4 = (
    ("Float8E4M3FN", "Float8E8M0FNU", 32),
    ("Float4E2M1FN", "Float8E8M0FNU", 32),
    ("Float4E2M1FN", "Float8E4M3FN", 16),
)


def block_scaled(name: str, *arguments: Any) -> Foreign:
    """NVIDIA's block-scaled GEMM."""
    build = partial(scaled.block_scaled_gemm, *arguments)
    return Foreign(f"block_scaled_{name}", "block-scaled GEMM", build)


SCALED = [
    block_scaled("mxfp8", (128, 128, 256), *MX8),
    block_scaled("mxfp8_2cta", (256, 256, 256), "Float8E5M2", *MX8[1:], (256, 128), (2, 1)),
    block_scaled("mxfp4", (128, 128, 512), *MX4),
    block_scaled("nvfp4", (128, 192, 512), *NV4, (128, 192)),
    block_scaled("nvfp4_2cta", (256, 256, 512), *NV4, (256, 128), (2, 1)),
]

REFUSED = [
    tutorial("4", 1024, 512, 64, refused="426496 bytes of shared memory, at most 232448"),
]


def rmsnorm(name: str, *sizes: Any, **facts: Any) -> Foreign:
    """NVIDIA's rmsnorm."""
    return Foreign(name, "rmsnorm", lambda: small.rmsnorm(*sizes), **facts)


def reduction(name: str, *sizes: int) -> Foreign:
    """NVIDIA's functions for sums and maxima of rows."""
    return Foreign(name, "reduce", lambda: small.row_maxima(*sizes))


SMALL = [
    rmsnorm("rmsnorm", 8, 512, "BFloat16"),
    rmsnorm("rmsnorm_warps", 4, 4096, "Float16"),
    rmsnorm("rmsnorm_cluster", 2, 16640, "BFloat16"),
    rmsnorm("rmsnorm_rows_beyond", 6, 512, "BFloat16", known=ROWS_BEYOND),
    reduction("reduce_warp", 8, 32, 1),
    reduction("reduce_block", 4, 128, 1),
    reduction("reduce_cluster", 4, 64, 4),
    Foreign("dependent_launch", "dependent launch", lambda: small.dependent_launch(16, 256)),
    Foreign("mamba2_ssd", "mamba2_ssd", lambda: small.mamba2_ssd(1, 1, 2, 2, False)),
    Foreign("mamba2_ssd_weighted", "mamba2_ssd", lambda: small.mamba2_ssd(1, 2, 2, 2, True)),
]


def problem(rows: int, keys: int, dim: int = 64, **fields: Any) -> Fields:
    """The fields of a dense attention problem; head dims are equal unless given."""
    return {"seqlen_q": rows, "seqlen_k": keys, "head_dim": dim, "head_dim_v": dim, **fields}


def fmha(name: str, fields: Fields, persistent: bool = False) -> Foreign:
    """NVIDIA's forward attention."""
    case = Case(dtype="fp16", **fields)
    return Foreign(f"fmha_{name}", "fmha forward", lambda: attention.fmha(case, persistent))


def fmha_backward(name: str, fields: Fields, ordered: bool = True, **facts: Any) -> Foreign:
    """NVIDIA's backward attention."""
    case = Case(dtype="bf16", **fields)
    return Foreign(
        f"fmha_backward_{name}",
        "fmha backward",
        lambda: attention.fmha_backward(case, ordered),
        **facts,
    )


FMHA = [
    fmha("d64", problem(256, 256)),
    fmha("causal", problem(384, 384, causal=True)),
    fmha("gqa_edges", problem(200, 300, group=2)),
    fmha("persistent", problem(256, 128, 128, heads_k=2, group=2), persistent=True),
    fmha_backward("d64", problem(256, 128)),
    fmha_backward("causal", problem(256, 256, causal=True)),
    fmha_backward("d128_gqa", problem(128, 256, 128, group=2)),
    fmha_backward(
        "unmodified", problem(256, 128), ordered=False, known=EARLY_DEALLOC, judged=False
    ),
]


def flash(
    name: str, kind: str, fields: Fields, known: Mapping[str, str] | None = None, **options: Any
) -> Foreign:
    """flash-attn-4 forward."""
    case = Case(dtype="bf16", **fields)
    return Foreign(
        f"fa4_{name}",
        f"flash-attn-4 forward, {kind}",
        lambda: attention.flash_forward(case, **options),
        known or {},
    )


def flash_backward(
    name: str, kind: str, fields: Fields, known: Mapping[str, str] | None = None, **options: Any
) -> Foreign:
    """flash-attn-4 backward."""
    case = Case(dtype="bf16", **fields)
    return Foreign(
        f"fa4_backward_{name}",
        f"flash-attn-4 backward, {kind}",
        lambda: attention.flash_backward(case, **options),
        known or {},
    )


def packed(*lengths: tuple[int, int], **fields: Any) -> Fields:
    """Sequences (queries, keys) one behind the other, head dim 64."""
    return {"layout": "packed", "lengths": lengths, "head_dim": 64, "head_dim_v": 64, **fields}


def pages(size: int, **fields: Any) -> Fields:
    """Keys and values in pages of `size` keys."""
    lengths = ((40, 200), (3, 300))
    return packed(*lengths, **{"layout": "paged", "page_size": size, **fields})


RAGGED = ((100, 140), (1, 64), (200, 200))
WHOLE = ((112, 140), (16, 64), (208, 200))  # the combining kernel takes 16 rows at a time
WIDE: Fields = {"head_dim_v": 128}


def flash_hopper(name: str, fields: Fields, backward: bool = False) -> Foreign:
    """flash-attn-4 on Hopper."""
    run = attention.flash_backward if backward else attention.flash_forward
    build = partial(run, Case(dtype="bf16", **fields), arch=HOPPER)
    kind = "backward" if backward else "forward"
    return Foreign(f"fa4_sm90_{name}", f"flash-attn-4 {kind}, Hopper", build, arch=HOPPER)


FLASH = [
    flash("d64", "1 CTA", problem(256, 384, heads_k=3, batch=2)),
    flash("d64_causal", "1 CTA", problem(300, 300, causal=True)),
    flash("d128", "2 CTAs", problem(768, 256, 128, heads_k=2)),
    flash("d128_causal", "1 CTA", problem(256, 256, 128, causal=True)),
    flash("d192", "2 CTAs", problem(512, 256, 192) | WIDE),
    flash("d192_causal", "1 CTA", problem(256, 256, 192, causal=True) | WIDE),
    flash("gqa", "1 CTA", problem(70, 256, group=4)),
    flash("gqa_causal", "1 CTA", problem(130, 200, 128, group=2, heads_k=2, causal=True)),
    flash("varlen", "varlen", packed(*RAGGED)),
    flash("varlen_causal", "varlen", packed(*RAGGED, causal=True, group=2)),
    flash("paged", "paged", pages(128)),
    flash("paged_causal", "paged", pages(128, causal=True, group=2)),
    flash("paged_by_cp_async", "paged", pages(16, causal=True), UNFENCED_COPIES),
    flash("split", "split-KV", problem(128, 512, num_splits=3)),
    flash("split_varlen", "split-KV", packed(*WHOLE, num_splits=2)),
    flash("split_rows_beyond", "split-KV", packed(*RAGGED, num_splits=2), ROWS_BEYOND),
    flash_backward("d64", "1 CTA", problem(256, 256), UNFINISHED_STORES),
    flash_backward(
        "d64_gqa", "1 CTA", problem(200, 200, causal=True, group=2), UNFINISHED_STORES
    ),
    flash_backward("d128", "2 CTAs", problem(256, 256, 128), UNFINISHED_STORES),
    flash_backward(
        "d128_causal", "2 CTAs", problem(256, 256, 128, causal=True), UNFINISHED_STORES
    ),
    flash_backward(
        "deterministic", "deterministic", problem(256, 256), UNFINISHED_STORES, deterministic=True
    ),
    flash_backward(
        "deterministic_2cta", "deterministic", problem(256, 512, 128), UNFINISHED_STORES,
        deterministic=True,
    ),
    flash_hopper("d64_gqa_causal", problem(200, 300, causal=True, group=2)),
    flash_hopper("d128", problem(128, 256, 128)),
    flash_hopper("varlen", packed((100, 140), (1, 64), (130, 200), causal=True)),
    flash_hopper("backward_d64_gqa", problem(200, 200, causal=True, group=2), backward=True),
    flash_hopper("backward_d128", problem(128, 256, 128, causal=True), backward=True),
]  # fmt: skip


def mla_decode(name: str, problem: Latent, *layout: Any) -> Foreign:
    """NVIDIA's latent attention for decoding."""
    return Foreign(
        name, "mla decode", lambda: latent.mla_decode(problem, *layout), UNGUARDED_EXCHANGE
    )


def flash_mla(name: str, problem: Latent, **facts: Any) -> Foreign:
    """flash-attn-4's latent attention."""
    family = "flash-attn-4 forward, latent"
    return Foreign(f"fa4_mla_{name}", family, lambda: latent.flash_mla(problem), **facts)


LATENT = [
    mla_decode("mla_decode", Latent(1, 1, 256, 128, "Float16"), 1, 128, False),
    mla_decode("mla_decode_split", Latent(2, 1, 512, 128, "Float16"), 2, 64, True),
    flash_mla("1cta", Latent(2, 1, 256, 64, "BFloat16")),
    flash_mla(
        "2cta",
        Latent(1, 3, 256, 128, "BFloat16", causal=True),
        known=DOUBLE_ARRIVAL,
        judged=False,
    ),
]

CASES = [*GEMMS, *SCALED, *SMALL, *FMHA, *FLASH, *LATENT]
