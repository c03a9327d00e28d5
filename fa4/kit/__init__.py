"""Building blocks of the kernels: what forward and backward, Blackwell and Hopper have in common."""
