"""The compiled Hopper kernel on an H100 or H200, on torch's current stream."""

from __future__ import annotations

from functools import partial

from fa4.backends import on_gpu

supports = partial(on_gpu.supports, "sm90")
forward = partial(on_gpu.forward, "sm90")
backward = partial(on_gpu.backward, "sm90")
