"""Building blocks of the SM100 kernels: what forward and backward have in common."""
