"""The FP8 forward kernel for Hopper on a GPU: right, how exact, and how fast."""
