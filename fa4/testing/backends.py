"""Back ends by name: ours, other libraries' through `fa4.testing.adapters`, and anybody's.

reference, oracle                 ours
torch-sdpa, flash-attn-2, ...     a library, where it is installed
module:function                   a function on NumPy arrays (see `fa4.testing.contract`)
module:forward,module:backward    a pair
torch:module:function             a function on torch tensors; its gradients through autograd
torch:cuda:module:function        the same on a GPU
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fa4
from fa4.testing.adapters import ADAPTERS, load_adapter
from fa4.testing.contract import DTYPES, FP8, Backend
from fa4.testing.refusals import BackendFailed, NotCovered, named_keywords

__all__ = [
    "BUILT_IN",
    "DTYPES",
    "FP8",
    "Backend",
    "BackendFailed",
    "NotCovered",
    "import_name",
    "is_loadable",
    "list_backends",
    "load_backend",
    "named_keywords",
]

BUILT_IN = ("reference", "oracle", *ADAPTERS)


def import_name(function: Callable[..., Any]) -> str | None:
    """ "module:function" if that is where the function can be imported from."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    found: Any = sys.modules.get(module or "")
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is function and module != "__main__" else None


def is_loadable(name: str) -> bool:
    """Is this a name for `load_backend`, as opposed to the bare name of a function?"""
    return name in BUILT_IN or ":" in name


def load_backend(name: str | Callable[..., Any] | Backend) -> Backend:
    """A back end by name; the module says which names there are.

    Modules are found as Python finds them, and in the current directory too. A callable is wrapped,
    a Backend returned. Raises ValueError with one line for a name that leads nowhere, and for a
    library that is not installed.
    """
    if isinstance(name, Backend):
        return name
    if not isinstance(name, str):
        if not callable(name):
            raise ValueError(f"a back end must be a name or a callable; got {name!r}")
        backend = _wrap(name, import_name(name) or str(getattr(name, "__name__", "function")))
        backend.importable = is_loadable(backend.name)
        return backend
    if name in ("reference", "oracle"):
        return _fa4_backend(name)
    if name in ADAPTERS:
        return load_adapter(name)
    forward, comma, backward = name.partition(",")
    backend = _wrap(_resolve(forward, name), name)
    if comma:
        backend.backward = _resolve(backward, name)
    return backend


def _wrap(function: Callable[..., Any], name: str) -> Backend:
    try:
        return Backend.wrap(function, name)
    except TypeError as error:
        raise ValueError(f"the back end {name!r}: {error}") from error


def _resolve(part: str, name: str) -> Callable[..., Any]:
    """The function on NumPy arrays of one part of a name, "[torch:[device:]]module:function"."""
    if not part.startswith("torch:") or part.count(":") < 2:
        return _import(part, name)
    from fa4.testing.torch_function import numpy_function

    where, _, function = part.removeprefix("torch:").rpartition(":")
    device, _, module = where.rpartition(":")
    return numpy_function(_import(f"{module}:{function}", name), device or None)


def _import(part: str, name: str) -> Callable[..., Any]:
    module, colon, attribute = part.partition(":")
    if not colon or not module or not attribute or ":" in attribute or "," in attribute:
        raise ValueError(
            f'the back end must be one of {", ".join(BUILT_IN)} or "module:function", '
            f'"module:forward,module:backward" or "torch:module:function"; got {name!r}'
        )
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may fail in any way while it is imported
        why = " ".join(
            (str(error) if isinstance(error, Exception) else f"raised {error!r}").split()
        )
        raise ValueError(f"cannot import {module!r} of the back end {name!r}: {why}") from error
    finally:
        if added:
            sys.path.remove(here)
    for step in attribute.split("."):
        if not hasattr(found, step):
            raise ValueError(f"module {module!r} has no {attribute!r}; the back end was {name!r}")
        found = getattr(found, step)
    if not callable(found):
        raise ValueError(f"the back end must be callable; {name!r} is a {type(found).__name__}")
    return found


def _fa4_backend(impl: str) -> Backend:
    """Our reference or oracle."""
    varlen_keys = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "page_table")

    def backward(
        *arrays: Any, dlse: Any = None, out_residual: Any = None, **options: Any
    ) -> tuple[Any, ...]:
        packed = any(name in options for name in varlen_keys)
        run: Any = fa4.flash_attn_varlen_backward if packed else fa4.flash_attn_backward
        more = {"dlse": dlse, "out_residual": out_residual}
        return tuple(run(*arrays, **more, impl=impl, **options))

    return Backend(
        name=impl,
        function=partial(fa4.flash_attn_func, impl=impl),
        varlen=partial(fa4.flash_attn_varlen_func, impl=impl),
        backward=backward,
        fa4_dropout=True,
        claims=frozenset({"robustness", "deterministic"}),
    )


def list_backends() -> list[dict[str, str]]:
    """Name, description and what is missing here ("" if nothing) of every back end in BUILT_IN."""
    rows = [
        {"name": "reference", "description": "FlashAttention-4's order of operations in NumPy"},
        {"name": "oracle", "description": "the definition in float64"},
    ]
    for name, module in ADAPTERS.items():
        text = (importlib.import_module(f"fa4.testing.adapters.{module}").__doc__ or "").strip()
        rows.append({"name": name, "description": text.partition("\n")[0].rstrip(".")})
    return [row | {"missing": _missing(row["name"])} for row in rows]


def _missing(name: str) -> str:
    """Why a back end cannot be loaded here; "" if it can."""
    try:
        load_backend(name)
    except ValueError as error:
        return str(error)
    return ""
