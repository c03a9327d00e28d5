"""What a back end declares of its arithmetic; plain attention and the bands then do the same.

Nothing declared is what most kernels do. What is declared is no excuse but another yardstick: the
budget of a kernel that keeps P in bf16 is that of plain attention with P in bf16, and so far below
that of one which rounds P to FP8.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa4.config import require, require_int

FP8_TYPES = ("e4m3", "e5m2")
SCALE_BLOCK = 128  # rows or keys that share a factor, where factors are of blocks
# Hopper's FP8 products add 32 terms at a time to a sum of 14 bits, which is cut off: measured on an
# H200 (lab/hardware/wgmma_sums; DeepSeek-V3, arXiv 2412.19437, section 3.3.2, saw it first).
LIMITED_BITS = 14
LIMITED_STEP = 32
MOST_OFFSET_LOG2 = 8  # 2^8 is the largest power of two with room below e4m3's 448

_WORDS = {
    "group_sum": ("work", "element"),
    "saved_out": ("rounded", "exact"),
    "fp8_p": ("fp8", "bf16", "fp16", "fp32"),
    "fp8_scales": ("tensor", "head", "block"),
    "fp8_sums": ("fp32", "limited"),
}


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """The arithmetic of a back end.

    group_sum: "work" if dK and dV of a group's heads are summed in float32, "element" if one head
    after another is added in the element type. saved_out: "rounded" if D = rowsum(dO O) is taken
    from the O that the call returned, "exact" if from one with more bits.

    For FP8 inputs: fp8_p, what P is rounded to before it is multiplied with V ("fp8": the type of
    V); fp8_p_offset_log2, the power of two that P in FP8 bears, so that small ones are not lost;
    fp8_scales, what a factor of q, k and v belongs to: the "tensor", a "head" (of K, in each batch
    entry), or a "block" of SCALE_BLOCK rows or keys of one; fp8_sums, "limited" if sums of products
    have 14 bits and are cut off.
    """

    group_sum: str = "work"
    saved_out: str = "rounded"
    fp8_p: str = "fp8"
    fp8_p_offset_log2: int = MOST_OFFSET_LOG2
    fp8_scales: str = "head"
    fp8_sums: str = "fp32"

    def __post_init__(self) -> None:
        """ValueError for another word, TypeError or ValueError for another offset."""
        for name, words in _WORDS.items():
            value = getattr(self, name)
            require(value in words, f"{name} must be one of {words}", value)
        require_int("fp8_p_offset_log2", self.fp8_p_offset_log2, 0, MOST_OFFSET_LOG2)

    def p_type(self, dtype: str) -> str:
        """The type of P in the product with V."""
        return self.fp8_p if dtype in FP8_TYPES and self.fp8_p != "fp8" else dtype

    def p_offset_log2(self, dtype: str) -> int:
        """The power of two that P bears there."""
        return self.fp8_p_offset_log2 if self.p_type(dtype) in FP8_TYPES else 0

    def takes_scales(self, kind: str) -> bool:
        """Are there factors for "tensor", "head" or "block"? One for all is one for each head."""
        return kind == self.fp8_scales or (kind == "tensor" and self.fp8_scales == "head")


USUAL_NUMERICS = Numerics()
