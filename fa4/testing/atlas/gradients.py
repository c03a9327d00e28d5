"""Bugs of the backward pass; what the forward pass gave was right in all of them."""

from __future__ import annotations

from fa4.testing.atlas.bug import Bug, ordinary

_FLASH_ATTENTION = "Dao-AILab/flash-attention"
_CUDNN = "NVIDIA/cudnn-frontend"

NOT_FINITE = (
    Bug(
        repository="pytorch/pytorch",
        number=196678,
        versions="2.11 and later, the default (cuDNN) on H100 and H200",
        summary="dQ was NaN if a mask is passed, the number of keys is 64 modulo 128 and an LSE is "
        "below -88.7: keys beyond the end scored 0, and exp(0 - LSE) overflowed.",
        cases=(ordinary(seqlen_q=64, seqlen_k=64, window_size=(64, 64), values="low"),),
        probe="gradients",
    ),
    Bug(
        repository=_CUDNN,
        number=1072,
        versions="cuDNN 9.25.1.1 and 9.26.0.51 on H200, open",
        summary="dK and dV of a call with one row were NaN as a whole if its LSE is far below 0.",
        cases=(ordinary(seqlen_q=1, seqlen_k=128, heads_k=2, values="low"),),
        probe="gradients",
    ),
    Bug(
        repository=_CUDNN,
        number=160,
        versions="August 2025",
        summary="Gradients were NaN for lengths that are no multiple of what the kernel wants.",
        cases=(ordinary(seqlen_q=9, seqlen_k=9),),
        probe="gradients",
    ),
    Bug(
        repository="pytorch/pytorch",
        number=153799,
        versions="2.7.0, open",
        summary="FlexAttention's gradients were NaN with score_mod and a block mask together, if "
        "the length is no multiple of 128.",
        cases=(ordinary(seqlen_q=9, seqlen_k=9, mask_mod="documents", score_mod="alibi"),),
        probe="gradients",
    ),
    Bug(
        repository=_CUDNN,
        number=676,
        summary="Rows that select no key gave NaN, and a wrong gradient of the sink.",
        cases=(ordinary(seqlen_q=4, seqlen_k=4, mask_mod="odd_rows_empty", sink=0.5),),
        probe="gradients",
    ),
)

LOST = (
    Bug(
        repository=_FLASH_ATTENTION,
        number=1817,
        versions="August 2025, open",
        summary="The gradient of the returned LSE was dropped without a word: a loss of the LSE "
        "alone had gradients of 0.",
        cases=(ordinary(seqlen_q=3, seqlen_k=5),),
        probe="gradients_lse",
    ),
    Bug(
        repository=_FLASH_ATTENTION,
        number=2424,
        versions="flash-attn-4 of April 2026, open",
        summary="mask_mod was not handed on to the backward pass, which went without it.",
        cases=(ordinary(seqlen_q=4, seqlen_k=4, mask_mod="stripes"),),
        probe="gradients",
    ),
    Bug(
        repository=_FLASH_ATTENTION,
        number=2101,
        versions="flash-attn-4 of December 2025, open",
        summary="Block lists were not handed on to the backward pass, which visited every block.",
        cases=(ordinary(seqlen_q=257, seqlen_k=257, sparse_block=(128, 128), mask_mod="stripes"),),
        probe="gradients",
    ),
    Bug(
        repository=_FLASH_ATTENTION,
        number=2623,
        versions="flash-attn-4 of June 2026 on SM90",
        summary="At head dim 64 the backward pass read block lists with another tile width than "
        "they were made for: gradients hundreds of times too large.",
        cases=(
            ordinary(
                seqlen_q=130, seqlen_k=257, sparse_block=(128, 128), mask_mod="stripes", seed=4
            ),
        ),
        probe="gradients",
    ),
)

SHAPES = (
    Bug(
        repository="NVIDIA/TransformerEngine",
        number=3216,
        versions="2.16.0 with flash-attn-4 4.0.0b11 on SM100",
        summary="With head dim 256 and two or more sequences dQ pointed the wrong way; normal "
        "inputs did not show it, activations of a real model did.",
        cases=(
            ordinary(
                batch=2,
                seqlen_q=17,
                seqlen_k=17,
                heads_k=2,
                group=8,
                head_dim=256,
                head_dim_v=256,
                causal=True,
                values="activations",
            ),
        ),
        probe="gradients",
    ),
    Bug(
        repository="XunhaoLai/native-sparse-attention-triton",
        number=27,
        versions="August 2026, open",
        summary="dP left out the channels of V beyond the head dim of Q.",
        cases=(ordinary(seqlen_q=3, seqlen_k=5, head_dim=64, head_dim_v=128),),
        probe="gradients",
    ),
    Bug(
        repository=_FLASH_ATTENTION,
        number=2552,
        versions="flash-attn-4 4.0.0b11, open",
        summary="dV was stored in slices of a width that only dK divides by: with head dims 128 "
        "and 96 some columns were another's.",
        cases=(ordinary(seqlen_q=3, seqlen_k=5, head_dim=128, head_dim_v=96),),
        probe="gradients",
    ),
    Bug(
        repository=_FLASH_ATTENTION,
        number=2482,
        summary="Head dims of 136 to 176 were padded differently in the parts of the backward "
        "pass.",
        cases=(ordinary(seqlen_q=3, seqlen_k=5, head_dim=160, head_dim_v=160),),
        probe="gradients",
    ),
    Bug(
        repository="huggingface/diffusers",
        number=14341,
        versions="up to 0.39",
        summary="K and V were transposed twice before the backward pass, which took heads for "
        "keys.",
        cases=(ordinary(seqlen_q=3, seqlen_k=3, heads_k=2),),
        probe="gradients",
    ),
)

RACES = (
    Bug(
        repository=_FLASH_ATTENTION,
        number=2756,
        versions="flash-attn-4 on SM90, before August 2026",
        summary="The backward kernel read what its first pass had not written yet: garbage in 1 of "
        "100 to 1,000 launches.",
        cases=(ordinary(seqlen_q=5, seqlen_k=5, mask_mod="documents"),) * 4,
        probe="gradients",
    ),
)

GRADIENTS = (*NOT_FINITE, *LOST, *SHAPES, *RACES)
