"""The compiled Hopper kernel of an H200, executed on the CPU with the emulator's checks."""

from __future__ import annotations

from functools import partial

from fa4.backends import emulated

supports = partial(emulated.supports, "sm90")
forward = partial(emulated.forward, "sm90")
backward = partial(emulated.backward, "sm90")
run = partial(emulated.run, "sm90")
run_backward = partial(emulated.run_backward, "sm90")
