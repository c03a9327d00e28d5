"""The names of flash_attn 2, with its order, defaults and returns: `from fa4 import flash_attn`.

`fa4.flash_attn.bert_padding` has its helpers, `fa4.flash_attn.cute` the names of flash-attn-4.
What differs is listed in docs/drop-in.md. Each function takes `impl` besides, by keyword.
"""

from __future__ import annotations

from fa4.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
