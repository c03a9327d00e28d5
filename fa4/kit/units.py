"""Sizes that the hardware fixes. Imports nothing of CUTLASS: the host half needs them too."""

from __future__ import annotations

from fa4.plan.work import WARPGROUP

WARP = 32
TILE_ROWS = WARPGROUP  # of a Q tile: one row per lane of tensor memory and per thread
MMA_DEPTH = 16  # K of one 16-bit tcgen05.mma, and the step of its N (PTX ISA 9.7.16.2.1)

AUX_DTYPES = ("fp32", "bf16", "fp16", "int32")  # of tensors that callables are given

__all__ = ["AUX_DTYPES", "MMA_DEPTH", "TILE_ROWS", "WARP", "WARPGROUP", "padded_dim"]


def padded_dim(dim: int) -> int:
    """A head dimension as the tensor core sees it: the next multiple of 16, zero-filled by TMA."""
    return -(-dim // MMA_DEPTH) * MMA_DEPTH
