"""Bugs of memory and shape: strides, head dims, groups of heads."""

from __future__ import annotations

from fa4.testing.atlas.bug import Bug, ordinary

_FLASH_ATTENTION = "Dao-AILab/flash-attention"

STRIDES = (
    Bug(
        repository=_FLASH_ATTENTION,
        number=355,
        versions="FlashAttention-2 of July 2023",
        summary="dO that is not contiguous was read as if it were.",
        cases=(ordinary(seqlen_q=4, seqlen_k=4, heads_k=2),),
        probe="gradients",
        arrangement="transposed dO",
    ),
    Bug(
        repository=_FLASH_ATTENTION,
        number=325,
        versions="FlashAttention-2 of July 2023",
        summary="The gradient of a plain sum, one number with strides of 0, was refused with an "
        "error.",
        cases=(ordinary(seqlen_q=5, seqlen_k=5, heads_k=2, causal=True),),
        probe="gradients",
        arrangement="expanded dO",
    ),
    Bug(
        repository=_FLASH_ATTENTION,
        number=2541,
        versions="flash-attn-4 of May 2026, open",
        summary="With head dim 256, dV was wrong where q, k and v are slices of one buffer.",
        cases=(ordinary(seqlen_q=4, seqlen_k=4, head_dim=256, head_dim_v=256, strided=8),),
        probe="gradients",
    ),
    Bug(
        repository="NVIDIA/cudnn-frontend",
        number=304,
        versions="cuDNN before 9.26",
        summary="The backward pass ignored the strides of the LSE.",
        cases=(ordinary(seqlen_q=4, seqlen_k=4, heads_k=2),),
        probe="gradients",
        arrangement="strided LSE",
        needs=("lse",),
    ),
)

HEADS = (
    Bug(
        repository="triton-lang/triton",
        number=621,
        versions="tutorial of August 2022",
        summary="Head dims above 64 were computed from their first 64 channels.",
        cases=(ordinary(seqlen_q=3, seqlen_k=5, head_dim=128, head_dim_v=128),),
    ),
    Bug(
        repository="flashinfer-ai/flashinfer",
        number=4299,
        summary="Head dims that are no multiple of 16 gave wrong results without a word.",
        cases=(ordinary(seqlen_q=3, seqlen_k=5, head_dim=72, head_dim_v=72),),
    ),
    Bug(
        repository=_FLASH_ATTENTION,
        number=2553,
        versions="flash-attn-4 on SM120",
        summary="Single elements of grouped heads were far off while the norm of O was right.",
        cases=(ordinary(seqlen_q=3, seqlen_k=5, group=2),),
    ),
    Bug(
        repository="flashinfer-ai/flashinfer",
        number=2896,
        versions="0.6.17, open",
        summary="Decoding seven bf16 heads per KV head gave degenerate output.",
        cases=(ordinary(seqlen_q=1, seqlen_k=64, heads_k=2, group=7),),
    ),
)

LAYOUTS = (*STRIDES, *HEADS)
