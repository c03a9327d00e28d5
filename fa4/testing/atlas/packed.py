"""Bugs of lengths: sequences packed or padded, empty ones, and calls with nothing to do."""

from __future__ import annotations

from fa4.testing.atlas.bug import Bug, ordinary

_FLASH_ATTENTION = "Dao-AILab/flash-attention"
_TRANSFORMER_ENGINE = "NVIDIA/TransformerEngine"

EMPTY = (
    Bug(
        repository=_FLASH_ATTENTION,
        number=443,
        versions="2.0.4",
        summary="dQ of packed sequences was NaN where the causal mask leaves rows without a key.",
        cases=(ordinary(layout="packed", lengths=((4, 1), (2, 1)), causal=True),),
        probe="gradients",
    ),
    Bug(
        repository=_FLASH_ATTENTION,
        number=2562,
        versions="flash-attn-4 4.0.0b13, fixed by #2568",
        summary="The backward pass of head dim 256 read illegal memory if a packed sequence has no "
        "row.",
        cases=(
            ordinary(
                layout="packed", lengths=((0, 5), (3, 4)), group=4, head_dim=256, head_dim_v=256
            ),
        ),
        probe="gradients",
    ),
    Bug(
        repository=_FLASH_ATTENTION,
        number=1537,
        versions="March 2025, open",
        summary="Grouped heads, sequences of one row and others of none ended in an error about a "
        "shape.",
        cases=(
            ordinary(layout="packed", lengths=((0, 0), (1, 3), (0, 0), (1, 5)), heads_k=3, group=3),
        ),
    ),
    Bug(
        repository=_FLASH_ATTENTION,
        number=2470,
        summary="A dense call without keys divided by 0 on the host.",
        cases=(ordinary(seqlen_q=3, seqlen_k=0),),
    ),
    Bug(
        repository=_FLASH_ATTENTION,
        number=2515,
        summary="A call without rows, or without a batch entry, divided by 0.",
        cases=(ordinary(seqlen_q=0, seqlen_k=5),),
    ),
)

LENGTHS = (
    Bug(
        repository=_TRANSFORMER_ENGINE,
        number=1930,
        summary="Lengths were halved for each step and doubled again: of seven keys six were left.",
        cases=(ordinary(layout="packed", lengths=((7, 7),)),),
    ),
    Bug(
        repository=_TRANSFORMER_ENGINE,
        number=3331,
        versions="up to 2.17.1",
        summary="The last rows of a sequence whose length does not divide by the chunks were "
        "exactly 0.",
        cases=(ordinary(layout="packed", lengths=((6, 6),)),),
    ),
    Bug(
        repository="meta-pytorch/gpt-fast",
        number=233,
        versions="August 2025, open",
        summary="Attention ran over the whole cache, what no token had filled yet included.",
        cases=(ordinary(layout="padded", lengths=((1, 5), (1, 3))),),
    ),
)

PLACES = (
    Bug(
        repository="pytorch/pytorch",
        number=176793,
        summary="Rows of packed q, k and v behind the last sequence had NaN for gradients: memory "
        "that nobody wrote.",
        cases=(ordinary(layout="packed", lengths=((3, 3), (2, 2))),),
        probe="gradients",
        arrangement="slack behind the last sequence",
    ),
    Bug(
        repository="NVIDIA/cudnn-frontend",
        number=1083,
        versions="cuDNN 9.26 and 9.27",
        summary="With one row in a packed sequence, the LSE was written for the first head of each "
        "group only; O was right.",
        cases=(ordinary(layout="packed", lengths=((1, 5),), heads_k=2, group=4),),
        needs=("lse",),
    ),
    Bug(
        repository="NVIDIA/cudnn-frontend",
        number=462,
        versions="cuDNN 9.22 to 9.26",
        summary="All gradients of packed sequences were 0 if the LSE lies head by head.",
        cases=(ordinary(layout="packed", lengths=((3, 3), (2, 2)), heads_k=2),),
        probe="gradients",
    ),
    Bug(
        repository=_TRANSFORMER_ENGINE,
        number=3333,
        versions="2.17.0 with cuDNN 9.25 on SM120",
        summary="Gradients of packed sequences were wrong, even of a single one; the forward pass "
        "was right.",
        cases=(ordinary(layout="packed", lengths=((5, 5),)),),
        probe="gradients",
    ),
    Bug(
        repository="zhuzilin/ring-flash-attention",
        number=47,
        summary="The backward pass took an LSE of heads by rows for one of rows by heads.",
        cases=(ordinary(layout="packed", lengths=((3, 5), (4, 4)), heads_k=2),),
        probe="gradients",
    ),
)

PACKED = (*EMPTY, *LENGTHS, *PLACES)
