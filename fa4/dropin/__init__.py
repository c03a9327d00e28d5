"""What the drop-in functions share: ALiBi, masks and biases, in any implementation.

`fa4.flash_attn`, `fa4.sdpa` and `fa4.transformers` stand on the public functions of `fa4.api`;
nothing else of the package imports them.
"""
