"""Which implementation computes a call, and the call computed by it.

auto        the first of these that can do the call: the kernel, for tensors on a GPU that it
            runs on; the emulator, if FA4_EMULATE=1 is set and the tensors are on the CPU; the
            reference. What was picked is said once in the log "fa4": a warning where tensors
            on a GPU go to the CPU, otherwise information.
sm100       the compiled kernels on a GPU of compute capability 10.0 or 10.3
emulator    the same compiled kernels, executed on the CPU
reference   FA4's algorithm in NumPy
oracle      the definition in float64
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, NamedTuple

import numpy as np

from fa4.arrays import is_torch
from fa4.backends import NAMES, AttentionGradients, Saved, find_backend
from fa4.call import Call

IMPLEMENTATIONS = ("auto", *NAMES)
EMULATE = "FA4_EMULATE"
MOST_SEED = 2**31 - 1
_OFF = ("", "0", "off", "no", "false")

logger = logging.getLogger("fa4")
_said: set[tuple[str, str]] = set()


def check_impl(impl: str) -> None:
    """Raises ValueError for a name that is no implementation's."""
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}; got {impl!r}")


def choose(call: Call, *, gradient: bool = False) -> str:
    """The implementation that impl="auto" means for a call (and its gradient)."""
    picked, why = _preferred(call)
    if picked != "reference" and (why := _refusal(picked, call, gradient)):
        picked = "reference"
    _say(picked, why, on_gpu=is_torch(call.q) and call.q.device.type == "cuda")
    return picked


def _refusal(picked: str, call: Call, gradient: bool) -> str:
    """Why a backend cannot do a call, found out once for its form; "" if it can."""
    memo = {} if call.form is None else call.form.memo
    why = memo.get((picked, gradient))
    if why is None:
        why = memo[picked, gradient] = find_backend(picked).supports(call, gradient=gradient)
    return str(why)


def _preferred(call: Call) -> tuple[str, str]:
    """What the place of the tensors and the environment ask for; and why not the kernel."""
    q = call.q
    if is_torch(q) and q.device.type == "cuda":
        import torch

        if not torch.cuda.is_available():
            return "reference", "torch finds no GPU"
        major, minor = torch.cuda.get_device_capability(q.device)
        if runs_kernel(major, minor):
            return "sm100", ""
        return "reference", f"the GPU has compute capability {major}.{minor}, the kernel needs 10.x"
    if is_torch(q) and q.device.type != "cpu":
        return "reference", f"the tensors are on {q.device}"
    if os.environ.get(EMULATE, "").strip().lower() not in _OFF:
        return "emulator", ""
    return "reference", f"the tensors are not on a GPU, and {EMULATE} is not set"


def find_gpu() -> tuple[str, str]:
    """("cuda:N", "") of the first GPU that the kernel runs on; ("", why there is none)."""
    try:
        import torch
    except ImportError:
        return "", "torch is not installed: pip install 'torch>=2.9,<2.14'"
    if not torch.cuda.is_available():
        return "", "torch finds no CUDA GPU"
    seen = []
    for number in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(number)
        if runs_kernel(major, minor):
            return f"cuda:{number}", ""
        seen.append(f"{torch.cuda.get_device_name(number)} ({major}.{minor})")
    return "", f"the kernel needs compute capability 10.0 or 10.3; found {', '.join(seen)}"


def runs_kernel(major: int, minor: int) -> bool:
    """Does the kernel run on a GPU of this compute capability (B200 and B300)?"""
    return major == 10 and minor in (0, 3)


def _say(picked: str, why: str, *, on_gpu: bool) -> None:
    """Once for each choice and reason."""
    if (picked, why) in _said:
        return
    _said.add((picked, why))
    slow = on_gpu and picked == "reference"
    text = f'impl="auto" picks "{picked}"' + (f": {why}" if why else "")
    if slow:
        text += "; this copies the tensors to the CPU"
    logger.log(logging.WARNING if slow else logging.INFO, text)


class Computed(NamedTuple):
    """O, LSE, and the seed of what was dropped (None without dropout)."""

    out: Any
    lse: Any
    dropout_seed: int | None


def run_forward(call: Call, impl: str, *, lse: bool, gradient: bool) -> Computed:
    """The backend's forward pass, with a seed drawn if dropout needs one."""
    if call.dropout_p and call.dropout_seed is None:
        call = call._replace(dropout_seed=draw_seed(call))
    name = choose(call, gradient=gradient) if impl == "auto" else impl
    found = find_backend(name).forward(call, lse=lse, gradient=gradient)
    return Computed(*found, call.dropout_seed)


def run_backward(call: Call, saved: Saved, dout: Any, dlse: Any, impl: str) -> AttentionGradients:
    """The gradients of a call, by the implementation that computes it.

    torch.use_deterministic_algorithms means deterministic=True, whatever the call says.
    """
    name = choose(call, gradient=True) if impl == "auto" else impl
    torch = sys.modules.get("torch")
    if not call.deterministic and torch and torch.are_deterministic_algorithms_enabled():
        call = call._replace(deterministic=True)
    return find_backend(name).backward(call, saved, dout, dlse)


def draw_seed(call: Call) -> int:
    """A seed from the generator of the tensors' framework: torch's or NumPy's global one."""
    if is_torch(call.q):
        import torch

        return int(torch.randint(MOST_SEED, ()))
    return int(np.random.randint(MOST_SEED))  # noqa: NPY002 - np.random.seed is what users set
