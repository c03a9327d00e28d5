"""The compiled SM100 kernels on a B200 or B300, on torch's current stream."""

from __future__ import annotations

from functools import partial

from fa4.backends import on_gpu

supports = partial(on_gpu.supports, "sm100")
forward = partial(on_gpu.forward, "sm100")
backward = partial(on_gpu.backward, "sm100")
