"""Functions under test: what they take, how they are called, and what they do not cover.

A back end is `f(q, k, v, **options)` on NumPy arrays (batch, seqlen, heads, head_dim) that returns
`out` or `(out, lse)`, the LSE in any float type. Option names are those of `fa4.flash_attn_func`,
and only options that differ from their defaults are passed. What it does not support is *not
covered*, never passed:

- an option that its signature does not name (a `**kwargs` accepts any, and may raise TypeError for
  an unexpected keyword);
- a call that raises NotImplementedError, or what its attribute `unsupported` names: exception
  types, or a predicate on the exception. Only that call: other shapes and options are still asked;
- an element type for which plain calls of several ordinary shapes all raise that, or TypeError;
- a feature in its attribute `not_covered`, a dict from feature to reason.

Further attributes of the function, all optional: `varlen`, a function with cu_seqlens_q,
cu_seqlens_k, seqused_q, seqused_k, page_table (the function itself, if its own signature names
cu_seqlens_q); `backward(dout, q, k, v, out, lse, **options)` -> (dq, dk, dv[, dsink]), with `dlse`
if named; `fa4_dropout = True` if it drops the same elements as fa4 for a dropout_seed; `claims`,
promises to be held to ("robustness": whatever lies at keys that no row sees does not matter;
"deterministic": gradients are the same bits each time; "batch_invariant": a sequence's bits do not
depend on what else is in the call; "chunk_invariant": nor on how its rows are dealt over calls);
`numerics`, a dict of what it declares of its sums and of FP8 (`fa4.testing.numerics.Numerics`);
`uses_cuda = True` if it is better run in a process of its own (`fa4.testing.isolation`).
A function whose signature names `out`, or `dq`, `dk`, `dv`,
gets memory of the result full of NaN there; a backward that names `out_residual` gets what
rounding took from O where a property asks for that.

Every call is guarded: its arguments are copies, and nothing outside the results may be written
(`fa4.testing.guard`). Gradients of rows and keys that no sequence uses must be 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from fa4.dtypes import dtype_name, numpy_dtype
from fa4.testing.budget import Outputs
from fa4.testing.case import Case
from fa4.testing.forks import in_one_process
from fa4.testing.guard import KeptGuard, guarded_call
from fa4.testing.inputs import Inputs
from fa4.testing.layouts import build_inputs
from fa4.testing.numerics import USUAL_NUMERICS, Numerics
from fa4.testing.plain import output_type
from fa4.testing.refusals import (
    BackendFailed,
    NoAnswer,
    NotCovered,
    Refusal,
    describe_call,
    is_poison,
    named_keywords,
    quiet,
    readable,
    reason_of,
    refuses_by,
)

DTYPES = ("fp32", "bf16", "fp16", "fp64")
FP8 = ("e4m3", "e5m2")
MOST_SILENT = 2  # element types whose first call hangs, before the function is asked no more


@dataclass(eq=False)
class Backend:
    """A function under test. `name` is what `load_backend` takes; see the module for attributes.

    `notes` collects what turned out not to be covered: feature to reason. Of calls refused for the
    same reason, the first stands for all.
    """

    name: str
    function: Callable[..., Any]
    varlen: Callable[..., Any] | None = None
    backward: Callable[..., Any] | None = None
    fa4_dropout: bool = False
    not_covered: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    claims: frozenset[str] = frozenset()
    numerics: Numerics = USUAL_NUMERICS
    uses_cuda: bool = False
    unsupported: Refusal | None = None
    importable: bool = True
    isolated: bool = False

    @classmethod
    def wrap(cls, function: Callable[..., Any], name: str) -> Backend:
        """A back end from any callable and its optional attributes."""
        varlen = getattr(function, "varlen", None)
        if varlen is None and "cu_seqlens_q" in named_keywords(function)[0]:
            varlen = function
        return cls(
            name=name,
            function=function,
            varlen=varlen,
            backward=getattr(function, "backward", None),
            fa4_dropout=getattr(function, "fa4_dropout", False),
            not_covered=dict(getattr(function, "not_covered", {})),
            claims=frozenset(getattr(function, "claims", ())),
            numerics=Numerics(**getattr(function, "numerics", {})),
            uses_cuda=bool(getattr(function, "uses_cuda", False)),
            unsupported=refuses_by(getattr(function, "unsupported", None)),
        )

    @property
    def isolate_by_default(self) -> bool:
        """Is it better run in a process of its own? A crash on a GPU takes its process along."""
        return self.uses_cuda and self.importable and not self.isolated

    def close(self) -> None:
        """End the worker process of an isolated back end; nothing for others."""
        close = getattr(self.function, "close", None)
        if self.isolated and close is not None:
            close()

    def call(
        self,
        function: Callable[..., Any],
        *arrays: Any,
        kept_guard: KeptGuard | None = None,
        **options: Any,
    ) -> Any:
        """`function(*arrays, **options)`; NotCovered for what it does not offer.

        kept_guard: the memory of calls that follow one another. What is no Exception, such as
        SystemExit, becomes BackendFailed; KeyboardInterrupt passes.
        """
        names, takes_any = named_keywords(function)
        for option in options:
            if option not in names and not takes_any:
                raise self.missing(option, "not in its signature")
        try:
            with quiet():
                if self.isolated:  # the worker looks at its own copies
                    kept = {} if kept_guard is None else {"kept_guard": kept_guard}
                    return function(*arrays, **options, **kept)
                return guarded_call(function, arrays, options, kept_guard)
        except Exception as error:
            if isinstance(error, TypeError) and "unexpected keyword" in str(error):
                raise self.missing(", ".join(sorted(options)), str(error)) from error
            refused = self.refuses(error)
            if refused or isinstance(error, TypeError):
                dtype = dtype_name(arrays[0].dtype)
                if self.refusal(dtype) is not None:
                    raise self.missing(dtype, reason_of(error)) from error
            if refused:
                raise self._refused_call(arrays, options, reason_of(error)) from error
            raise
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise BackendFailed(f"raised {error!r}") from error

    def refuses(self, error: BaseException) -> bool:
        """Does this exception say "I do not offer that"? A poisoned CUDA context never does."""
        if isinstance(error, NotImplementedError):
            return True
        return self.unsupported is not None and not is_poison(error) and self.unsupported(error)

    def missing(self, feature: str, reason: str) -> NotCovered:
        """The exception for a feature, which is noted too."""
        reason = " ".join(reason.split())
        self.notes.setdefault(feature, reason)
        return NotCovered(feature, reason)

    def _refused_call(self, arrays: Any, options: dict[str, Any], reason: str) -> NotCovered:
        """The exception for one call; noted if it is the first that is refused for this reason."""
        kind = re.sub(r"\d+", "#", reason)
        feature = describe_call(arrays, options)
        if kind not in self._kinds:
            self._kinds.add(kind)
            self.notes.setdefault(feature, reason)
        return NotCovered(feature, reason, kind)

    def forward(self, inputs: Inputs, kept_guard: KeptGuard | None = None) -> Outputs:
        """out and lse (None if it returns none) of a call; `kept_guard` as for `call`.

        Raises NotCovered, AssertionError for results that are no arrays of the right shape, and
        whatever the function raises.
        """
        function = self.varlen if inputs.is_varlen else self.function
        if function is None:
            raise self.missing("varlen", "no attribute `varlen` and no cu_seqlens_q")
        extra = _hints(function, inputs) | _poisoned(function, inputs, ("out",))
        if "return_lse" in named_keywords(function)[0]:
            extra["return_lse"] = True
        arrays = (inputs.q, inputs.k, inputs.v)
        options = extra | inputs.options
        result = self.call(function, *arrays, kept_guard=kept_guard, **options)
        if isinstance(result, tuple) and len(result) != 2:
            raise AssertionError(
                f"the function must return out or (out, lse); got {len(result)} results"
            )
        out, lse = result if isinstance(result, tuple) else (result, None)
        rows, heads = inputs.q.shape[:-1], inputs.q.shape[-2]
        shape = (*rows, inputs.v.shape[-1])
        lse_shape = (*rows[:-2], heads, rows[-2])
        return Outputs(
            _array("out", out, shape), None if lse is None else _array("lse", lse, lse_shape)
        )

    def gradients(
        self,
        inputs: Inputs,
        saved: Outputs,
        *,
        with_dlse: bool = False,
        out_residual: np.ndarray | None = None,
    ) -> Outputs:
        """`saved` completed by dq, dk, dv and dsink; lse may be None if the function ignores it.

        out_residual: for a function that names it.
        """
        if self.backward is None:
            raise self.missing("gradients", "no attribute `backward`")
        options = _hints(self.backward, inputs) | inputs.options
        options |= _poisoned(self.backward, inputs, ("dq", "dk", "dv"))
        if with_dlse:
            options["dlse"] = inputs.dlse
        if out_residual is not None and "out_residual" in named_keywords(self.backward)[0]:
            options["out_residual"] = out_residual
        arrays = (inputs.dout, inputs.q, inputs.k, inputs.v, saved.out)
        result = self.call(self.backward, *arrays, saved.lse, **options)
        if not isinstance(result, tuple) or len(result) not in (3, 4):
            count = f"{len(result)} results" if isinstance(result, tuple) else type(result).__name__
            raise AssertionError(f"backward must return (dq, dk, dv[, dsink]); got {count}")
        sink = inputs.options.get("learnable_sink")
        dsink = None
        if sink is not None:
            if len(result) < 4 or result[3] is None:
                raise AssertionError("backward must return dsink with a learnable_sink; got none")
            dsink = _array("dsink", result[3], sink.shape)
        shapes = {"dq": inputs.q.shape, "dk": inputs.k.shape, "dv": inputs.v.shape}
        found = {
            name: _array(name, result[n], shape) for n, (name, shape) in enumerate(shapes.items())
        }
        return Outputs(saved.out, saved.lse, **found, dsink=dsink)

    def refusal(self, dtype: str) -> str | None:
        """Why an element type is refused, whatever the shape; None if any plain call runs."""
        if dtype not in self._refusals:
            self._refusals[dtype] = self._probe(dtype)
        return self._refusals[dtype]

    def _probe(self, dtype: str) -> str | None:
        reason = None
        for case in _ordinary_cases(dtype):
            if len(self._silent) >= MOST_SILENT:
                return None
            inputs = build_inputs(case)
            try:
                with quiet():
                    in_one_process(lambda: self.function(inputs.q, inputs.k, inputs.v))  # noqa: B023
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                if isinstance(error, NoAnswer):
                    self._silent.add(dtype)
                if not isinstance(error, TypeError) and not self.refuses(error):
                    return None  # a fault: judged, and reported, by the properties
                reason = reason or reason_of(error)
            else:
                return None
        return reason

    @cached_property
    def _silent(self) -> set[str]:
        """Element types whose first call did not end: after some of them no call is a try more."""
        return set()

    @cached_property
    def _refusals(self) -> dict[str, str | None]:
        return {}

    @cached_property
    def _kinds(self) -> set[str]:
        return set()

    @cached_property
    def returns_lse(self) -> bool:
        """Does the first ordinary call that it accepts return (out, lse)?"""
        notes = dict(self.notes)
        try:
            for dtype in DTYPES:
                for case in _ordinary_cases(dtype):
                    if dtype in self._silent or len(self._silent) >= MOST_SILENT:
                        break
                    try:
                        return self.forward(build_inputs(case)).lse is not None
                    except NoAnswer:
                        self._silent.add(dtype)
                    except Exception:  # not offered, or a fault that is reported elsewhere
                        continue
            return False
        finally:
            self.notes = notes

    def reason_missing(self, feature: str) -> str | None:
        """Why a feature is not covered; None if nothing speaks against it.

        Features are keyword names of `fa4.flash_attn_func`, element types, and "lse", "gradients",
        "dlse", "varlen", "seqused", "paged", "max_seqlen", "dropout", "masked_nan", and
        "scales_tensor", "scales_head" or "scales_block", what FP8 factors belong to, and the claims
        "batch_invariant" and "chunk_invariant".
        """
        if feature in self.not_covered:
            return self.not_covered[feature]
        if feature in DTYPES + FP8:
            return self.refusal(feature)
        if feature == "lse":
            if self.returns_lse:
                return None
            silent = len(self._silent) >= MOST_SILENT
            return "no answer to the first calls" if silent else "returns no LSE"
        if feature == "gradients":
            return None if self.backward else "no attribute `backward`"
        if feature == "dlse":
            return _unless_named(self.backward, "backward", "dlse")
        if feature == "dropout":
            why = _unless_named(self.function, "function", "dropout_p", "dropout_seed")
            return why or (None if self.fa4_dropout else "another random generator than fa4's")
        if feature in ("varlen", "seqused", "paged"):
            keywords = {"varlen": ("cu_seqlens_q", "cu_seqlens_k"),
                        "seqused": ("seqused_q", "seqused_k"),
                        "paged": ("page_table", "seqused_k")}[feature]  # fmt: skip
            return _unless_named(self.varlen, "varlen", *keywords)
        if feature == "max_seqlen":  # a hint: passed only where it is named
            names = named_keywords(self.varlen)[0] if self.varlen else frozenset()
            named = {"max_seqlen_q", "max_seqlen_k"} & names
            return None if named else "its signature does not name max_seqlen_q, max_seqlen_k"
        if feature == "masked_nan":
            return None
        if feature.endswith("_invariant"):
            return None if feature in self.claims else f"it does not claim to be {feature}"
        if feature.startswith("scales_"):
            own = self.numerics.fp8_scales
            fits = self.numerics.takes_scales(feature.removeprefix("scales_"))
            return None if fits else f"its factors belong to a {own}"
        return _unless_named(self.function, "function", feature)


def _ordinary_cases(dtype: str) -> tuple[Case, ...]:
    """Plain problems that any attention of an element type takes: friendly ones, then a tiny."""
    friendly = (
        Case(dtype=dtype, seqlen_q=128, seqlen_k=128, head_dim=dim, head_dim_v=dim)
        for dim in (64, 128)
    )
    return (*friendly, Case(dtype=dtype))


def _hints(function: Callable[..., Any], inputs: Inputs) -> dict[str, Any]:
    """The hints that a function names."""
    names, _ = named_keywords(function)
    return {name: value for name, value in inputs.hints.items() if name in names}


def _unless_named(
    function: Callable[..., Any] | None, attribute: str, *keywords: str
) -> str | None:
    """None if the function takes these keywords, else the reason."""
    if function is None:
        also = " and no cu_seqlens_q" if attribute == "varlen" else ""
        return f"no attribute `{attribute}`{also}"
    names, takes_any = named_keywords(function)
    lacking = [keyword for keyword in keywords if keyword not in names and not takes_any]
    return f"its signature does not name {', '.join(lacking)}" if lacking else None


def _poisoned(
    function: Callable[..., Any], inputs: Inputs, results: tuple[str, ...]
) -> dict[str, np.ndarray]:
    """Memory full of NaN for those results that a function names as keywords."""
    names, _ = named_keywords(function)
    wide = numpy_dtype(output_type(inputs.dtype)), (*inputs.q.shape[:-1], inputs.v.shape[-1])
    kinds = {"out": wide} | {
        f"d{name}": (inputs.q.dtype, getattr(inputs, name).shape) for name in "qkv"
    }
    return {
        name: np.full(kinds[name][1], np.nan, kinds[name][0]) for name in results if name in names
    }


def _array(name: str, value: Any, shape: tuple[int, ...]) -> np.ndarray:
    """A result as a NumPy array of the right shape, or AssertionError."""
    array = readable(name, value)
    if array.shape != shape:
        raise AssertionError(f"{name} must have shape {shape}; got {array.shape}")
    if array.dtype.kind not in "fV":  # V: the types of ml_dtypes
        raise AssertionError(f"{name} must hold floating-point numbers; got dtype {array.dtype}")
    return array
