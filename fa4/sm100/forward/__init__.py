"""FlashAttention-4's forward kernel: one file per warp role."""
