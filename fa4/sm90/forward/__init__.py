"""A FlashAttention-3-class forward kernel: one file per warp role."""
