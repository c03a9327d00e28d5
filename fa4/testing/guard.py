"""Memory around one call: what it is given lies between canaries and is looked at afterwards.

Whatever a back end is called with is copied into buffers of its own, views keep their strides and
go on sharing a buffer, and 256 bytes of ones lie on either side: NaN in every float type. After the
call not a byte of them may differ, and no result may lie in them. Before it, memory of the results'
sizes is filled with NaN and freed, so that what is allocated and never written is seen.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from fa4.testing.forks import in_one_process
from fa4.testing.refusals import Breach

MARGIN_BYTES = 256  # a multiple of every alignment that a kernel asks for
_ONES = 0xFF
NAMES = ("q", "k", "v")
BACKWARD_NAMES = ("dout", "q", "k", "v", "out", "lse")


class Guard:
    """The arguments of one call."""

    def __init__(self) -> None:
        self._buffers: dict[int, np.ndarray] = {}  # by the identity of what was copied
        self._alive: list[np.ndarray] = []  # so that identities stay unique
        self._before: list[tuple[str, np.ndarray, np.ndarray, int]] = []

    def remember(self) -> None:
        """Nothing: copies are made for one call."""

    def place(self, name: str, value: Any) -> Any:
        """The value for the call: arrays copied, also in tuples; everything else as it is."""
        if isinstance(value, np.ndarray):
            return self._place_array(name, value)
        if isinstance(value, tuple) and any(isinstance(x, (np.ndarray, tuple)) for x in value):
            items = [self.place(name, item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        return value

    def _place_array(self, name: str, x: np.ndarray) -> np.ndarray:
        base = _buffer_of_view(x)
        if base is None:
            flat = self._buffer(name, np.ascontiguousarray(x))
            if not x.flags.c_contiguous or not x.size:
                return flat.reshape(x.shape)
            # An axis of one entry may have any stride, and some functions read it.
            return np.ndarray(x.shape, x.dtype, flat.base, MARGIN_BYTES, x.strides)
        room = self._buffer(name, base)
        offset = x.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        whole = room.base
        assert isinstance(whole, np.ndarray)
        return np.ndarray(x.shape, x.dtype, whole, offset + MARGIN_BYTES, x.strides)

    def _buffer(self, name: str, source: np.ndarray) -> np.ndarray:
        """A copy of a contiguous array with its margins, flat and without them."""
        margin = MARGIN_BYTES // source.itemsize
        if id(source) not in self._buffers:
            whole = np.empty(source.size + 2 * margin, source.dtype)
            whole.view(np.uint8)[...] = _ONES
            whole[margin : margin + source.size] = source.reshape(-1)
            self._buffers[id(source)] = whole
            self._alive.append(source)
            self._before.append((name, whole, whole.copy(), source.nbytes))
        return self._buffers[id(source)][margin : margin + source.size]

    def check(self, results: Iterable[tuple[str, Any]] = ()) -> None:
        """Breach if the call wrote to an argument, next to one, or returned one."""
        for name, whole, before, nbytes in self._before:
            now, then = whole.view(np.uint8), before.view(np.uint8)
            if np.array_equal(now, then):
                continue
            at = int(np.argmax(now != then)) - MARGIN_BYTES
            if 0 <= at < nbytes:
                raise Breach(f"{name} was changed in place by the call, first at byte {at}")
            where = f"{-at} bytes before" if at < 0 else f"{at - nbytes} bytes behind"
            raise Breach(f"the call wrote {where} the memory of {name}")
        for result, value in results:
            for name, whole, _, _ in self._before:
                if isinstance(value, np.ndarray) and value.size and np.shares_memory(value, whole):
                    raise Breach(f"{result} lies in the memory of {name}, not in its own")


class KeptGuard(Guard):
    """The arguments of calls that follow one another in the same memory, as under a captured graph.

    What is placed under one name with one shape, type and strides is the same array each time, with
    the new elements; such arrays live on for a while, so that no later one has their address.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[Any, np.ndarray] = {}
        _LATEST.append(self)

    def _place_array(self, name: str, x: np.ndarray) -> np.ndarray:
        key = name, x.shape, x.dtype, x.strides
        if key not in self._kept:
            placed = super()._place_array(name, x.copy())
            _COPIES[id(placed)] = {}
            weakref.finalize(placed, _COPIES.pop, id(placed), None)
            self._kept[key] = placed
        self._kept[key][...] = x
        return self._kept[key]

    def remember(self) -> None:
        """What the arrays hold now is what they must hold after the call."""
        self._before = [
            (name, whole, whole.copy(), nbytes) for name, whole, _, nbytes in self._before
        ]


_LATEST: deque[KeptGuard] = deque(maxlen=1024)
_COPIES: dict[int, dict[str, Any]] = {}  # of kept arrays, by identity


def copies_of(x: np.ndarray) -> dict[str, Any] | None:
    """What a framework made of an array that a `KeptGuard` keeps, by device; None for others."""
    return _COPIES.get(id(x))


def guarded_call(
    function: Any, arrays: tuple[Any, ...], options: dict[str, Any], guard: Guard | None = None
) -> Any:
    """The result of `function(*arrays, **options)` on guarded copies; Breach for a write
    outside the results, BackendFailed if it comes back twice. Exceptions of the function pass.
    guard: of calls on the same memory."""
    guard = Guard() if guard is None else guard
    names = BACKWARD_NAMES if len(arrays) > len(NAMES) else NAMES
    placed = [guard.place(name, x) for name, x in zip(names, arrays, strict=False)]
    keywords = {name: guard.place(name, x) for name, x in options.items() if name not in POISONED}
    results = {name: options[name] for name in POISONED if name in options}
    poison_memory(arrays)
    guard.remember()
    result = in_one_process(
        lambda: function(*placed, *arrays[len(placed) :], **keywords, **results)
    )
    parts = result if isinstance(result, tuple) else (result,)
    guard.check((f"result {n}", part) for n, part in enumerate(parts))
    return result


# Results that some back ends write to where they are told; they get memory full of NaN.
POISONED = ("dq", "dk", "dv", "out")


def poison_memory(arrays: Iterable[Any]) -> None:
    """Fill memory of the sizes of these arrays, in their type and in float32, with NaN; free it.

    What a call allocates next is often that memory, and what it leaves unwritten is then NaN.
    """
    kept = []
    for x in arrays:
        if isinstance(x, np.ndarray) and x.dtype.kind in "fV":
            kept += [np.full(nbytes, _ONES, np.uint8) for nbytes in (x.nbytes, 4 * x.size)]
    kept.clear()


def _buffer_of_view(x: np.ndarray) -> np.ndarray | None:
    """The contiguous array of the same type that a view with gaps shows a part of, if it is one."""
    base = x.base
    if not isinstance(base, np.ndarray) or x.flags.c_contiguous:
        return None
    return base if base.dtype == x.dtype and base.flags.c_contiguous else None
