"""Faults of multi-head latent attention: head dims 576 / 512 and 192 / 128."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.testing.planted.calls import Call
from tests.testing.planted.fault import Fault
from tests.testing.planted.gradients import GradientKernel as Honest

MLA_CLASS = "MLA"


def absorbed(kernel: Any) -> bool:
    """Head dims 576 and 512."""
    return (kernel.dim, kernel.dim_v) == (576, 512)


def expanded(kernel: Any) -> bool:
    """Head dims 192 and 128."""
    return (kernel.dim, kernel.dim_v) == (192, 128)


def _without_rope(condition: Callable[[Any], bool]) -> Callable[..., np.ndarray]:
    def products(kernel: Any, k: np.ndarray) -> np.ndarray:
        if not condition(kernel):
            return Honest.products(kernel, k)
        cut = kernel.dim_v
        return kernel.wide_q[..., :cut] @ k[..., :cut].transpose(0, 2, 1)

    return products


def _half_of_rope(kernel: Any, k: np.ndarray) -> np.ndarray:
    cut = kernel.dim - 32 if absorbed(kernel) else kernel.dim
    return kernel.wide_q[..., :cut] @ k[..., :cut].transpose(0, 2, 1)


def _first_half_of_latent(kernel: Any, k: np.ndarray) -> np.ndarray:
    if not absorbed(kernel):
        return Honest.products(kernel, k)
    kept = np.r_[:256, 512:576]
    return kernel.wide_q[..., kept] @ k[..., kept].transpose(0, 2, 1)


def _v_from(change: Callable[[Any, np.ndarray, np.ndarray], np.ndarray]) -> Any:
    """V of an absorbed call, changed; `change` gets kernel, k and v, (Hq, keys, dim)."""

    def keys_and_values(kernel: Any, cols: slice, keep: np.ndarray) -> Any:
        k, v = Honest.keys_and_values(kernel, cols, keep)
        return k, change(kernel, k, v) if absorbed(kernel) else v

    return {"keys_and_values": keys_and_values}


def _swapped_halves(kernel: Any, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    return np.concatenate([v[..., 256:], v[..., :256]], axis=-1)


def _contiguous_v(call: Call, place: Any) -> Any:
    """V is read as if its rows were not longer than they are."""
    q, k, v = Call.gather(call, place)
    if call.v.shape[-1] == 512 and not call.v.flags.c_contiguous and call.v.base is not None:
        base = call.v.base.view(np.uint8).reshape(-1)
        start = call.v.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        flat = base[start : start + call.v.size * call.v.itemsize].view(call.v.dtype)
        v = flat.reshape(call.v.shape)[place.keys]
    return q, k, v


def _own_scale(kernel: Any) -> float:
    return float(kernel.dim**-0.5) if absorbed(kernel) else Honest.scale(kernel)


def _heads_of_64(kernel: Any) -> Any:
    state = Honest.combined(kernel)
    if absorbed(kernel) and kernel.heads > 64:
        state.out[64:] = state.out[: kernel.heads - 64]
    return state


def _folded_rows(kernel: Any, cols: slice) -> np.ndarray:
    """Heads are folded into rows, and the mask forgets to divide."""
    distance = Honest.distance(kernel, cols)
    if not (absorbed(kernel) and kernel.options.causal and kernel.rows > 1):
        return distance
    return distance - np.arange(kernel.rows)[:, None]


def _page_rows(call: Call, b: int, count: int) -> Any:
    page, slot = Call.pages(call, b, count)
    if call.k.shape[-1] == 576:
        slot = np.minimum(slot, call.k.shape[1] - 2)
    return page, slot


def _rope_of_next_head(kernel: Any, k: np.ndarray) -> np.ndarray:
    if not expanded(kernel):
        return Honest.products(kernel, k)
    q = kernel.wide_q.copy()
    q[..., 128:] = np.roll(q[..., 128:], 1, axis=0)
    return q @ k.transpose(0, 2, 1)


def _fault(name: str, description: str, named_by: tuple[str, ...], **more: Any) -> Fault:
    return Fault(f"mla_{name}", MLA_CLASS, description, named_by, **more)


MLA_FAULTS = (
    _fault("rope_dropped", "the position's 64 channels of 576 do not count", ("mla rope",),
           kernel={"products": _without_rope(absorbed)}),
    _fault("rope_dropped_in_prefill", "the position's 64 channels of 192 do not count",
           ("mla rope",), kernel={"products": _without_rope(expanded)}),
    _fault("half_of_rope", "half of the position's channels count", ("mla rope",),
           kernel={"products": _half_of_rope}),
    _fault("half_of_latent", "half of the latent's channels count", ("mla latent",),
           kernel={"products": _first_half_of_latent}),
    _fault("v_view_offset", "V is the last 512 channels of K", ("mla latent", "mla view"),
           kernel=_v_from(lambda kernel, k, v: k[..., 64:] if np.array_equal(k[..., :512], v)
                          else v)),
    _fault("v_halves_swapped", "the two halves of V's channels change places", ("mla",),
           kernel=_v_from(_swapped_halves)),
    _fault("v_contiguous", "V's rows are read as 512 channels apart", ("mla view",),
           call={"gather": _contiguous_v}),
    _fault("own_scale", "the factor is 576^-1/2, whatever is given", ("mla",),
           kernel={"scale": _own_scale}),
    _fault("heads_of_64", "heads behind the 64th repeat the first", ("mla many_heads",),
           kernel={"combined": _heads_of_64}),
    _fault("rows_folded", "the causal mask counts rows twice", ("mla causal",),
           kernel={"distance": _folded_rows}),
    _fault("page_rows", "the last latent of a page is the one before", ("mla paged",),
           call={"pages": _page_rows}),
    _fault("rope_of_next_head", "the position's part of q is the next head's",
           ("mla rope", "mla prefill"), kernel={"products": _rope_of_next_head}),
)  # fmt: skip
