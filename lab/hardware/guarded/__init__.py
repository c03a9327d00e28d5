"""Kernels on memory that begins or ends where a tensor does, with nothing mapped beyond."""
