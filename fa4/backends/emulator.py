"""The compiled SM100 kernels of a B200, executed on the CPU with the emulator's checks."""

from __future__ import annotations

from functools import partial

from fa4.backends import emulated

supports = partial(emulated.supports, "sm100")
forward = partial(emulated.forward, "sm100")
backward = partial(emulated.backward, "sm100")
run = partial(emulated.run, "sm100")
run_backward = partial(emulated.run_backward, "sm100")
