"""The names of flash-attn-4, `flash_attn.cute`, with its order, defaults and returns."""

from __future__ import annotations

from fa4.flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
