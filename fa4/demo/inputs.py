"""Where the demo's queries, keys and values come from: a text read by MiniLM, or a file of arrays.

Either way the result is a `LayerSource`: named layers, computed one at a time.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from fa4.base.files import read_bytes, require_regular
from fa4.demo.minilm import MiniLM, find_model

DEFAULT_TEXT = "attention.txt"  # beside this module
ARRAY_NAME = re.compile(r"(?:(?P<layer>.+)\.)?(?P<part>[qkv])")


@dataclass(frozen=True)
class Layer:
    """q, k, v (B, S, H, D), or (total, H, D) with the offsets cu_seqlens (B+1,) of sequences.

    `place` is where they come from, for error messages.
    """

    name: str
    place: str
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    cu_seqlens: np.ndarray | None = None


@dataclass(frozen=True)
class LayerSource:
    """What is measured: a description for the report, the number of layers, and the layers."""

    about: dict[str, Any]
    num_layers: int
    layers: Iterator[Layer]


def read_text(path: Path | None) -> str:
    """The text of a UTF-8 file, or of the essay that comes with the package."""
    if path is None:
        return resources.files("fa4.demo").joinpath(DEFAULT_TEXT).read_text(encoding="utf-8")
    raw = read_bytes(path)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} must be UTF-8 text; got byte 0x{raw[error.start]:02x} at position "
            f"{error.start} ({error.reason})"
        ) from None


def text_source(path: Path | None, max_chunks: int) -> LayerSource:
    """The attention layers of MiniLM reading a text, cut into chunks of up to 512 tokens.

    The last chunk may be shorter: the chunks are one variable-length batch. Chunks after the first
    `max_chunks` are left out; the description says how many tokens there were.
    """
    text = read_text(path)
    model = MiniLM(find_model())
    chunks = model.encode(text)
    if not chunks:
        raise ValueError(f"{path} must hold at least one word; got {len(text)} characters")
    used = chunks[:max_chunks]
    about = {
        "kind": "text",
        "path": f"fa4/demo/{DEFAULT_TEXT}" if path is None else str(path),
        "model": "MiniLM-L6-v2",
        "tokens_in_text": sum(map(len, chunks)),
        "tokens_used": sum(map(len, used)),
        "chunk_lengths": [len(chunk) for chunk in used],
    }
    return LayerSource(about, model.num_layers, _text_layers(model, used))


def _text_layers(model: MiniLM, chunks: list[np.ndarray]) -> Iterator[Layer]:
    cu_seqlens = np.cumsum([0, *(len(chunk) for chunk in chunks)])
    for number, (q, k, v, _) in enumerate(model.read(chunks)):
        yield Layer(f"layer{number}", "MiniLM-L6-v2", q, k, v, cu_seqlens)


def file_source(path: Path) -> LayerSource:
    """The layers in a .npz or .safetensors file.

    Arrays are called q, k, v (one layer) or <layer>.q, <layer>.k, <layer>.v, and are (S, H, D) or
    (B, S, H, D); other names are ignored. Raises ValueError naming the file and what is wrong.
    """
    arrays = _load_arrays(path)
    grouped: dict[str, dict[str, np.ndarray]] = {}
    for name, array in arrays.items():
        found = ARRAY_NAME.fullmatch(name)
        if found:
            grouped.setdefault(found["layer"] or "", {})[found["part"]] = array
    listed = ", ".join(sorted(arrays)) or "no arrays"
    if not grouped:
        raise ValueError(f"{path} must hold q, k, v or <layer>.q, .k, .v; found {listed}")
    layers = []
    for name in sorted(grouped, key=_natural_order):
        missing = [part for part in "qkv" if part not in grouped[name]]
        prefix = f"{name}." if name else ""
        if missing:
            raise ValueError(f"{path} lacks {prefix}{missing[0]}; found {listed}")
        parts = {part: _check_array(path, prefix + part, grouped[name][part]) for part in "qkv"}
        layers.append(Layer(name or "qkv", str(path), **parts))
    about = {"kind": "arrays", "path": str(path)}
    return LayerSource(about, len(layers), iter(layers))


def _natural_order(name: str) -> list[tuple[int, str]]:
    """layer2 before layer10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _check_array(path: Path, name: str, array: np.ndarray) -> np.ndarray:
    """The array as (B, S, H, D), if it is of floating-point numbers and none is NaN or infinite."""
    if array.ndim not in (3, 4):
        raise ValueError(
            f"{path}: {name} must be (S, H, D) or (B, S, H, D); got shape {array.shape}"
        )
    if array.size == 0:
        raise ValueError(f"{path}: {name} must not be empty; got shape {array.shape}")
    # ml_dtypes' types are of kind "V" or "f", depending on the version.
    if array.dtype.kind not in "fV" or array.dtype.fields is not None:
        raise ValueError(f"{path}: {name} must hold floating-point numbers; got {array.dtype}")
    finite = np.isfinite(array.astype(np.float64))
    if not finite.all():
        at = tuple(int(i) for i in np.argwhere(~finite)[0])
        raise ValueError(f"{path}: {name} must be finite; got {array[at]} at {list(at)}")
    return array[None] if array.ndim == 3 else array


def _load_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of a .npz or .safetensors file by name; pickled objects are refused."""
    try:
        with require_regular(path).open(
            "rb"
        ) as file:  # an unreadable file is an OSError with its name
            if path.suffix == ".npz":
                with np.load(file, allow_pickle=False) as archive:
                    return {name: archive[name] for name in archive.files}
            if path.suffix == ".safetensors":
                return _load_safetensors(path)
    except (ValueError, EOFError, KeyError, AttributeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a readable {path.suffix} file: {error}") from None
    raise ValueError(f"--input must be a .npz or .safetensors file; got {path}")


def _load_safetensors(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a .safetensors file, bf16 included."""
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import load_file
    except ImportError:
        raise ImportError(
            f"{path} needs safetensors, not installed here: pip install safetensors"
        ) from None
    try:
        return load_file(path)
    except (SafetensorError, TypeError) as error:  # TypeError: an element type NumPy lacks
        raise ValueError(str(error)) from None
