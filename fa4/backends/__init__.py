"""The implementations of attention, one file each, behind one interface.

reference       FA4's algorithm in NumPy, in the kernel's order of operations
oracle          the definition in float64; results stay float64
emulator        the compiled SM100 kernels, executed on the CPU
emulator_sm90   the same with the Hopper kernel
sm100           the compiled SM100 kernels on a B200 or B300
sm90            the compiled Hopper kernel on an H100 or H200

A backend is a module with `supports`, `forward` and `backward`; see `Implementation`.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, NamedTuple, Protocol, cast

from fa4.call.call import Call

ON_GPU = {"sm100": "sm100", "sm90": "sm90"}  # the family of the kernels of each
EMULATED = {"emulator": "sm100", "emulator_sm90": "sm90"}
KERNELS = ON_GPU | EMULATED  # compiled
NAMES = (*KERNELS, "reference", "oracle")


class Saved(NamedTuple):
    """What the backward pass needs of the forward one, in the call's framework.

    residual: what rounding took from out, in out's shape and type; None if nobody kept it.
    """

    out: Any
    lse: Any
    residual: Any = None


class AttentionGradients(NamedTuple):
    """In the layouts of their inputs; dsink is None without a learnable_sink."""

    dq: Any
    dk: Any
    dv: Any
    dsink: Any


class Implementation(Protocol):
    """What a module of this package offers. Calls have passed `fa4.call.form.with_form`."""

    def supports(self, call: Call, *, gradient: bool = False) -> str:
        """Why the call (and its gradient) cannot be computed; "" if it can. Computes nothing."""

    def forward(self, call: Call, *, lse: bool = True, gradient: bool = False) -> tuple[Any, Any]:
        """(O, LSE). Without `lse`, None may come in its place.

        gradient: will one be asked for? A call that has none is then refused.
        """

    def backward(self, call: Call, saved: Saved, dout: Any, dlse: Any) -> AttentionGradients:
        """From dO and, or None, the gradient of the LSE."""


@cache
def find_backend(name: str) -> Implementation:
    """The backend of a name in NAMES, imported when it is first asked for."""
    return cast(Implementation, importlib.import_module(f"fa4.backends.{name}"))
