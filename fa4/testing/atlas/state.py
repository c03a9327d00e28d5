"""Bugs of state: what one call leaves behind for the next."""

from __future__ import annotations

from fa4.testing.atlas.bug import Bug, ordinary

_PLAIN = {"seqlen_q": 3, "seqlen_k": 5}

FIRST_CALL = (
    Bug(
        repository="Dao-AILab/flash-attention",
        number=2353,
        summary="A length that may change was compiled in as the first call had it.",
        cases=(ordinary(seqlen_q=3, seqlen_k=5), ordinary(seqlen_q=3, seqlen_k=9)),
    ),
    Bug(
        repository="NVIDIA/TensorRT-LLM",
        number=18443,
        versions="August 2026",
        summary="A captured graph was replayed with the plan of the lengths at its capture.",
        cases=(
            ordinary(layout="paged", lengths=((1, 5), (1, 3))),
            ordinary(layout="paged", lengths=((1, 9), (1, 7))),
        ),
    ),
    Bug(
        repository="local-inference-lab/b12x",
        number=63,
        versions="before the fix of July 2026",
        summary="A scale of exactly 1 was compiled out, and the key of the cache did not say so: "
        "later calls with another scale went without it.",
        cases=(
            ordinary(**_PLAIN, softmax_scale=1.0),
            ordinary(**_PLAIN, softmax_scale=0.3),
        ),
    ),
    Bug(
        repository="Dao-AILab/flash-attention",
        number=2298,
        versions="flash-attn-4 before March 2026",
        summary="A batch of one with stride 0 compiled a kernel that the next, larger batch found "
        "and could not use.",
        cases=(ordinary(**_PLAIN), ordinary(**_PLAIN, batch=2)),
        arrangement="batch of stride 0",
    ),
    Bug(
        repository="flashinfer-ai/flashinfer",
        number=4146,
        versions="July 2026, open",
        summary="Strides were not in the key of the cache: keys that lie apart were read as the "
        "first call's, which lay close.",
        cases=(ordinary(**_PLAIN), ordinary(**_PLAIN, strided=8)),
    ),
    Bug(
        repository="flashinfer-ai/flashinfer",
        number=4270,
        versions="July 2026, open",
        summary="The element type was not in the key of the cache: fp16 was read as the bf16 of "
        "the first call.",
        cases=(
            ordinary(seqlen_q=1, seqlen_k=5),
            ordinary(seqlen_q=1, seqlen_k=5, dtype="fp16"),
        ),
    ),
)

SHARED = (
    Bug(
        repository="sgl-project/sglang",
        number=25957,
        summary="Two calls shared a workspace, and the second wrote over what the first still "
        "needed.",
        cases=(ordinary(**_PLAIN), ordinary(**_PLAIN, seed=1)),
    ),
    Bug(
        repository="huggingface/diffusers",
        number=14265,
        versions="up to 0.39",
        summary="The backward pass took K and V as they were saved in the first step, in every "
        "step.",
        cases=(ordinary(**_PLAIN), ordinary(**_PLAIN, seed=1)),
        probe="gradients",
    ),
)

STATE = (*FIRST_CALL, *SHARED)
