"""The backward kernels of wide heads: one of dK and dV, and one of dQ."""
