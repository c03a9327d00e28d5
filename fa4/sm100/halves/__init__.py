"""The forward kernel with two softmax warpgroups for each Q tile: a file for each role of its own.

Loads, products, the epilogue and the host's half are those of `fa4.sm100.forward`.
"""
