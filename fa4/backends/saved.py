"""What a gradient is computed from, as a user hands it over: dO, and the O and LSE of the call."""

from __future__ import annotations

from typing import Any

import numpy as np

from fa4.backends import Saved
from fa4.call.arrays import element_type, is_torch, to_numpy
from fa4.call.call import Call

_WHENCE = {
    "dout": "the gradient of the call's out",
    "out": "the call's out",
    "lse": "the call's lse (return_lse=True)",
}
_FLOATS = ("bf16", "fp16", "fp32", "fp64")


def read_saved(call: Call, saved: Saved, dout: Any, dlse: Any) -> tuple[Saved, Any, Any]:
    """(O, LSE and residual, dO, dLSE), arrays as NumPy's, all checked against their call.

    Raises TypeError for what is missing or of another framework or kind of type, ValueError for
    another shape or device; where tensors are on the CPU, also for an LSE that cannot be the
    call's. Nothing else of what lies in tensors is looked at.
    """
    given = {"dout": dout, "out": saved.out, "lse": saved.lse, "dlse": dlse,
             "out_residual": saved.residual}  # fmt: skip
    for name, value in given.items():
        if value is not None or name not in ("dlse", "out_residual"):
            shape = call.lse_shape if name.endswith("lse") else call.out_shape
            given[name] = _read(name, value, tuple(shape), call.q)
    dout, out, lse, dlse, residual = given.values()
    if not is_torch(lse) or lse.device.type == "cpu":
        _check_lse(call, to_numpy("lse", lse))
    return Saved(out, lse, residual), dout, dlse


def _read(name: str, value: Any, shape: tuple[int, ...], q: Any) -> Any:
    """The tensor, or a NumPy array of it, of this shape and where q is."""
    if value is None:
        raise TypeError(f"{name} must be {_WHENCE[name]}; got None")
    if is_torch(q) != is_torch(value):
        kind = "a torch tensor" if is_torch(q) else "no torch tensor"
        raise TypeError(f"{name} must be {kind}, as q is; got {type(value).__name__}")
    if not is_torch(q):
        value = to_numpy(name, value)
    elif value.device != q.device:
        raise ValueError(f"{name} must be on {q.device}, as q is; got {value.device}")
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}; got {tuple(value.shape)}")
    kind = str(value.dtype).removeprefix("torch.")
    if "float" not in kind or element_type(value) not in _FLOATS:
        raise TypeError(f"{name} must be of {', '.join(_FLOATS)}; got {kind}")
    return value


def _check_lse(call: Call, lse: np.ndarray) -> None:
    """No row of a sequence has a NaN or infinity, and none -infinity where all see keys."""
    wrong = np.isnan(lse) | np.isposinf(lse)
    if _all_rows_see_keys(call):
        wrong |= np.isneginf(lse)
    wrong &= _rows_of_sequences(call)
    if wrong.any():
        at = tuple(map(int, np.argwhere(wrong)[0]))
        raise ValueError(f"lse must be finite where rows see keys; got {lse[at]} at {at}")


def _all_rows_see_keys(call: Call) -> bool:
    """Is there nothing that could hide all keys of a row?"""
    extras = call.extras
    given = (call.cu_seqlens_k, call.seqused_k, call.page_table, extras.mask_mod, extras.score_mod)
    hidden = any(x is not None for x in given) or bool(call.sparse_block)
    return not hidden and call.window == (None, None) and call.k.shape[-3] > 0


def _rows_of_sequences(call: Call) -> np.ndarray:
    """Which rows belong to a sequence, in a shape that broadcasts with the LSE's."""
    rows = int(call.q.shape[-3])
    used = None if call.seqused_q is None else to_numpy("seqused_q", call.seqused_q)
    if call.cu_seqlens_q is None:
        if used is None:
            return np.ones(1, bool)
        found: np.ndarray = np.arange(rows) < used[:, None, None]
        return found
    offsets = to_numpy("cu_seqlens_q", call.cu_seqlens_q)
    found = np.zeros(rows, bool)
    for start, end, length in zip(
        offsets[:-1], offsets[1:], np.diff(offsets) if used is None else used, strict=True
    ):
        found[start : min(start + length, end)] = True
    return found
