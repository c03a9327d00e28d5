"""Bugs of numbers.

Very low scores, the LSE, parts that are merged, NaN that nobody sees; scales and saturation in FP8.
"""

from __future__ import annotations

from fa4.testing.atlas.bug import Bug, ordinary

_FLASHINFER = "flashinfer-ai/flashinfer"

SCORES = (
    Bug(
        repository=_FLASHINFER,
        number=4267,
        versions="fixed by #4401",
        summary="Rows all of whose scores are below -50,000 were taken for masked, and 0.",
        cases=(ordinary(seqlen_q=3, seqlen_k=64, values="low"),),
    ),
    Bug(
        repository="google/torchax",
        number=39,
        versions="November 2025",
        summary="The call was sent to a kernel that does not scale by itself, without a scale.",
        cases=(ordinary(seqlen_q=3, seqlen_k=5),),
    ),
    Bug(
        repository="NVIDIA/cudnn-frontend",
        number=1131,
        summary="With a negative scale the maximum was that of the unscaled products, which is a "
        "minimum of the scores.",
        cases=(ordinary(seqlen_q=3, seqlen_k=64, softmax_scale=-16.0),),
    ),
    Bug(
        repository="pytorch/pytorch",
        number=101967,
        summary="NaN and infinities in keys and values that a mask hides reached the rows.",
        cases=(ordinary(seqlen_q=2, seqlen_k=129, window_size=(1, None), values="masked_nan"),),
        needs=("masked_nan",),
        group="robustness",
    ),
)

LSE = (
    Bug(
        repository="Dao-AILab/flash-attention",
        number=978,
        versions="June 2024, open",
        summary="The LSE of rows without a key was +inf, which spoils every merge.",
        cases=(ordinary(seqlen_q=4, seqlen_k=2, causal=True),),
        needs=("lse",),
    ),
    Bug(
        repository="pytorch/pytorch",
        number=181645,
        versions="FlexAttention with FlashAttention-4, April 2026",
        summary="The LSE was multiplied by ln 2 although it was natural already.",
        cases=(ordinary(seqlen_q=3, seqlen_k=5),),
        needs=("lse",),
    ),
    Bug(
        repository=_FLASHINFER,
        number=50,
        versions="January 2024",
        summary="Split keys were merged by LSEs that nobody had stored if the caller did not ask "
        "for the LSE.",
        cases=(ordinary(seqlen_q=1, seqlen_k=300, num_splits=2),),
        probe="lse_requested",
    ),
)

MERGES = (
    Bug(
        repository="zhuzilin/ring-flash-attention",
        number=22,
        summary="Parts were merged by log(1 + exp(x)), which overflows where the later part "
        "dominates.",
        cases=(ordinary(seqlen_q=3, seqlen_k=300, num_splits=2, values="low"),),
    ),
    Bug(
        repository="vllm-project/vllm",
        number=39148,
        versions="Triton kernel of April 2026",
        summary="Merging two parts without a key gave NaN.",
        cases=(ordinary(seqlen_q=300, seqlen_k=257, num_splits=2, causal=True),),
    ),
    Bug(
        repository="vllm-project/vllm",
        number=28840,
        versions="November 2025",
        summary="Parts whose LSE is natural were merged with powers of 2, or the other way round.",
        cases=(ordinary(seqlen_q=3, seqlen_k=300, num_splits=2),),
    ),
    Bug(
        repository=_FLASHINFER,
        number=4382,
        summary="The merge of split keys used a wrong row's weights when there are many rows.",
        cases=(ordinary(seqlen_q=130, seqlen_k=300, num_splits=2),),
    ),
)

NUMERICS = (*SCORES, *LSE, *MERGES)

DESCALES = (
    Bug(
        repository="flashinfer-ai/flashinfer",
        number=4979,
        versions="0.6.18",
        summary="Packed FP8 keys and values were used without their scales; paged ones with them.",
        cases=(ordinary(layout="packed", lengths=((3, 5),), dtype="e4m3", descale=True),),
    ),
    Bug(
        repository="sgl-project/sglang",
        number=34765,
        versions="MLA, August 2026",
        summary="The scale of K was given back in the first product, that of V never.",
        cases=(ordinary(seqlen_q=3, seqlen_k=5, heads_k=2, dtype="e4m3", descale=True, seed=2),),
    ),
    Bug(
        repository="vllm-project/vllm",
        number=51363,
        versions="the path to FlashAttention-4, before August 2026",
        summary="Scales of single heads were dropped on the way to the kernel.",
        cases=(ordinary(seqlen_q=3, seqlen_k=5, heads_k=2, dtype="e4m3", descale=True),),
    ),
)

VALUES = (
    Bug(
        repository="Dao-AILab/flash-attention",
        number=2577,
        versions="flash-attn-4 of May 2026, addressed by #2731",
        summary="Against a maximum that lags behind, P in e4m3 saturated while the row sum counted "
        "it in full: the heaviest keys lost most of their weight.",
        cases=(ordinary(seqlen_q=16, seqlen_k=300, softmax_scale=0.5, dtype="e4m3"),),
    ),
    Bug(
        repository="NVIDIA/cudnn-frontend",
        number=981,
        versions="September 2026, SM100 and SM103",
        summary="At head dim 256 a few elements in a thousand of O were far off.",
        cases=(ordinary(seqlen_q=33, seqlen_k=33, head_dim=256, head_dim_v=256, dtype="e4m3"),),
    ),
)

FP8 = (*DESCALES, *VALUES)
