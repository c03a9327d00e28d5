"""Kernel arguments written as text, for the command line.

    f32[1024]=random              pointer to an array of 1024 numbers
    x:bf16[128,64]=x.npy          the same, called x in findings and outputs
    a:f16[64,64]=a.npy tma box=64,64 swizzle=128     tensor map of an array
    @x     @x tma box=8,64        an array that was given before, once more
    i32=5     f32=0.5             a number
    bytes=descriptor.bin          the bytes of a file
    x:f32[8]=ones; i32=8          a struct of several, each at a multiple of its size

Sources of an array: zeros, ones, arange, random (seeded; floats standard normal, integers over
their whole range), empty (never written: a read of it is a finding), a number, FILE.npy,
FILE.npz:NAME. `f32[]=x.npy` takes its shape from the file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from fa4.emulator.errors import LaunchError
from fa4.emulator.host.addresses import ALIGNMENT_BYTES
from fa4.emulator.host.ptx_launch import Tma
from fa4.emulator.machine.unwritten import fill
from fa4.emulator.warp_lanes import Array

TYPES: dict[str, Any] = {
    **{f"{sign}{bits}": f"{kind}{bits}" for bits in (8, 16, 32, 64)
       for sign, kind in (("i", "int"), ("s", "int"), ("u", "uint"))},
    "f16": np.float16, "f32": np.float32, "f64": np.float64,
    "bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2,
}  # fmt: skip
MAX_ARRAY_BYTES = 1 << 34

_NAME = re.compile(r"([A-Za-z_]\w*):(.*)", re.DOTALL)
_ARRAY = re.compile(r"(\w+)\[([\d,\s]*)\]=(.+)", re.DOTALL)
_SCALAR = re.compile(r"(\w+)=(.+)", re.DOTALL)
_FORMS = "TYPE=NUMBER, TYPE[SHAPE]=SOURCE, bytes=FILE or @NAME"


def parse_arguments(texts: Sequence[str], seed: int = 0) -> dict[str, Any]:
    """Values for `make_launch`, by name ("arg0" where none is given).

    seed: of `random`; every argument draws numbers of its own. Raises LaunchError, which shows the
    argument, for what is not written as above and for files that cannot be read.
    """
    arrays: dict[str, Array] = {}
    values: dict[str, Any] = {}
    for index, text in enumerate(texts):
        try:
            name, value = _parse_argument(index, text, arrays, seed)
        except (LaunchError, OSError) as error:
            reason = str(error)
            if isinstance(error, OSError) and error.strerror:
                reason = f"{error.strerror}: {error.filename}"
            raise LaunchError(f"--arg {text}: {reason}") from error
        if name in values:
            name = f"arg{index}"
        values[name] = value
    return values


def _parse_argument(index: int, text: str, arrays: dict[str, Array], seed: int) -> tuple[str, Any]:
    """(name, value) of one argument, a struct if it has several parts."""
    name = f"arg{index}"
    parts = [part.strip() for part in text.split(";") if part.strip()]
    if not parts:
        raise LaunchError(f"expected {_FORMS}")
    if len(parts) == 1:
        return _parse_one(name, parts[0], arrays, (seed, index))
    return name, tuple(
        _parse_one(f"{name}.{field}", part, arrays, (seed, index, field))[1]
        for field, part in enumerate(parts)
    )


def arrays_of(values: dict[str, Any]) -> dict[str, Array]:
    """The arrays among parsed values, by name; those in structs are called "arg0.1"."""
    found: dict[int, tuple[str, Array]] = {}
    for name, value in values.items():
        fields = value if isinstance(value, tuple) else (value,)
        for index, field in enumerate(fields):
            array = field.array if isinstance(field, Tma) else field
            if isinstance(array, np.ndarray):
                inner = f"{name}.{index}" if isinstance(value, tuple) else name
                found.setdefault(id(array), (inner, array))
    return dict(found.values())


def _parse_one(
    name: str, text: str, arrays: dict[str, Array], seed: Sequence[int]
) -> tuple[str, Any]:
    """(name, value) of one argument or field; arrays are entered in `arrays`."""
    if match := _NAME.fullmatch(text):
        name, text = match[1], match[2]
        if name in arrays:
            raise LaunchError(f"two arrays are called {name}")
    text, tma, modes = f"{text} ".partition(" tma ")
    text = text.strip()
    if text.startswith("@"):
        if text[1:] not in arrays:
            raise LaunchError(f"no array of this name before it; {_known(arrays)}")
        value: Any = arrays[text[1:]]
    elif match := _ARRAY.fullmatch(text):
        value = arrays[name] = _read_array(match[1], match[2], match[3].strip(), seed)
    elif match := _SCALAR.fullmatch(text):
        value = _read_scalar(match[1], match[2].strip())
    else:
        raise LaunchError(f"expected {_FORMS}")
    if tma:
        if not isinstance(value, np.ndarray):
            raise LaunchError("only an array has a tensor map")
        value = _read_tma(value, modes)
    return name, value


def _known(arrays: dict[str, Array]) -> str:
    return f"there are {', '.join(arrays)}" if arrays else "there are none"


def _dtype(name: str) -> np.dtype[Any]:
    if name not in TYPES:
        raise LaunchError(f"type {name!r}: allowed are {', '.join(TYPES)}")
    return np.dtype(TYPES[name])


def _number(text: str, dtype: np.dtype[Any]) -> Any:
    """A number of this type. Raises LaunchError if it is none, or does not fit."""
    try:
        if dtype.kind in "iu":
            return np.array(int(text, 0), dtype)[()]
        return np.array(float(text), np.float64).astype(dtype)[()]
    except (ValueError, OverflowError):
        raise LaunchError(f"{text!r} is not a number of type {dtype}") from None


def _read_scalar(kind: str, text: str) -> Any:
    if kind == "bytes":
        return Path(text).read_bytes()
    return _number(text, _dtype(kind))


def _read_array(kind: str, shape_text: str, source: str, seed: Sequence[int]) -> Array:
    dtype = _dtype(kind)
    try:
        shape = tuple(int(size) for size in shape_text.split(",")) if shape_text.strip() else None
    except ValueError:
        raise LaunchError(f"shape [{shape_text}]: sizes with commas between them") from None
    if ".npz:" in source or source.endswith((".npy", ".npz")):
        return _convert(_load(source), dtype, shape, source)
    if shape is None:
        raise LaunchError(f"{kind}[]={source}: only files have a shape of their own")
    array = allocate(shape, dtype)
    if source == "empty":
        fill(array.ctypes.data, array.nbytes)
        return array
    with np.errstate(over="ignore"):
        array[...] = _generate(source, shape, dtype, seed)
    return array


def allocate(shape: tuple[int, ...], dtype: Any) -> Array:
    """Zeros at an address like one of cudaMalloc. Raises LaunchError for more than 16 GiB."""
    dtype = np.dtype(dtype)
    size_bytes = prod(shape) * dtype.itemsize
    if size_bytes > MAX_ARRAY_BYTES:
        raise LaunchError(f"an array of {size_bytes} bytes; at most {MAX_ARRAY_BYTES} are allowed")
    raw = np.zeros(size_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[start : start + size_bytes].view(dtype).reshape(shape)


def _generate(
    source: str, shape: tuple[int, ...], dtype: np.dtype[Any], seed: Sequence[int]
) -> Any:
    """The content of an array, from the name of a source or a number."""
    if source == "zeros":
        return np.zeros((), dtype)
    if source == "ones":
        return np.ones((), dtype)
    if source == "arange":
        return np.arange(prod(shape)).reshape(shape).astype(dtype)
    if source == "random":
        generator = np.random.default_rng(list(seed))
        if dtype.kind in "iu":
            limits = np.iinfo(dtype)
            return generator.integers(limits.min, limits.max, shape, dtype, endpoint=True)
        return generator.standard_normal(shape, np.float32).astype(dtype)
    try:
        return _number(source, dtype)
    except LaunchError:
        raise LaunchError(
            f"source {source!r}: zeros, ones, arange, random, empty, a number of this type, "
            "FILE.npy or FILE.npz:NAME"
        ) from None


def _load(source: str) -> Array:
    """An array of a .npy or .npz file. Raises LaunchError if it is none or holds objects."""
    path, _, name = source.partition(".npz:") if ".npz:" in source else (source, "", "")
    path += ".npz" if name else ""
    try:
        loaded = np.load(path)
    except (ValueError, EOFError) as error:
        raise LaunchError(f"{path} is not a NumPy file: {error}") from None
    if isinstance(loaded, np.ndarray):
        return loaded
    with loaded:
        if name not in loaded:
            raise LaunchError(f"{path} holds {', '.join(loaded)}: write {path}:NAME")
        array: Array = loaded[name]
        return array


def _convert(
    loaded: Array, dtype: np.dtype[Any], shape: tuple[int, ...] | None, source: str
) -> Array:
    """A loaded array as `dtype`, rounded where it must be. Raises LaunchError if it cannot be."""
    if shape is not None and loaded.shape != shape:
        raise LaunchError(f"{source} has shape {list(loaded.shape)}, not {list(shape)}")
    array = allocate(loaded.shape, dtype)
    if loaded.dtype.kind == "V" and loaded.dtype.itemsize == dtype.itemsize:
        array[...] = loaded.view(dtype)  # as NumPy saves the types of ml_dtypes
        return array
    kinds = "iub" if dtype.kind in "iu" else "iubf"
    if loaded.dtype.kind not in kinds:
        raise LaunchError(f"{source} holds {loaded.dtype}, which {dtype} cannot")
    with np.errstate(over="ignore"):
        array[...] = loaded.astype(dtype)
    if dtype.kind in "iu" and not np.array_equal(array, loaded):
        raise LaunchError(f"{source} holds numbers that do not fit {dtype}")
    return array


def _read_tma(array: Array, text: str) -> Tma:
    """box=ROWS,COLUMNS swizzle=BYTES, in any order."""
    modes = dict(word.partition("=")[::2] for word in text.split())
    try:
        box = tuple(int(size) for size in modes.pop("box").split(","))
        swizzle = int(modes.pop("swizzle", "0"))
    except (KeyError, ValueError):
        raise LaunchError("expected tma box=SIZES and perhaps swizzle=BYTES") from None
    if modes:
        raise LaunchError(f"tma {text}: {', '.join(modes)} is not known; box and swizzle are")
    return Tma(array, box, swizzle)
