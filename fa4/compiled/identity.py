"""The key of a compiled kernel: a hash of everything that its code depends on.

Specs are encoded as nested tuples of plain values. Numbers that are equal encode alike, as do specs
that compare equal. A callable (score_mod, mask_mod) encodes as its source, its bytecode, its
closure and the globals that it names, all the way down; where that cannot be done soundly it is
refused, and the kernel is not kept on disk.
"""

from __future__ import annotations

import builtins
import dataclasses
import dis
import enum
import functools
import hashlib
import inspect
import numbers
import os
import platform
import sys
import types
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from fa4.compiled.toolchain import Toolchain

ROOT = Path(__file__).resolve().parents[1]
# What the generated code depends on.
SOURCES = ("kit", "sm90", "sm100", "compiled", "masks", "plan", "config.py", "hardware.py")

# Modules whose objects are named, not opened: their content is in the key by other means (the
# sources above, the compiler's version, Python's version).
_OWN = tuple(f"fa4.{name.removesuffix('.py')}" for name in SOURCES)
_PACKAGES = {"cutlass", "cuda", *sys.stdlib_module_names}
# Builtins through which code reaches what its text does not name.
_OPAQUE = {"eval", "exec", "getattr", "globals", "locals", "vars", "__import__", "open", "compile"}
# What cute.jit and its kin note on the function that they decorate.
_MARKS = ("_decorator_kind", "_preprocess_enabled")
# Variables of CuTe-DSL that choose folders and artefacts, not code; the architecture is its own.
_HARMLESS = {"CUTE_DSL_ARCH", "CUTE_DSL_KEEP", "CUTE_DSL_DUMP_DIR", "CUTE_DSL_CACHE_DIR"}


class NotHashable(ValueError):
    """A value whose meaning cannot be captured in a key; the message says which and why."""


def kernel_key(spec: Any, arch: str, toolchain: Toolchain, compiler: str) -> str:
    """The key of a kernel, 40 hexadecimal digits. Raises NotHashable.

    compiler: the name of the function that compiles, "module.name".
    """
    environment = sorted(
        (name, value)
        for name, value in os.environ.items()
        if name.startswith("CUTE_DSL_") and name not in _HARMLESS
    )
    parts = (
        encode(spec),
        arch,
        compiler,
        (toolchain.version, toolchain.flavour, toolchain.fingerprint),
        (*sys.version_info[:2], platform.machine(), sys.platform),
        tuple(environment),
        source_hash(),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:40]


@lru_cache(maxsize=1)
def source_hash() -> str:
    """SHA-256 of the sources that generate code, as they are when first asked for."""
    digest = hashlib.sha256()
    for name in SOURCES:
        path = ROOT / name
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        for file in files:
            text = file.read_bytes()
            digest.update(f"{file.relative_to(ROOT).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def describe(spec: Any) -> dict[str, Any]:
    """The fields of a spec that differ from their defaults, as plain data for people."""
    found = {}
    for field in dataclasses.fields(spec):
        value, default = getattr(spec, field.name), field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if value != default:
            found[field.name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "arch"):  # a machine
        return value.arch
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return describe(value)
    return getattr(value, "__qualname__", type(value).__name__)


def spec_text(described: Mapping[str, Any]) -> str:
    """A described spec in one line: "head_dim=128 causal numerics.exp2.frequency=16"."""
    return " ".join(_words(described))


def _words(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _words(value, f"{prefix}{name}.")
        else:
            yield prefix + (name if value is True else f"{name}={value}")


def encode(value: Any) -> Any:
    """A nested tuple of plain values that is equal for equal values only. Raises NotHashable."""
    try:
        return _Encoder().encode(value)
    except RecursionError:
        raise NotHashable(
            "a value that contains itself cannot be captured in a cache key"
        ) from None


class _Encoder:
    """One walk. Functions met again (recursion, shared helpers) encode as their number."""

    def __init__(self) -> None:
        self._met: dict[int, int] = {}
        self._alive: list[Any] = []

    def encode(self, value: Any) -> Any:
        """Encodes by kind; refuses what has none."""
        if value is None or value is Ellipsis or isinstance(value, (str, bytes)):
            return value
        if isinstance(value, enum.Enum):
            return ("enum", _full_name(type(value)), value.name)
        if isinstance(value, numbers.Real):
            plain: Any = value.item() if hasattr(value, "item") else value
            return _number(plain)
        if isinstance(value, (tuple, list)):
            return (type(value).__name__, *map(self.encode, value))
        if isinstance(value, (set, frozenset)):
            return ("set", *sorted(map(repr, map(self.encode, value))))
        if isinstance(value, Mapping):
            items = ((repr(self.encode(k)), self.encode(v)) for k, v in value.items())
            return ("map", *sorted(items, key=lambda item: item[0]))
        if (name := _known_name(value)) is not None:
            return ("named", name)
        return self._encode_object(value)

    def _encode_object(self, value: Any) -> Any:
        if isinstance(value, types.CodeType):
            return self._code(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, functools.partial):
            return ("partial", *map(self.encode, (value.func, value.args, value.keywords)))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            if _is_known(type(value).__module__):
                return self._dataclass(value)
        elif _top(type(value).__module__) == "cutlass" and hasattr(value, "value"):
            return ("constant", _full_name(type(value)), self.encode(value.value))
        raise NotHashable(f"{_describe(value)} cannot be in a cache key")

    def _dataclass(self, value: Any) -> Any:
        fields = [
            (field.name, self.encode(getattr(value, field.name)))
            for field in dataclasses.fields(value)
            if field.compare
        ]
        return ("dataclass", _full_name(type(value)), *fields)

    def _function(self, function: types.FunctionType) -> Any:
        if id(function) in self._met:
            return ("again", self._met[id(function)])
        self._met[id(function)] = len(self._met)
        self._alive.append(function)
        decorated = getattr(function, "__wrapped__", None)
        if decorated is not None and _top(function.__globals__.get("__name__", "")) == "cutlass":
            # cute.jit and its kin: a wrapper of cutlass around the user's function.
            marks = [repr(getattr(decorated, name, None)) for name in _MARKS]
            return ("decorated", *marks, self._attributes(function), self.encode(decorated))
        # Compilation replaces the code of such a function by what it makes of it.
        code = getattr(function, "_original_code", function.__code__)
        outside = [(name, self.encode(value)) for name, value in _outside(function, code)]
        return (
            "function",
            function.__name__,
            _source(code),
            self._code(code),
            self.encode(function.__defaults__),
            self.encode(function.__kwdefaults__),
            repr(function.__annotations__),
            self._attributes(function),
            *outside,
        )

    def _attributes(self, function: types.FunctionType) -> Any:
        """What the user has set on a function; names with one underscore are cutlass's."""
        return self.encode(
            {
                name: value
                for name, value in vars(function).items()
                if name != "__wrapped__" and (name.startswith("__") or not name.startswith("_"))
            }
        )

    def _code(self, code: types.CodeType) -> Any:
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        return ("code", code.co_code, *names, *counts, self.encode(code.co_consts))


def _outside(function: types.FunctionType, code: types.CodeType) -> Iterator[tuple[str, Any]]:
    """What a function takes from around it: closure cells, then globals, by name."""
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield name, _content(cell, f"{function.__qualname__} uses {name}, which is not set yet")
    names = set(_names(function.__qualname__, code))
    for name in sorted(names):
        if name in function.__globals__:
            value = function.__globals__[name]
            if isinstance(value, types.ModuleType) and _known_name(value) is None:
                yield from _from_module(value, name, names, set())
            else:
                yield name, value
        elif name in _OPAQUE and hasattr(builtins, name):
            raise NotHashable(f"{function.__qualname__} calls {name}(), which can reach anything")


def _content(cell: types.CellType, problem: str) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        raise NotHashable(problem) from None


def _from_module(
    module: types.ModuleType, path: str, names: set[str], seen: set[int]
) -> Iterator[tuple[str, Any]]:
    """The attributes of a user's module, and of modules in it, that the code names."""
    seen.add(id(module))
    for name in sorted(names):
        value = vars(module).get(name)
        if isinstance(value, types.ModuleType) and _known_name(value) is None:
            if id(value) not in seen:
                yield from _from_module(value, f"{path}.{name}", names, seen)
        elif name in vars(module):
            yield f"{path}.{name}", value


def _names(owner: str, code: types.CodeType) -> Iterator[str]:
    """Every name in a function's code and in the functions inside it. Refuses imports."""
    for instruction in dis.get_instructions(code):
        imported = str(instruction.argval)
        if instruction.opname == "IMPORT_NAME" and not _is_known(imported):
            raise NotHashable(f"{owner} imports {imported} when called; import it at the top")
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(owner, constant)


def _source(code: types.CodeType) -> str | None:
    """The text of a function, which cute.jit reads besides its code; None where there is none."""
    try:
        return inspect.getsource(code)
    except (OSError, TypeError, SyntaxError, IndexError):
        return None


def _number(value: float) -> Any:
    """Numbers that compare equal encode alike: True and 1, 8 and 8.0, 0.0 and -0.0."""
    if isinstance(value, float) and not value.is_integer():
        return ("float", value.hex())
    return int(value)


def _known_name(value: Any) -> str | None:
    """The dotted name of a module, class or function that is named, not opened; None otherwise."""
    if isinstance(value, types.ModuleType):
        return value.__name__ if _is_known(value.__name__) else None
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or not _is_known(module):
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}.{name}" if found is value else None


def _is_known(module: str) -> bool:
    return _top(module) in _PACKAGES or module.startswith(_OWN)


def _top(module: str) -> str:
    return module.partition(".")[0]


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _describe(value: Any) -> str:
    name = getattr(value, "__qualname__", None)
    return f"{name} ({type(value).__name__})" if name else f"a {_full_name(type(value))}"
