"""Bugs of pages: tables, slots, page sizes, and what is lost when keys are paged."""

from __future__ import annotations

from fa4.testing.atlas.bug import Bug, ordinary
from fa4.testing.case import Case

_FLASH_ATTENTION = "Dao-AILab/flash-attention"
_FLASHINFER = "flashinfer-ai/flashinfer"


def _paged(*lengths: tuple[int, int], **fields: object) -> Case:
    """Packed rows, paged keys."""
    return ordinary(layout="paged", lengths=lengths, **fields)


UNUSED = (
    Bug(
        repository=_FLASH_ATTENTION,
        number=2374,
        versions="flash-attn-4 and FlashAttention-3, open",
        summary="NaN in the unused slots of the last page reached O, as 0 times NaN.",
        cases=(_paged((2, 5), page_size=16, values="masked_nan"),),
        needs=("masked_nan",),
        group="robustness",
    ),
    Bug(
        repository=_FLASH_ATTENTION,
        number=1745,
        versions="FlashAttention-3",
        summary="NaN in the padding of a cache reached O; FlashAttention-2 had cleared it.",
        cases=(ordinary(layout="padded", lengths=((2, 5), (1, 3)), values="masked_nan"),),
        needs=("masked_nan",),
        group="robustness",
    ),
    Bug(
        repository="NVIDIA/cudnn-frontend",
        number=964,
        summary="The page table was read behind the last live page.",
        cases=(_paged((2, 16), page_size=16),),
    ),
    Bug(
        repository=_FLASHINFER,
        number=3047,
        summary="Rows of a sequence that has no key yet were what lay in memory.",
        cases=(_paged((3, 0), (2, 5)),),
    ),
)

SIZES = (
    Bug(
        repository=_FLASHINFER,
        number=4347,
        versions="0.6.16",
        summary="Pages of more than 128 keys were read wrongly.",
        cases=(_paged((2, 200), page_size=256),),
    ),
    Bug(
        repository=_FLASH_ATTENTION,
        number=2745,
        summary="Rows of a tile were dealt out to the loading threads rounding down, so that the "
        "last ones had no address.",
        cases=(_paged((2, 128), head_dim=192, head_dim_v=192, page_size=64),),
    ),
    Bug(
        repository=_FLASH_ATTENTION,
        number=2368,
        summary="Head dims 192 and 128 with at most 128 rows were loaded by the wrong threads.",
        cases=(_paged((2, 64), head_dim=192, head_dim_v=128),),
    ),
)

TOGETHER = (
    Bug(
        repository=_FLASH_ATTENTION,
        number=1217,
        summary="Packed rows, pages and split keys together gave wrong results.",
        cases=(_paged((1, 300), num_splits=2),),
    ),
    Bug(
        repository=_FLASHINFER,
        number=4051,
        versions="July 2026, open",
        summary="Merging states that are all empty gave NaN.",
        cases=(_paged((2, 0), (1, 300), num_splits=2),),
    ),
    Bug(
        repository=_FLASHINFER,
        number=4972,
        versions="0.6.18",
        summary="A window without a right side, in a sequence with fewer rows than keys: the split "
        "keys of the first 128 rows ended one tile behind the window.",
        cases=(_paged((150, 300), window_size=(16, None)),),
    ),
    Bug(
        repository="sgl-project/sglang",
        number=31501,
        versions="before the fix of July 2026",
        summary="The window was given when the call ran, not when it was planned: paged prefill "
        "went without it.",
        cases=(_paged((3, 9), causal=True, window_size=(2, None)),),
    ),
    Bug(
        repository="EricLBuehler/mistral.rs",
        number=2094,
        versions="0.8.1, open",
        summary="Decoding from pages ignored the window.",
        cases=(_paged((1, 9), causal=True, window_size=(2, None)),),
    ),
)

PAGING = (*UNUSED, *SIZES, *TOGETHER)
