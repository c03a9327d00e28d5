"""Runs the PTX of compiled SM100 kernels on a CPU, and reports their races and deadlocks."""
