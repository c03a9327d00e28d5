"""Which implementation computes a call: what impl="auto" picks, and what a choice asks for.

auto        the first of these that can do the call: the kernel, for tensors on a GPU that it
            runs on; the emulator, if FA4_EMULATE=1 is set and the tensors are on the CPU; the
            reference. What was picked is said once in the log "fa4": a warning where tensors
            on a GPU go to the CPU, otherwise information.
sm100       the compiled kernel on a GPU of compute capability 10.0 or 10.3
emulator    the same compiled kernel, executed on the CPU
reference   FA4's algorithm in NumPy
oracle      the definition in float64
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from fa4.arrays import is_torch, to_numpy

IMPLEMENTATIONS = ("auto", "sm100", "emulator", "reference", "oracle")
KERNELS = ("sm100", "emulator")
EMULATE = "FA4_EMULATE"
_OFF = ("", "0", "off", "no", "false")

logger = logging.getLogger("fa4")
_said: set[tuple[str, str]] = set()


def check_impl(impl: str) -> None:
    """Raises ValueError for a name that is no implementation's."""
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}; got {impl!r}")


def choose(q: Any, k: Any, v: Any, options: dict[str, Any]) -> str:
    """The implementation that impl="auto" means for a call."""
    picked, why = _preferred(q)
    if picked != "reference" and (why := _refusal(q, k, v, options)):
        picked = "reference"
    _say(picked, why, on_gpu=is_torch(q) and q.device.type == "cuda")
    return picked


def _preferred(q: Any) -> tuple[str, str]:
    """What the place of the tensors and the environment ask for; and why not the kernel."""
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


def _refusal(q: Any, k: Any, v: Any, options: dict[str, Any]) -> str:
    """Why the kernel cannot do a call; "" if it can."""
    from fa4.compiled.support import NotSupported, check
    from fa4.compiled.toolchain import find_toolchain
    from fa4.front.kernel import describe, read_arguments

    try:
        if not is_torch(q):
            q, k, v = (to_numpy(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
        arguments = read_arguments(q, k, v, options)
        check(describe(arguments))
        if not is_tracing():
            find_toolchain()
    except (NotSupported, ImportError) as error:
        return str(error)
    if is_torch(q) and q.device.type == "cuda":
        from fa4.front.op import as_tensors, needs_gradient

        if needs_gradient(as_tensors(arguments)):
            return "gradients: the SM100 backward kernel is not in this version"
    return ""


def _say(picked: str, why: str, *, on_gpu: bool) -> None:
    """Once for each choice and reason. Not while torch.compile traces, which cannot log."""
    if is_tracing() or (picked, why) in _said:
        return
    _said.add((picked, why))
    slow = on_gpu and picked == "reference"
    text = f'impl="auto" picks "{picked}"' + (f": {why}" if why else "")
    if slow:
        text += "; this copies the tensors to the CPU"
    logger.log(logging.WARNING if slow else logging.INFO, text)


def is_tracing() -> bool:
    """Is torch.compile tracing this code?"""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


def require_place(impl: str, q: Any) -> None:
    """Raises ValueError if the tensors are not where an implementation runs."""
    where = f"on {q.device}" if is_torch(q) else f"a {type(q).__name__}"
    if impl == "sm100" and not (is_torch(q) and q.device.type == "cuda"):
        raise ValueError(f'impl="sm100" takes torch tensors on a CUDA GPU; q is {where}')
    if impl == "emulator" and is_torch(q) and q.device.type != "cpu":
        raise ValueError(f'impl="emulator" takes tensors on the CPU; q is {where}')


def attend(
    q: Any, k: Any, v: Any, options: dict[str, Any], *, impl: str, return_lse: bool
) -> tuple[Any, Any]:
    """(O, LSE) by the kernel, on a GPU or in the emulator."""
    require_place(impl, q)
    from fa4.front import kernel

    if is_torch(q):
        from fa4.front import op

        arguments = kernel.read_arguments(q, k, v, options)
        return op.attend(arguments, return_lse=return_lse)
    q, k, v = (to_numpy(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    arguments = kernel.to_arrays(kernel.read_arguments(q, k, v, options))
    out, lse, _ = kernel.run_on_emulator(arguments, lse=return_lse)
    return out, lse
