"""From a spec to a kernel that can be called: in this process, from disk, or compiled now."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeAlias

from fa4.compiled.artifact import CompiledKernel, Compiler, compile_artifact
from fa4.compiled.cache import KernelCache, open_cache, say_once
from fa4.compiled.identity import NotHashable, kernel_key
from fa4.compiled.support import FAMILIES
from fa4.compiled.toolchain import MISSING, find_toolchain
from fa4.designs import design_of_spec
from fa4.designs.design import Compilation, named
from fa4.sm90.backward.spec import WarpgroupBackwardSpec
from fa4.sm90.forward.spec import WarpgroupSpec
from fa4.sm90.wide.spec import WideBackwardSpec
from fa4.sm100.backward.spec import BackwardSpec
from fa4.sm100.forward.spec import ForwardSpec
from fa4.sm100.halves.spec import HalvesSpec

Spec: TypeAlias = (
    ForwardSpec
    | HalvesSpec
    | BackwardSpec
    | WarpgroupSpec
    | WarpgroupBackwardSpec
    | WideBackwardSpec
)

_MOST_IN_MEMORY = 256

_made: dict[Any, CompiledKernel] = {}
_compiling = threading.RLock()  # CuTe-DSL compiles one thing at a time


def build(spec: Spec, arch: str = "sm_100a", *, compiler: Compiler | None = None) -> CompiledKernel:
    """What a spec selects, compiled at most once per process and, with the cache, per machine.

    arch: "sm_100a" (B200), "sm_103a" (B300) or, of the specs of `fa4.sm90`, "sm_90a" (H100,
    H200).
    compiler: instead of `compile_kernel`, with its signature. Raises ValueError for another arch or
    a spec that does not fit the machine, ImportError if CuTe-DSL is not installed.
    """
    family = how_compiled(spec).family
    archs = [name for name, found in FAMILIES.items() if found == family]
    if arch not in archs:
        raise ValueError(f"arch must be one of {', '.join(archs)}; got {arch!r}")
    compiler = compiler or compile_kernel
    key = find_key(spec, arch, compiler)
    name = key or (spec, arch, _name(compiler))
    with _compiling:
        if name not in _made:
            artifact = _fetch(spec, arch, compiler, key)
            if len(_made) >= _MOST_IN_MEMORY:
                _made.pop(next(iter(_made)))
            _made[name] = artifact
        return _made[name]


def compile_kernel(spec: Spec, arch: str) -> Any:
    """The real compiler, imported when something has to be compiled. Raises ImportError."""
    try:
        import cutlass  # noqa: F401
        import tvm_ffi  # noqa: F401
    except ImportError:
        raise ImportError(MISSING) from None
    return named(how_compiled(spec).compiler)(spec, arch)


def how_compiled(spec: Spec) -> Compilation:
    """How a spec's kernel is made. Raises TypeError for what is no spec."""
    compiled = design_of_spec(spec).compiled
    assert compiled is not None  # that is how it was found
    return compiled


def find_key(spec: Spec, arch: str, compiler: Compiler = compile_kernel) -> str:
    """The key that a kernel is kept under; "" if its callables cannot be hashed, which is said."""
    if spec.score_mod is None and spec.mask_mod is None and spec.mask is None:
        return _plain_key(spec, arch, _name(compiler))
    # Callables may refer to globals that have changed since.
    try:
        return kernel_key(spec, arch, find_toolchain(), _name(compiler))
    except NotHashable as error:
        say_once(f"the kernel is not kept in the cache: {error}")
        return ""


@lru_cache(maxsize=1024)
def _plain_key(spec: Spec, arch: str, compiler: str) -> str:
    return kernel_key(spec, arch, find_toolchain(), compiler)


def _fetch(spec: Spec, arch: str, compiler: Compiler, key: str) -> CompiledKernel:
    cache = open_cache() if key else None
    if cache is None:
        return compile_artifact(spec, arch, compiler, key)
    return cache.load(key, spec) or _compile_once(cache, key, spec, arch, compiler)


def _compile_once(
    cache: KernelCache, key: str, spec: Spec, arch: str, compiler: Compiler
) -> CompiledKernel:
    with cache.lock(key):
        # Whoever held the lock before has probably made it.
        artifact = cache.load(key, spec)
        if artifact is None:
            artifact = compile_artifact(spec, arch, compiler, key)
            cache.store(artifact)
        return artifact


def _name(compiler: Callable[..., Any]) -> str:
    return f"{compiler.__module__}.{compiler.__qualname__}"
