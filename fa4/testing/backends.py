"""Functions under test: what they take, how they are called, and what they do not cover.

A back end is `f(q, k, v, **options)` on NumPy arrays (batch, seqlen, heads, head_dim) that returns
`out` or `(out, lse)`. Option names are those of `fa4.flash_attn_func`, and only options that differ
from their defaults are passed. What it does not support is *not covered*, never passed:

- an option that its signature does not name (a `**kwargs` accepts any, and may raise TypeError for
  an unexpected keyword);
- a call that raises NotImplementedError;
- an element type for which even the smallest plain call raises TypeError;
- a feature in its attribute `not_covered`, a dict from feature to reason.

Optional attributes of the function: `varlen`, a function with cu_seqlens_q, cu_seqlens_k,
seqused_q, seqused_k, page_table (the function itself, if its own signature names cu_seqlens_q);
`backward(dout, q, k, v, out, lse, **options)` -> (dq, dk, dv[, dsink]), with `dlse` if named;
`fa4_dropout = True` if it drops the same elements as fa4 for a dropout_seed.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

import fa4
from fa4.arrays import to_numpy
from fa4.dtypes import dtype_name
from fa4.testing.budget import Outputs
from fa4.testing.case import Case
from fa4.testing.inputs import Inputs
from fa4.testing.layouts import build_inputs

BUILT_IN = ("reference", "oracle", "torch-sdpa")
DTYPES = ("fp32", "bf16", "fp16", "fp64")
FP8 = ("e4m3", "e5m2")


class NotCovered(Exception):
    """The back end does not offer `feature`; `reason` says how that is known."""

    def __init__(self, feature: str, reason: str) -> None:
        super().__init__(f"{feature}: {reason}")
        self.feature, self.reason = feature, reason


def named_keywords(function: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    """(keyword names in the signature, does it take any keyword?); (none, True) if unreadable."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return frozenset(), True
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = frozenset(p.name for p in parameters if p.kind in by_name)
    return names, any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


@dataclass(eq=False)
class Backend:
    """A function under test. `name` is what `load_backend` takes; see the module for attributes.

    `notes` collects what turned out not to be covered: feature to reason.
    """

    name: str
    function: Callable[..., Any]
    varlen: Callable[..., Any] | None = None
    backward: Callable[..., Any] | None = None
    fa4_dropout: bool = False
    not_covered: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    @classmethod
    def wrap(cls, function: Callable[..., Any], name: str | None = None) -> Backend:
        """A back end from any callable and its optional attributes."""
        varlen = getattr(function, "varlen", None)
        if varlen is None and "cu_seqlens_q" in named_keywords(function)[0]:
            varlen = function
        return cls(
            name=name or import_name(function) or str(getattr(function, "__name__", "function")),
            function=function,
            varlen=varlen,
            backward=getattr(function, "backward", None),
            fa4_dropout=getattr(function, "fa4_dropout", False),
            not_covered=dict(getattr(function, "not_covered", {})),
        )

    def call(self, function: Callable[..., Any], *arrays: Any, **options: Any) -> Any:
        """`function(*arrays, **options)`; NotCovered for what it does not offer."""
        names, takes_any = named_keywords(function)
        for option in options:
            if option not in names and not takes_any:
                raise self.missing(option, "not in its signature")
        dtype = dtype_name(arrays[0].dtype)
        asked = ", ".join(sorted(options)) or "this shape or element type"
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")  # results are judged, not noise on the way
                return function(*arrays, **options)
        except NotImplementedError as error:
            raise self.missing(asked, str(error) or "raises NotImplementedError") from error
        except TypeError as error:
            if "unexpected keyword" in str(error):
                raise self.missing(asked, str(error)) from error
            if self.refusal(dtype) is not None:
                raise self.missing(dtype, str(error)) from error
            raise

    def missing(self, feature: str, reason: str) -> NotCovered:
        """The exception for a feature, which is noted too."""
        reason = " ".join(reason.split())
        self.notes.setdefault(feature, reason)
        return NotCovered(feature, reason)

    def forward(self, inputs: Inputs) -> Outputs:
        """out and lse (None if it returns none) of a call.

        Raises NotCovered, AssertionError for results that are no arrays of the right shape, and
        whatever the function raises.
        """
        function = self.varlen if inputs.is_varlen else self.function
        if function is None:
            raise self.missing("varlen", "no attribute `varlen` and no cu_seqlens_q")
        names, _ = named_keywords(function)
        extra = {name: value for name, value in inputs.hints.items() if name in names}
        if "return_lse" in names:
            extra["return_lse"] = True
        arrays = (
            x.copy(order="K") if x.base is None else x for x in (inputs.q, inputs.k, inputs.v)
        )
        result = self.call(function, *arrays, **(extra | inputs.options))
        out, lse = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        rows, heads = inputs.q.shape[:-1], inputs.q.shape[-2]
        shape = (*rows, inputs.v.shape[-1])
        lse_shape = (*rows[:-2], heads, rows[-2])
        return Outputs(
            _array("out", out, shape), None if lse is None else _array("lse", lse, lse_shape)
        )

    def gradients(self, inputs: Inputs, saved: Outputs, *, with_dlse: bool = False) -> Outputs:
        """`saved` completed by dq, dk, dv and dsink; lse may be None if the function ignores it."""
        if self.backward is None:
            raise self.missing("gradients", "no attribute `backward`")
        options = dict(inputs.options)
        if with_dlse:
            options["dlse"] = inputs.dlse
        arrays = (inputs.dout, inputs.q, inputs.k, inputs.v, saved.out)
        result = self.call(self.backward, *map(_own, arrays), saved.lse, **options)
        if not isinstance(result, tuple) or len(result) not in (3, 4):
            raise AssertionError(f"backward must return (dq, dk, dv[, dsink]); got {type(result)}")
        sink = inputs.options.get("learnable_sink")
        dsink = None
        if sink is not None:
            if len(result) < 4 or result[3] is None:
                raise AssertionError("backward must return dsink with a learnable_sink; got none")
            dsink = _array("dsink", result[3], sink.shape)
        return Outputs(
            saved.out,
            saved.lse,
            _array("dq", result[0], inputs.q.shape),
            _array("dk", result[1], inputs.k.shape),
            _array("dv", result[2], inputs.v.shape),
            dsink,
        )

    def refusal(self, dtype: str) -> str | None:
        """Why the smallest plain call of an element type is refused; None if it runs."""
        if dtype not in self._refusals:
            inputs = build_inputs(Case(dtype=dtype))
            self._refusals[dtype] = None
            try:
                self.function(inputs.q, inputs.k, inputs.v)
            except (TypeError, NotImplementedError) as error:
                self._refusals[dtype] = str(error) or type(error).__name__
            except Exception:  # judged, and reported, by the properties
                self._refusals[dtype] = None
        return self._refusals[dtype]

    @cached_property
    def _refusals(self) -> dict[str, str | None]:
        return {}

    @cached_property
    def returns_lse(self) -> bool:
        """Does the smallest call that it accepts return (out, lse)?"""
        for dtype in DTYPES:
            with suppress(Exception):  # another type, or a fault that the properties report
                return self.forward(build_inputs(Case(dtype=dtype))).lse is not None
        return False

    def reason_missing(self, feature: str) -> str | None:
        """Why a feature is not covered; None if nothing speaks against it.

        Features are keyword names of `fa4.flash_attn_func`, element types, and "lse", "gradients",
        "dlse", "varlen", "seqused", "paged", "dropout", "masked_nan".
        """
        if feature in self.not_covered:
            return self.not_covered[feature]
        if feature in DTYPES + FP8:
            return self.refusal(feature)
        if feature == "lse":
            return None if self.returns_lse else "returns no LSE"
        if feature == "gradients":
            return None if self.backward else "no attribute `backward`"
        if feature == "dlse":
            return _unless_named(self.backward, "dlse")
        if feature == "dropout":
            why = _unless_named(self.function, "dropout_p", "dropout_seed")
            return why or (None if self.fa4_dropout else "another random generator than fa4's")
        if feature in ("varlen", "seqused", "paged"):
            keywords = {"varlen": ("cu_seqlens_q", "cu_seqlens_k"),
                        "seqused": ("seqused_q", "seqused_k"),
                        "paged": ("page_table", "seqused_k")}[feature]  # fmt: skip
            return _unless_named(self.varlen, *keywords)
        if feature == "masked_nan":
            return None
        return _unless_named(self.function, feature)


def _unless_named(function: Callable[..., Any] | None, *keywords: str) -> str | None:
    """None if the function takes these keywords, else the reason."""
    if function is None:
        return "no attribute `varlen` and no cu_seqlens_q"
    names, takes_any = named_keywords(function)
    lacking = [keyword for keyword in keywords if keyword not in names and not takes_any]
    return f"its signature does not name {', '.join(lacking)}" if lacking else None


def _own(x: np.ndarray) -> np.ndarray:
    """A copy, so that a function that writes to its inputs changes nothing else; views stay."""
    return x.copy(order="K") if x.base is None else x


def _array(name: str, value: Any, shape: tuple[int, ...]) -> np.ndarray:
    """A result as a NumPy array of the right shape, or AssertionError."""
    try:
        array = to_numpy(name, value)
    except TypeError as error:
        raise AssertionError(str(error)) from error
    if array.shape != shape:
        raise AssertionError(f"{name} must have shape {shape}; got {array.shape}")
    if array.dtype.kind in "OUSc":
        raise AssertionError(f"{name} must hold real numbers; got dtype {array.dtype}")
    return array


def import_name(function: Callable[..., Any]) -> str | None:
    """ "module:function" if that is where the function can be imported from."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    found: Any = sys.modules.get(module or "")
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is function and module != "__main__" else None


def load_backend(name: str | Callable[..., Any] | Backend) -> Backend:
    """A back end by name: "reference", "oracle", "torch-sdpa" or "mypkg.module:function".

    Modules are found as Python finds them, and in the current directory too. A callable is wrapped,
    a Backend returned. Raises ValueError with one line for a name that leads nowhere.
    """
    if isinstance(name, Backend):
        return name
    if not isinstance(name, str):
        if not callable(name):
            raise ValueError(f"a back end must be a name or a callable; got {name!r}")
        return Backend.wrap(name)
    if name in ("reference", "oracle"):
        return _fa4_backend(name)
    if name == "torch-sdpa":
        from fa4.testing.torch_sdpa import torch_sdpa

        return Backend.wrap(torch_sdpa(), name)
    return Backend.wrap(_import(name), name)


def _import(name: str) -> Callable[..., Any]:
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        raise ValueError(
            f'the back end must be one of {", ".join(BUILT_IN)} or "module:function"; got {name!r}'
        )
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:  # a module may fail in any way while it is imported
        raise ValueError(f"cannot import {module!r} of the back end {name!r}: {error}") from error
    finally:
        if added:
            sys.path.remove(here)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(f"module {module!r} has no {attribute!r}; the back end was {name!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"the back end must be callable; {name!r} is a {type(found).__name__}")
    return found


def _fa4_backend(impl: str) -> Backend:
    """Our reference or oracle."""
    varlen_keys = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "page_table")

    def backward(
        dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, dlse: Any = None, **options: Any
    ) -> tuple[Any, ...]:
        packed = any(name in options for name in varlen_keys)
        run = fa4.flash_attn_varlen_backward if packed else fa4.flash_attn_backward
        return tuple(run(dout, q, k, v, out, lse, dlse=dlse, impl=impl, **options))

    return Backend(
        name=impl,
        function=partial(fa4.flash_attn_func, impl=impl),
        varlen=partial(fa4.flash_attn_varlen_func, impl=impl),
        backward=backward,
        fa4_dropout=True,
    )
