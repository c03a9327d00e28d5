"""Bugs of masks and of what changes scores.

Where windows and causal masks begin and end, who reads which part of a mask; softcap and sinks.
"""

from __future__ import annotations

from fa4.testing.atlas.bug import Bug, ordinary

_FLASH_ATTENTION = "Dao-AILab/flash-attention"

EDGES = (
    Bug(
        repository=_FLASH_ATTENTION,
        number=895,
        summary="A right side of the window beyond the number of keys was cut to that number, "
        "which is too few for the first rows when there are more rows than keys.",
        cases=(ordinary(seqlen_q=9, seqlen_k=3, window_size=(None, 8)),),
    ),
    Bug(
        repository="huggingface/transformers",
        number=39408,
        versions="main of July 2025, fixed by #40163",
        summary="A sliding window of w keys was passed on as w keys to the left of the row's own: "
        "one too many.",
        cases=(ordinary(seqlen_q=5, seqlen_k=5, causal=True, window_size=(2, None)),),
    ),
    Bug(
        repository="vllm-project/vllm",
        number=3385,
        summary="The local mask of packed sequences showed one key fewer on the left than the "
        "window of the model.",
        cases=(ordinary(layout="packed", lengths=((5, 5),), causal=True, window_size=(2, None)),),
    ),
    Bug(
        repository="NVIDIA/TransformerEngine",
        number=3528,
        versions="with a flash-attn-4 that has flash-attention #2490",
        summary="An unbounded left side was written -1 and taken for an offset, so that a causal "
        "call saw no key at all: O was 0 everywhere, LSE -inf.",
        cases=(ordinary(seqlen_q=4, seqlen_k=4, causal=True, window_size=(-1, 0)),),
    ),
    Bug(
        repository="pytorch/executorch",
        number=22426,
        versions="MLX delegate, September 2026",
        summary="The causal mask was anchored at the other corner than the caller's: with one row "
        "and many keys the row saw another set of them.",
        cases=(ordinary(seqlen_q=1, seqlen_k=16, causal=True),),
    ),
    Bug(
        repository="jax-ml/jax",
        number=19237,
        versions="0.4.21",
        summary="The causal flag of the TPU kernel had no effect.",
        cases=(ordinary(seqlen_q=4, seqlen_k=4, causal=True),),
    ),
    Bug(
        repository="jax-ml/jax",
        number=24491,
        summary="The Pallas kernel gave wrong results where the numbers of rows and keys differed.",
        cases=(ordinary(seqlen_q=3, seqlen_k=130),),
    ),
    Bug(
        repository="jax-ml/jax",
        number=27224,
        versions="March 2025, open",
        summary="Where the number of keys was no multiple of the block, what was padded took part "
        "in the softmax.",
        cases=(ordinary(seqlen_q=1, seqlen_k=65),),
    ),
    Bug(
        repository="facebookresearch/xformers",
        number=1185,
        versions="0.0.28.post3",
        summary="Moving a block-diagonal causal mask to another device returned one that was no "
        "longer causal.",
        cases=(ordinary(layout="packed", lengths=((2, 2), (2, 2)), causal=True),),
    ),
    Bug(
        repository="vllm-project/tpu-inference",
        number=2756,
        versions="before the fix of May 2026",
        summary="Positions were kept in 16 bits, so that masks broke beyond 32,767 keys.",
        cases=(ordinary(seqlen_q=1, seqlen_k=32_800, causal=True, window_size=(128, None)),),
    ),
)

EMPTY = (
    Bug(
        repository="ROCm/aiter",
        number=5364,
        summary="A row whose first tile of keys is masked as a whole multiplied 0 by NaN, and kept "
        "the NaN in all later tiles.",
        cases=(ordinary(seqlen_q=3, seqlen_k=130, window_size=(0, 0)),),
    ),
    Bug(
        repository="pytorch/pytorch",
        number=103963,
        summary="Rows that a mask leaves without any key were NaN.",
        cases=(ordinary(seqlen_q=4, seqlen_k=4, mask_mod="odd_rows_empty"),),
    ),
)

HEADS_AND_BATCH = (
    Bug(
        repository=_FLASH_ATTENTION,
        number=2528,
        versions="SM80 and SM120 kernels, April 2026, open",
        summary="Grouped heads were masked as if their rows were packed together, so that all rows "
        "but the first had the causal limit of an earlier one.",
        cases=(ordinary(seqlen_q=3, seqlen_k=3, group=2, causal=True),),
    ),
    Bug(
        repository="facebookresearch/xformers",
        number=952,
        summary="A mask that differs from head to head was read at the wrong head when query heads "
        "share keys.",
        cases=(ordinary(seqlen_q=4, seqlen_k=4, group=4, mask_mod="stripes"),),
    ),
    Bug(
        repository="pytorch/pytorch",
        number=139462,
        versions="November 2024, open",
        summary="Compiled FlexAttention returned zeros for all batch entries but the first when "
        "the rows were far fewer than a block of the mask.",
        cases=(ordinary(batch=2, seqlen_q=2, seqlen_k=2, mask_mod="stripes"),),
    ),
    Bug(
        repository="pytorch/pytorch",
        number=171271,
        versions="FlexAttention with FlashAttention-4, December 2025",
        summary="Block lists of grouped heads were read at the row block divided by the group, "
        "although the rows were not packed.",
        cases=(
            ordinary(
                seqlen_q=257, seqlen_k=257, group=2, sparse_block=(128, 128), mask_mod="stripes"
            ),
        ),
    ),
    Bug(
        repository="pytorch/pytorch",
        number=188484,
        versions="FlexAttention with FlashAttention-4",
        summary="Block lists of another block size than the default were read as if they had the "
        "default one.",
        cases=(
            ordinary(
                seqlen_q=300, seqlen_k=257, sparse_block=(256, 128), mask_mod="stripes", seed=4
            ),
        ),
    ),
)

MASKS = (*EDGES, *EMPTY, *HEADS_AND_BATCH)

SOFTCAP = (
    Bug(
        repository="sgl-project/sgl-kernel-xpu",
        number=491,
        versions="before the fix of September 2026",
        summary="softcap was accepted and handed on, but never applied.",
        cases=(ordinary(seqlen_q=3, seqlen_k=5, softcap=1.0),),
    ),
    Bug(
        repository=_FLASH_ATTENTION,
        number=2396,
        versions="flash-attn-4 of March 2026, fixed by #2402",
        summary="softcap returned the scaled score times its tanh, in place of the cap times the "
        "tanh: nothing was capped.",
        cases=(ordinary(seqlen_q=3, seqlen_k=5, softcap=15.0),),
    ),
)

SINKS = (
    Bug(
        repository="ikawrakow/ik_llama.cpp",
        number=2344,
        summary="With a sink, rows without a visible key were not 0.",
        cases=(ordinary(seqlen_q=4, seqlen_k=2, causal=True, sink=1.5),),
    ),
    Bug(
        repository=_FLASH_ATTENTION,
        number=2752,
        versions="SM80 and SM120, as reviewed in August 2026, open",
        summary="The sink took no part in the maximum: far above the scores it made the LSE inf.",
        cases=(ordinary(seqlen_q=2, seqlen_k=2, sink=100.0),),
        needs=("lse",),
    ),
    Bug(
        repository="NVIDIA/TransformerEngine",
        number=2541,
        versions='context parallelism "p2p", fixed by #3551 (open)',
        summary="The learnable sink was dropped on the way to the kernel: O was that without one, "
        "and the sink's gradient exactly 0.",
        cases=(ordinary(seqlen_q=4, seqlen_k=4, sink=3.0),),
        probe="gradients",
    ),
    Bug(
        repository="flashinfer-ai/flashinfer",
        number=4525,
        summary="The sinks were read beyond their end where the number of heads is no multiple of "
        "the tile.",
        cases=(ordinary(seqlen_q=2, seqlen_k=2, heads_k=3, group=2, sink=1.5),),
    ),
)

MODIFICATIONS = (*SOFTCAP, *SINKS)
