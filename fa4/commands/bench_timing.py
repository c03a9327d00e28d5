"""How `fa4 bench` times a problem: every back end on the same tensors, in turn, in short bursts."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from fa4.compiled.support import NARROW

if TYPE_CHECKING:
    from fa4.call.choose import FoundGpu
    from fa4.config import Problem

OURS = "fa4"
# Of one back end: long enough for the clock of the events, too short to heat the GPU.
BURST_SECONDS, PAUSE_SECONDS, MOST_CALLS = 2e-3, 10e-3, 100

FA3_MODULE = "flash_attn_interface"  # FlashAttention-3's, where it is installed
TIMINGS = ("burst", "graph")  # calls one by one, the host's part of them included; a CUDA graph

Attention = Callable[..., Any]


class Pass(NamedTuple):
    """What is timed: the forward pass or, of a call that was made, the backward pass.

    timing: one of `TIMINGS`.
    """

    backward: bool = False
    deterministic: bool = False
    timing: str = "burst"

    @property
    def label(self) -> str:
        """For people."""
        order = ", deterministic" if self.deterministic else ""
        return f"backward pass{order}" if self.backward else "forward pass"


FORWARD_PASS = Pass()


class Measured(NamedTuple):
    """Seconds of a call by back end; why there are none of the others.

    state: clock in MHz and power in W behind the bursts, by back end; empty where NVML is missing.
    """

    seconds: dict[str, float]
    missing: dict[str, str]
    state: dict[str, tuple[float, float]] = {}  # noqa: RUF012 - never written to


Timer = Callable[[Sequence[str], "Problem"], Measured]


def time_calls(
    gpu: FoundGpu, repeats: int, timed: Pass, names: Sequence[str], problem: Problem
) -> Measured:
    """Seconds of one pass of each back end on random tensors: the median of its bursts."""
    import torch

    from fa4.commands.bench_meter import find_meter

    tensors = make_tensors(problem, gpu.device)
    missing: dict[str, str] = {}
    bursts: dict[str, Callable[[], float]] = {}
    found: dict[str, list[float]] = {}
    states: dict[str, list[tuple[float, float]]] = {}
    with torch.cuda.device(gpu.device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # others say at length what concerns their authors
        meter = find_meter(torch.cuda.current_device())
        for name in names:
            prepared = _prepare(name, tensors, problem, timed, gpu.impl)
            if isinstance(prepared, str):
                missing[name] = prepared
            else:
                bursts[name] = prepared
        for _ in range(repeats):
            for name, burst in bursts.items():
                time.sleep(PAUSE_SECONDS)
                found.setdefault(name, []).append(burst())
                if meter is not None:
                    states.setdefault(name, []).append(meter())
    state = {
        name: (median(mhz for mhz, _ in read), median(watts for _, watts in read))
        for name, read in states.items()
    }
    return Measured({name: median(seconds) for name, seconds in found.items()}, missing, state)


def measure_one(
    problem: Problem, backends: Sequence[str], timer: Timer, timed: Pass = FORWARD_PASS
) -> dict[str, Any]:
    """The row of a problem, without a prediction."""
    flops = problem.backward_flops if timed.backward else problem.forward_flops
    seconds, missing, state = timer(backends, problem)
    tflops = {name: flops / found / 1e12 for name, found in seconds.items()}
    ours = tflops.get(OURS)
    return {
        "problem": problem.__dict__,
        "tflops": tflops,
        "predicted_tflops": None,
        "ratio": {n: ours / x for n, x in tflops.items() if ours and n != OURS},
        "missing": missing,
        "clock_mhz": {name: clock for name, (clock, _) in state.items()},
        "power_w": {name: power for name, (_, power) in state.items()},
    }


def make_tensors(problem: Problem, device: str) -> tuple[Any, ...]:
    """Random Q, K and V of a problem."""
    import torch

    dtype = {
        "bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
    }[problem.dtype]  # fmt: skip
    p = problem
    shapes = (
        (p.batch, p.seqlen_q, p.heads_q, p.head_dim),
        (p.batch, p.seqlen_k, p.heads_k, p.head_dim),
        (p.batch, p.seqlen_k, p.heads_k, p.head_dim_v),
    )
    drawn = dtype if dtype.itemsize == 2 else torch.bfloat16  # torch draws no 8-bit numbers
    return tuple(torch.randn(shape, device=device, dtype=drawn).to(dtype) for shape in shapes)


def _prepare(
    name: str, tensors: tuple[Any, ...], problem: Problem, timed: Pass, impl: str
) -> Callable[[], float] | str:
    """A burst of one back end's calls, which gives the seconds of one; or why it has none."""
    import torch

    graphed = timed.timing == "graph"
    # Autograd computes gradients on the stream of the call that they are of.
    stream = torch.cuda.Stream() if graphed else torch.cuda.current_stream()
    torch.cuda.synchronize()
    try:
        with torch.cuda.stream(stream), selected(name):
            call = call_of(find_backend(name, problem, timed, impl), tensors, timed)
            call()
            calls = max(1, min(MOST_CALLS, round(BURST_SECONDS / time_burst(call, 2))))
            if graphed:
                replay = graph_of(call, calls)
                return lambda: time_graph(replay) / calls
    except Exception as error:  # another's kernel may refuse in any way
        return " ".join(str(error).split())[:200] or type(error).__name__

    def burst() -> float:
        with selected(name):
            return time_burst(call, calls)

    return burst


def call_of(function: Attention, tensors: tuple[Any, ...], timed: Pass) -> Callable[[], Any]:
    """One pass, to be run again and again; of gradients the call itself is made now."""
    import torch

    if timed.backward:
        return gradient_of(function, tensors)

    def call() -> Any:
        with torch.no_grad():
            return function(*tensors)

    return call


def graph_of(call: Callable[[], Any], calls: int) -> Callable[[], None]:
    """A CUDA graph of some calls on the current stream, whose replay takes nothing of the host.

    It keeps the call: a graph has the addresses of tensors that it was captured with, not them, and
    what gradients are computed from would be gone with the next graph, which empties torch's cache.
    """
    import torch

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(calls):
            call()
    graph.replay()
    torch.cuda.synchronize()
    return partial(_replay, graph, call)


def _replay(graph: Any, _call: Callable[[], Any]) -> None:
    graph.replay()


def time_graph(replay: Callable[[], Any]) -> float:
    """Seconds of a graph that is launched while another run of it keeps the GPU at work.

    On an idle GPU the first event is over before the host has launched the graph, which takes as
    long as a short call.
    """
    replay()
    return time_burst(replay, 1)


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


def gradient_of(function: Attention, tensors: tuple[Any, ...]) -> Callable[[], Any]:
    """The backward pass of one call, to be run again and again."""
    import torch

    inputs = [x.detach().requires_grad_() for x in tensors]
    result = function(*inputs)
    out = result[0] if isinstance(result, tuple) else result
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def find_backend(
    name: str, problem: Problem, timed: Pass = FORWARD_PASS, impl: str = "sm100"
) -> Attention:
    """(q, k, v) -> out with the problem's mask, in FlashAttention's layout. impl: what "fa4" is.

    Raises ImportError if it is not installed, ValueError for a mask or a fixed order of sums that
    it cannot be asked for.
    """
    window = problem.window_size
    plain = {"causal": window == (None, 0), "deterministic": timed.deterministic}
    given: dict[str, Any] = dict(plain)
    if window not in ((None, None), (None, 0)):
        given["window_size"] = window
    if name == OURS:
        import fa4

        return lambda q, k, v: fa4.flash_attn_func(q, k, v, **given, impl=impl)
    if name == "flash-attn-4":
        try:
            from flash_attn.cute import flash_attn_func
        except ImportError:
            raise ImportError("flash-attn-4 is not installed: pip install flash-attn-4") from None
        return lambda q, k, v: flash_attn_func(q, k, v, **given)
    if name == "flash-attn-3":
        try:
            published = import_module(FA3_MODULE).flash_attn_func
        except ImportError:
            raise ImportError(f"FlashAttention-3 ({FA3_MODULE}) is not installed") from None
        sides = tuple(-1 if side is None else side for side in window)
        return lambda q, k, v: published(
            q, k, v, causal=plain["causal"], window_size=sides, deterministic=timed.deterministic
        )
    return _sdpa(problem, timed, given)


def _sdpa(problem: Problem, timed: Pass, given: dict[str, Any]) -> Attention:
    if problem.dtype in NARROW:
        raise ValueError(f"torch's SDPA has no {problem.dtype}")
    if timed.deterministic:
        raise ValueError("torch's SDPA has no argument for the order of sums")
    if "window_size" in given:
        raise ValueError("torch's SDPA has no window")
    if given["causal"] and problem.seqlen_q != problem.seqlen_k:
        raise ValueError("torch's SDPA aligns a causal mask with the first key")
    from torch.nn.functional import scaled_dot_product_attention

    grouped = {"enable_gqa": True} if problem.heads_q != problem.heads_k else {}

    def sdpa(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=given["causal"], **grouped)

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
