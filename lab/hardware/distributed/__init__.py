"""Attention across GPUs, on the GPUs of one host."""
