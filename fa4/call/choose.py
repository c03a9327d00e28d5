"""Which implementation computes a call, and the call computed by it.

auto            the first of these that can do the call: the kernel, for tensors on a GPU that it
                runs on; the emulator, if FA4_EMULATE=1 is set and the tensors are on the CPU; the
                reference. What was picked is said once in the log "fa4": a warning where tensors
                on a GPU go to the CPU, otherwise information.
sm100           the compiled kernels on a GPU of compute capability 10.0 or 10.3
sm90            the compiled kernels on a GPU of compute capability 9.0
emulator        the kernels of sm100, executed on the CPU
emulator_sm90   the kernels of sm90, executed on the CPU
reference       FA4's algorithm in NumPy
oracle          the definition in float64
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any, NamedTuple

import numpy as np

from fa4.backends import NAMES, AttentionGradients, Saved, find_backend
from fa4.call.arrays import is_torch
from fa4.call.call import Call

IMPLEMENTATIONS = ("auto", *NAMES)
EMULATE = "FA4_EMULATE"
KERNEL_OF = {(9, 0): "sm90", (10, 0): "sm100", (10, 3): "sm100"}  # by compute capability
MADE_FOR = {"sm100": "a B200 or B300", "sm90": "an H100 or H200"}
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
        capability = torch.cuda.get_device_capability(q.device)
        if found := KERNEL_OF.get(capability):
            return found, ""
        has = "{}.{}".format(*capability)
        return "reference", f"the GPU has compute capability {has}, kernels need {_needed()}"
    if is_torch(q) and q.device.type != "cpu":
        return "reference", f"the tensors are on {q.device}"
    if os.environ.get(EMULATE, "").strip().lower() not in _OFF:
        return "emulator", ""
    return "reference", f"the tensors are not on a GPU, and {EMULATE} is not set"


class FoundGpu(NamedTuple):
    """The first GPU with a kernel, "cuda:N", and its implementation; or "" and why not."""

    device: str
    impl: str
    why: str


def find_gpu(impl: str = "") -> FoundGpu:
    """The first GPU that a kernel runs on, or that of one implementation."""
    try:
        import torch
    except ImportError:
        return FoundGpu("", "", "torch is not installed: pip install 'torch>=2.9,<2.14'")
    if not torch.cuda.is_available():
        return FoundGpu("", "", "torch finds no CUDA GPU")
    seen = []
    for number in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(number)
        found = KERNEL_OF.get(capability)
        if found and impl in ("", found):
            return FoundGpu(f"cuda:{number}", found, "")
        seen.append("{} ({}.{})".format(torch.cuda.get_device_name(number), *capability))
    kernels = f"the {impl} kernel needs" if impl else "kernels need"
    why = f"{kernels} compute capability {_needed(impl)}; found {', '.join(seen)}"
    return FoundGpu("", "", why)


def _needed(impl: str = "") -> str:
    """The compute capabilities of an implementation, or of all: "9.0, 10.0 or 10.3"."""
    fitting = [f"{x}.{y}" for (x, y), name in KERNEL_OF.items() if impl in ("", name)]
    return " or ".join([", ".join(fitting[:-1]), fitting[-1]] if fitting[1:] else fitting)


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
