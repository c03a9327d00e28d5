"""The foreign kernels that run: which, on what sizes, and what is known of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fa4.testing import Case
from tests.conformance import attention, gemms, small
from tests.conformance.gemms import Gemm
from tests.conformance.program import Program


@dataclass(frozen=True)
class Foreign:
    """One kernel on one problem. family: the row of the table of results."""

    name: str
    family: str
    build: Callable[[], Program]


def _gemms() -> list[Foreign]:
    def tutorial(number: str, *size: int) -> Foreign:
        return Foreign(
            f"tutorial_gemm_{number}",
            "tutorial GEMM",
            lambda: gemms.tutorial_gemm(number, *size),
        )

    def dense(name: str, file: str, family: str, **options: Any) -> Foreign:
        return Foreign(name, family, lambda: gemms.dense_gemm(file, Gemm(**options)))

    pair = {"tiler": (256, 128), "cluster": (2, 1), "two_ctas": True}
    persistent = "dense_gemm_persistent"
    return [
        tutorial("0", 128, 256, 128),
        tutorial("1", 256, 256, 128),
        tutorial("2", 512, 256, 128),
        tutorial("3", 1024, 512, 64),
        tutorial("3_1", 1024, 512, 64),
        tutorial("5", 1024, 512, 64),
        Foreign("tutorial_gemm_6", "tutorial GEMM", lambda: gemms.tutorial_gemm_6(1024, 512, 128)),
        dense("dense", "dense_gemm", "dense GEMM, 1 CTA", mnkl=(256, 128, 192, 1)),
        dense(
            "dense_mn_major", "dense_gemm", "dense GEMM, 1 CTA",
            mnkl=(128, 128, 64, 2), majors="mnm", output="Float16", tma_store=False,
        ),
        dense(
            "dense_edges", "dense_gemm", "dense GEMM, 1 CTA", mnkl=(200, 136, 72, 1), inputs="BFloat16",
        ),
        dense("dense_2cta", "dense_gemm", "dense GEMM, 2 CTAs", mnkl=(256, 256, 192, 1), **pair),
        dense(
            "dense_2cta_fp8", "dense_gemm", "dense GEMM, 2 CTAs",
            mnkl=(512, 128, 256, 1), inputs="Float8E4M3FN", cluster=(4, 1), tiler=(256, 128),
            two_ctas=True,
        ),
        dense("persistent", persistent, "persistent GEMM", mnkl=(256, 384, 128, 1), clusters=2),
        dense(
            "persistent_2cta", persistent, "persistent GEMM", mnkl=(512, 256, 128, 1), **pair,
        ),
        dense(
            "persistent_prefetch", f"{persistent}_prefetch", "persistent GEMM",
            mnkl=(256, 256, 128, 1), clusters=2,
        ),
        dense(
            "persistent_dynamic", f"{persistent}_dynamic", "dynamic persistent GEMM",
            mnkl=(384, 384, 64, 1),
        ),
        dense(
            "persistent_dynamic_2cta", f"{persistent}_dynamic", "dynamic persistent GEMM",
            mnkl=(512, 384, 64, 1), **pair,
        ),
        dense(
            "software_pipeline", "dense_gemm_software_pipeline", "software-pipelined GEMM",
            mnkl=(256, 128, 256, 1),
        ),
        Foreign(
            "grouped_smem", "grouped GEMM",
            lambda: gemms.grouped_gemm(((128, 128, 64), (256, 128, 128), (128, 256, 64)), True),
        ),
        Foreign(
            "grouped_gmem", "grouped GEMM",
            lambda: gemms.grouped_gemm(((128, 128, 64), (256, 128, 128), (128, 256, 64)), False),
        ),
    ]  # fmt: skip


def _small() -> list[Foreign]:
    return [
        Foreign("rmsnorm", "rmsnorm", lambda: small.rmsnorm(8, 512, "BFloat16")),
        Foreign("rmsnorm_warps", "rmsnorm", lambda: small.rmsnorm(4, 4096, "Float16")),
        Foreign("rmsnorm_cluster", "rmsnorm", lambda: small.rmsnorm(2, 16640, "BFloat16")),
        Foreign("reduce_warp", "reduce", lambda: small.row_maxima(8, 32, 1)),
        Foreign("reduce_block", "reduce", lambda: small.row_maxima(4, 128, 1)),
        Foreign("reduce_cluster", "reduce", lambda: small.row_maxima(4, 64, 4)),
        Foreign("pdl", "dependent launch", lambda: small.dependent_launch(16, 256)),
        Foreign("mamba2_ssd", "mamba2_ssd", lambda: small.mamba2_ssd(1, 1, 2, 2, False)),
        Foreign("mamba2_ssd_d", "mamba2_ssd", lambda: small.mamba2_ssd(1, 2, 2, 2, True)),
    ]


def _attention(dtype: str, **fields: Any) -> Case:
    """A dense case whose head dims are equal unless given."""
    dim = fields.setdefault("head_dim", 64)
    fields.setdefault("head_dim_v", dim)
    return Case(dtype=dtype, **fields)


def _fmha() -> list[Foreign]:
    def forward(name: str, persistent: bool = False, **fields: Any) -> Foreign:
        return Foreign(
            f"fmha_{name}",
            "fmha forward",
            lambda: attention.fmha(_attention("fp16", **fields), persistent),
        )

    def backward(name: str, ordered: bool = True, **fields: Any) -> Foreign:
        return Foreign(
            f"fmha_bwd_{name}",
            "fmha backward",
            lambda: attention.fmha_backward(_attention("bf16", **fields), ordered),
        )

    return [
        forward("d64", seqlen_q=256, seqlen_k=256),
        forward("causal", seqlen_q=384, seqlen_k=384, causal=True),
        forward("gqa_edges", seqlen_q=200, seqlen_k=300, group=2),
        forward(
            "persistent", True, seqlen_q=256, seqlen_k=128, heads_k=2, group=2, head_dim=128,
        ),
        backward("d64", seqlen_q=256, seqlen_k=128),
        backward("causal", seqlen_q=256, seqlen_k=256, causal=True),
        backward("d128", seqlen_q=128, seqlen_k=256, head_dim=128, group=2),
    ]  # fmt: skip


def _flash() -> list[Foreign]:
    def forward(name: str, family: str, fields: dict[str, Any], **options: Any) -> Foreign:
        return Foreign(
            f"fa4_{name}",
            f"flash-attn-4 forward, {family}",
            lambda: attention.flash_forward(_attention("bf16", **fields), **options),
        )

    def backward(name: str, family: str, fields: dict[str, Any], **options: Any) -> Foreign:
        return Foreign(
            f"fa4_bwd_{name}",
            f"flash-attn-4 backward, {family}",
            lambda: attention.flash_backward(_attention("bf16", **fields), **options),
        )

    def size(rows: int, keys: int, dim: int = 64, **fields: Any) -> dict[str, Any]:
        return {"seqlen_q": rows, "seqlen_k": keys, "head_dim": dim, **fields}

    mla = {"head_dim_v": 128}
    packed = {"layout": "packed", "lengths": ((100, 140), (1, 64), (200, 200))}
    pages = {"layout": "paged", "lengths": ((40, 200), (3, 300))}
    one, two = "1 CTA", "2 CTAs"
    return [
        forward("d64", one, size(256, 384, heads_k=3, batch=2)),
        forward("d64_causal", one, size(300, 300, causal=True)),
        forward("d128_2cta", two, size(768, 256, 128, heads_k=2)),
        forward("d128_causal", one, size(256, 256, 128, causal=True)),
        forward("d192", two, size(512, 256, 192, **mla)),
        forward("d192_causal", one, size(256, 256, 192, causal=True, **mla)),
        forward("gqa", one, size(70, 256, group=4)),
        forward("gqa_causal", one, size(130, 200, 128, group=2, heads_k=2, causal=True)),
        forward("varlen", "varlen", dict(packed)),
        forward("varlen_causal", "varlen", {**packed, "causal": True, "group": 2}),
        forward("paged", "paged", {**pages, "page_size": 128}),
        forward("paged_small", "paged", {**pages, "page_size": 16, "causal": True}),
        forward("split", "split-KV", size(128, 512, num_splits=3)),
        forward("split_varlen", "split-KV", {**packed, "num_splits": 2}),
        backward("d64", one, size(256, 256)),
        backward("d64_causal_gqa", one, size(200, 200, causal=True, group=2)),
        backward("d128_2cta", two, size(256, 256, 128)),
        backward("d128_causal", two, size(256, 256, 128, causal=True)),
        backward("deterministic", "deterministic", size(256, 256), deterministic=True),
        backward(
            "deterministic_2cta", "deterministic", size(256, 512, 128), deterministic=True
        ),
    ]


CASES = [*_gemms(), *_small(), *_fmha(), *_flash()]
