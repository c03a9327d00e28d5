"""Stand-ins for bugs of numbers, of merges, of state between calls, and of FP8."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import fa4
from fa4.config import ForwardConfig
from tests.testing.atlas.gradients import as_contiguous
from tests.testing.atlas.packed import Results, nan_of_empty_parts
from tests.testing.atlas.stand_in import Attention, StandIn
from tests.testing.planted.calls import Call, make_attention
from tests.testing.planted.fault import is_split, replaced
from tests.testing.planted.gradients import GradientKernel as Honest
from tests.testing.planted.kernel import Options, State, finite


def _top_from_minus_50000(
    kernel: Any, top: np.ndarray, scores: np.ndarray, cols: slice
) -> np.ndarray:
    return np.maximum(Honest.new_top(kernel, top, scores, cols), kernel.work.type(-5e4))


def _top_of_products(kernel: Any, top: np.ndarray, scores: np.ndarray, cols: slice) -> np.ndarray:
    if kernel.scale() >= 0:
        return Honest.new_top(kernel, top, scores, cols)
    lowest = np.where(np.isneginf(scores), np.inf, scores).min(axis=-1)
    return np.maximum(top, np.where(np.isposinf(lowest), -np.inf, lowest))


def _reads_masked_keys(kernel: Any, cols: slice, keep: np.ndarray) -> Any:
    return Honest.keys_and_values(kernel, cols, np.ones_like(keep))


def _plus_infinity(kernel: Any, state: State) -> np.ndarray:
    lse = Honest.lse(kernel, state)
    return np.where(np.isneginf(lse), np.inf, lse)


def _times_ln_2(kernel: Any, state: State) -> np.ndarray:
    return Honest.lse(kernel, state) * kernel.work.type(np.log(2.0))


def _merge(wrong: Callable[[Any, State, State], State]) -> dict[str, Any]:
    """Splits are merged by `wrong`, if there are several."""

    def merge(kernel: Any, first: State, second: State) -> State:
        return (wrong if is_split(kernel) else Honest.merge)(kernel, first, second)

    return {"merge": merge}


def _overflows(kernel: Any, first: State, second: State) -> State:
    if np.isneginf(first.top).all():
        return second
    b = np.exp(second.top - first.top)
    out = first.out + second.out * b[..., None]
    return State(first.top, first.total + second.total * b, out)


def _powers_of_two(kernel: Any, first: State, second: State) -> State:
    top = np.maximum(first.top, second.top)
    a, b = (np.exp2(part.top - finite(top)) for part in (first, second))
    out = first.out * a[..., None] + second.out * b[..., None]
    return State(top, first.total * a + second.total * b, out)


def _weights_of_first_rows(kernel: Any, first: State, second: State) -> State:
    read = np.arange(kernel.rows) % 128
    return Honest.merge(kernel, first, second._replace(top=second.top[:, read]))


def _without_lse(kernel: Any, first: State, second: State) -> State:
    top = np.maximum(first.top, second.top)
    return State(top, first.total + second.total, first.out + second.out)


def _lse_stored_if_asked() -> Attention:
    honest = make_attention(Call)
    kernel = type("Kernel", (Honest,), _merge(_without_lse))
    wrong = make_attention(type("Wrong", (Call,), {"kernel": kernel}))

    @functools.wraps(honest)
    def attention(*arrays: Any, return_lse: bool = False, **options: Any) -> Any:
        return (honest if return_lse else wrong)(*arrays, return_lse=return_lse, **options)

    return attention


NUMBER_STAND_INS = (
    StandIn("flashinfer#4267", {"new_top": _top_from_minus_50000}),
    StandIn("torchax#39", replaced("scale", lambda x: x.options.softmax_scale is None, 1.0)),
    StandIn("cudnn-frontend#1131", {"new_top": _top_of_products}),
    StandIn("pytorch#101967", {"keys_and_values": _reads_masked_keys}),
    StandIn("flash-attention#978", {"lse": _plus_infinity}),
    StandIn("pytorch#181645", {"lse": _times_ln_2}),
    StandIn("flashinfer#50", make=_lse_stored_if_asked),
    StandIn("ring-flash-attention#22", _merge(_overflows)),
    StandIn("vllm#39148", _merge(nan_of_empty_parts)),
    StandIn("vllm#28840", _merge(_powers_of_two)),
    StandIn("flashinfer#4382", _merge(_weights_of_first_rows)),
)


def _kept(call: Call, key: Any, value: Any) -> Any:
    """What the first call with this key left; `value`, if it is this one."""
    kind = type(call)
    if "kept" not in kind.__dict__:
        kind.kept = {}  # type: ignore[attr-defined]
    return kind.kept.setdefault(key, value)  # type: ignore[attr-defined]


def _shapes(call: Call) -> tuple[Any, ...]:
    return call.q.shape, call.k.shape, call.v.shape, call.q.dtype


def _keys_of_first_call(call: Call, b: int) -> tuple[int, int]:
    first, count = Call.key_span(call, b)
    if call.options.layout != "dense":
        return first, count
    return first, min(count, _kept(call, (call.q.shape, call.q.dtype), count))


def _lengths_of_first_plan(call: Call, b: int) -> tuple[int, int]:
    first, count = Call.key_span(call, b)
    if call.options.layout != "paged":
        return first, count
    used = call.options.seqused_k
    assert used is not None
    plan = _kept(call, (len(used), call.k.shape[1:], call.q.shape[1:], call.q.dtype), used)
    return first, int(plan[b])


def _starts(change: Callable[[Call], None]) -> dict[str, Any]:
    """A call begins with `change`."""

    def init(call: Call, q: Any, k: Any, v: Any, options: Options) -> None:
        Call.__init__(call, q, k, v, options)
        change(call)

    return {"__init__": init}


def _scale_of_one(call: Call) -> None:
    if _kept(call, _shapes(call), call.options.softmax_scale) == 1.0:
        call.options = replace(call.options, softmax_scale=1.0)


def _stride_zero(call: Call) -> None:
    if not call.q.size:
        return
    zero = len(call.q) == 1 and call.q.strides[0] == 0
    if _kept(call, (call.q.shape[1:], call.q.dtype), zero) and not zero:
        raise ValueError("Mismatched q.strides[0]: expected 0")


def _strides_of_first_call(call: Call) -> None:
    if _kept(call, _shapes(call), call.k.flags.c_contiguous) and not call.k.flags.c_contiguous:
        call.k = as_contiguous(call.k)


def _type_of_first_call(call: Call) -> None:
    if call.q.shape[-3] != 1:
        return
    dtype = _kept(call, _shapes(call)[:3], call.q.dtype)
    if dtype.itemsize == call.q.itemsize:
        call.q, call.k, call.v = (x.view(dtype) for x in (call.q, call.k, call.v))


def _one_workspace(call: Call) -> Results:
    out, lse = _kept(call, _shapes(call), Call.buffers(call))
    out[...], lse[...] = 0, -np.inf
    return out, lse


def _first_keys_and_values(call: Call, *arrays: Any) -> Results:
    call.k, call.v = _kept(call, _shapes(call), (call.k.copy(), call.v.copy()))
    return Call.backward(call, *arrays)


STATE_STAND_INS = (
    StandIn("flash-attention#2353", call={"key_span": _keys_of_first_call}),
    StandIn("TensorRT-LLM#18443", call={"key_span": _lengths_of_first_plan}),
    StandIn("b12x#63", call=_starts(_scale_of_one)),
    StandIn("flash-attention#2298", call=_starts(_stride_zero)),
    StandIn("flashinfer#4146", call=_starts(_strides_of_first_call)),
    StandIn("flashinfer#4270", call=_starts(_type_of_first_call)),
    StandIn("sglang#25957", call={"buffers": _one_workspace}),
    StandIn("diffusers#14265", call={"backward": _first_keys_and_values}),
)


class Unchecked(ForwardConfig):
    """A configuration that may let P saturate."""

    def check_dtype(self, dtype: str) -> None:
        """Anything goes."""


def _on_reference(change: Callable[[Attention, dict[str, Any]], Any]) -> Callable[[], Attention]:
    """The reference, which takes FP8; `change` gets the function and the keywords of a call."""

    def make() -> Attention:
        def wrapped(function: Attention) -> Attention:
            @functools.wraps(function)
            def attention(*arrays: Any, **options: Any) -> Any:
                run = functools.partial(function, *arrays, impl="reference")
                return change(run, {"q": arrays[0]} | options)

            return attention

        attention = wrapped(fa4.flash_attn_func)
        attention.varlen = wrapped(fa4.flash_attn_varlen_func)  # type: ignore[attr-defined]
        return attention

    return make


def _dropped(*names: str, packed: bool = False) -> Callable[[], Attention]:
    """These options do not reach the kernel; with `packed`, of packed sequences alone."""

    def change(run: Attention, options: dict[str, Any]) -> Any:
        lost = not packed or "cu_seqlens_k" in options
        return run(**{n: x for n, x in options.items() if n != "q" and not (lost and n in names)})

    return _on_reference(change)


def _lagging(run: Attention, options: dict[str, Any]) -> Any:
    q = options.pop("q")
    if q.dtype.name == "float8_e4m3fn":
        options["config"] = Unchecked(rescale_threshold_log2=4.0, p_offset_log2=8.0)
    return run(**options)


def _few_elements_off(run: Attention, options: dict[str, Any]) -> Any:
    q = options.pop("q")
    out, *lse = run(**options | {"return_lse": True})
    if q.shape[-1] == 256 and q.dtype.itemsize == 1:
        out = out.copy()
        out.reshape(-1)[::331] += out.dtype.type(1.875)
    return (out, *lse) if options.get("return_lse") else out


FP8_STAND_INS = (
    StandIn("flashinfer#4979", make=_dropped("k_descale", "v_descale", packed=True)),
    StandIn("sglang#34765", make=_dropped("v_descale")),
    StandIn("vllm#51363", make=_dropped("q_descale", "k_descale", "v_descale")),
    StandIn("flash-attention#2577", make=_on_reference(_lagging)),
    StandIn("cudnn-frontend#981", make=_on_reference(_few_elements_off)),
)
