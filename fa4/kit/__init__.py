"""Building blocks of the kernels: what both passes and both machines have in common."""
