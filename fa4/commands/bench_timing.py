"""How `fa4 bench` times a problem: every back end on the same tensors, in turn, in short bursts."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from fa4.choose import FoundGpu
    from fa4.config import Problem

OURS = "fa4"
# Of one back end: long enough for the clock of the events, too short to heat the GPU.
BURST_SECONDS, PAUSE_SECONDS, MOST_CALLS = 2e-3, 10e-3, 100

Attention = Callable[..., Any]


class Pass(NamedTuple):
    """What is timed: the forward pass or, of a call that was made, the backward pass."""

    backward: bool = False
    deterministic: bool = False

    @property
    def label(self) -> str:
        """For people."""
        order = ", deterministic" if self.deterministic else ""
        return f"backward pass{order}" if self.backward else "forward pass"


FORWARD_PASS = Pass()


class Measured(NamedTuple):
    """Seconds of a call by back end; why there are none of the others."""

    seconds: dict[str, float]
    missing: dict[str, str]


def time_calls(
    gpu: FoundGpu, repeats: int, timed: Pass, names: Sequence[str], problem: Problem
) -> Measured:
    """Seconds of one pass of each back end on random tensors: the median of its bursts."""
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[problem.dtype]
    p = problem
    shapes = (
        (p.batch, p.seqlen_q, p.heads_q, p.head_dim),
        (p.batch, p.seqlen_k, p.heads_k, p.head_dim),
        (p.batch, p.seqlen_k, p.heads_k, p.head_dim_v),
    )
    tensors = tuple(torch.randn(shape, device=gpu.device, dtype=dtype) for shape in shapes)
    missing: dict[str, str] = {}
    calls: dict[str, tuple[Callable[[], Any], int]] = {}
    found: dict[str, list[float]] = {}
    with torch.cuda.device(gpu.device):
        for name in names:
            prepared = _prepare(name, tensors, p.causal, timed, gpu.impl)
            if isinstance(prepared, str):
                missing[name] = prepared
            else:
                calls[name] = prepared
        for _ in range(repeats):
            for name, (call, count) in calls.items():
                time.sleep(PAUSE_SECONDS)
                found.setdefault(name, []).append(time_burst(call, count))
    return Measured({name: median(seconds) for name, seconds in found.items()}, missing)


def _prepare(
    name: str, tensors: tuple[Any, ...], causal: bool, timed: Pass, impl: str
) -> tuple[Callable[[], Any], int] | str:
    """One pass of a back end, and how many make a burst; or why it has none."""
    import torch

    function: Attention

    def call() -> Any:
        with selected(name), torch.no_grad():
            return function(*tensors, causal)

    try:
        function = find_backend(name, timed, impl)
        if timed.backward:
            with selected(name):
                call = gradient_of(function, tensors, causal)
        call()
        return call, max(1, min(MOST_CALLS, round(BURST_SECONDS / time_burst(call, 2))))
    except Exception as error:  # another's kernel may refuse in any way
        return " ".join(str(error).split())[:200] or type(error).__name__


def time_burst(call: Callable[[], Any], calls: int) -> float:
    """Seconds of a call on the current stream, by CUDA events around `calls` of them."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / calls


def gradient_of(function: Attention, tensors: tuple[Any, ...], causal: bool) -> Callable[[], Any]:
    """The backward pass of one call, to be run again and again."""
    import torch

    inputs = [x.detach().requires_grad_() for x in tensors]
    result = function(*inputs, causal)
    out = result[0] if isinstance(result, tuple) else result
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def find_backend(name: str, timed: Pass = FORWARD_PASS, impl: str = "sm100") -> Attention:
    """(q, k, v, causal) -> out, in FlashAttention's layout. impl: what "fa4" is.

    Raises ImportError if it is not installed, ValueError if it cannot be asked for a fixed order.
    """
    given: dict[str, Any] = {"deterministic": timed.deterministic}
    if name == OURS:
        import fa4

        return lambda q, k, v, causal: fa4.flash_attn_func(
            q, k, v, causal=causal, **given, impl=impl
        )
    if name == "flash-attn-4":
        try:
            from flash_attn.cute import flash_attn_func
        except ImportError:
            raise ImportError("flash-attn-4 is not installed: pip install flash-attn-4") from None
        return lambda q, k, v, causal: flash_attn_func(q, k, v, causal=causal, **given)
    if timed.deterministic:
        raise ValueError("torch's SDPA has no argument for the order of sums")
    from torch.nn.functional import scaled_dot_product_attention

    def sdpa(q: Any, k: Any, v: Any, causal: bool) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return sdpa


@contextmanager
def selected(name: str) -> Iterator[None]:
    """Inside, torch's SDPA uses the back end of that name alone; nothing for others."""
    if name not in ("cudnn", "flash"):
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernel = SDPBackend.CUDNN_ATTENTION if name == "cudnn" else SDPBackend.FLASH_ATTENTION
    with sdpa_kernel(kernel), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says at length why a back end refuses
        yield
