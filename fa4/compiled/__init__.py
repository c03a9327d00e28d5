"""Compiled kernels: chosen for a call, built once, kept on disk, loaded and launched."""
